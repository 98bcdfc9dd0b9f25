"""The state machine of a watch, with recorded sequences of messages."""

from __future__ import annotations

import random
import zlib

import grpc
import pytest
import zstandard

from kubefan import (
    Bookmark,
    Disconnected,
    Encoding,
    Event,
    Expired,
    Forbidden,
    OnExpired,
    Projection,
    Reconnected,
    Restarted,
    SnapshotBegin,
    SnapshotEnd,
    Target,
    Unauthenticated,
    Unavailable,
    Unreachable,
    WatchItem,
    WatchOptions,
)
from kubefan._watch_state import STREAM_SECONDS_MIN, WatchState
from kubefan.v1alpha1 import watch_pb2 as api

from .messages import begin, bookmark, catch_up_begin, catch_up_end, end, event, gap_begin, made

Code = grpc.StatusCode
PODS = Target("pods")
DEFAULTS = WatchOptions()


def state(options: WatchOptions = DEFAULTS) -> WatchState:
    return WatchState(PODS, options, "h:1", random.Random(1))


def opened(machine: WatchState, now: float = 0.0) -> api.WatchRequest:
    request = machine.request(now)
    assert request is not None
    machine.opened(now)
    return request


def synced(options: WatchOptions = DEFAULTS) -> WatchState:
    machine = state(options)
    opened(machine)
    for message in (begin("5"), event("ADDED", "a", "3"), end("5", 1)):
        machine.accept(message, 0.0)
    return machine


def test_a_watch_starts_with_a_snapshot_and_resumes_only_from_resume_versions() -> None:
    machine = state()
    request = opened(machine)
    assert (request.resource_version, request.cluster) == ("", "")
    assert request.on_lag == api.ON_LAG_CONFLATE
    assert request.on_expired == api.ON_EXPIRED_RESTART
    seen: list[WatchItem] = []
    versions = []
    for message in (
        begin("5"),
        event("ADDED", "a", "3"),
        end("5", 1),
        event("MODIFIED", "a", "7", "7"),
        gap_begin("7"),
        event("ADDED", "b", "9"),
        bookmark(""),
    ):
        seen += machine.accept(message, 0.0)
        versions.append(machine.resume_version)
    assert versions == ["", "", "5", "7", "7", "7", "7"]
    assert [type(item).__name__ for item in seen] == [
        "SnapshotBegin",
        "Event",
        "SnapshotEnd",
        "Event",
        "GapBegin",
        "Event",
        "Bookmark",
    ]
    again = machine.request(1.0)
    assert again is not None
    assert (again.resource_version, again.cluster) == ("7", "c1")


@pytest.mark.parametrize(
    ("version", "is_complete", "text"),
    [("218", True, "218.end"), ("218", False, "218"), ("218.1", False, "218.1")],
)
def test_a_version_is_sent_back_as_it_was_received(
    version: str, is_complete: bool, text: str
) -> None:
    machine = state()
    assert not opened(machine).HasField("version_is_complete")
    machine.accept(api.WatchResponse(version_is_complete=True), 0.0)
    assert machine.resume_version == ""
    response = api.WatchResponse(
        resume_version=version, version_is_complete=is_complete, bookmark=api.Bookmark()
    )
    assert machine.accept(response, 0.0) == [Bookmark(text)]
    assert machine.resume_version == text
    for request in (opened(machine), opened(state(WatchOptions(resource_version=text)))):
        assert request.resource_version == version
        assert request.HasField("version_is_complete")
        assert request.version_is_complete == is_complete


def test_a_cluster_counts_only_with_the_version_that_the_snapshot_ends_with() -> None:
    machine = synced(WatchOptions())
    machine.accept(begin("50", restarted_from="5", cluster="c2"), 0.0)
    assert (machine.resume_version, machine.cluster) == ("5", "c1")
    machine.accept(end("50"), 0.0)
    assert (machine.resume_version, machine.cluster) == ("50", "c2")


def test_a_break_is_reported_once_with_its_delay_and_its_end() -> None:
    machine = synced()
    lost = Unreachable("gone", code=Code.UNAVAILABLE)
    (item,) = machine.failed(lost, 10.0)
    assert isinstance(item, Disconnected)
    assert item.error is lost
    assert 0.8 <= item.retry_in <= 1.6
    assert machine.delay(10.0) == pytest.approx(item.retry_in)
    assert machine.request(12.0) is not None
    assert machine.opened(12.0) == [Reconnected(since="5")]
    assert machine.opened(12.0) == []


def test_a_delay_is_never_shorter_than_the_server_asks_for() -> None:
    machine = synced()
    (item,) = machine.failed(Unavailable("x", code=Code.UNAVAILABLE, retry_after=9.0), 0.0)
    assert isinstance(item, Disconnected)
    assert item.retry_in == 9.0


@pytest.mark.parametrize("reason", ["REBALANCED", "CONNECTION_AGE"])
def test_a_stream_that_is_moved_resumes_at_once_without_an_item(reason: str) -> None:
    machine = synced()
    moved = Unavailable("move", code=Code.UNAVAILABLE, reason=reason, retry_after=0.0)
    assert machine.failed(moved, 6.0) == []
    assert machine.delay(6.0) == 0.0
    opened(machine, 6.0)
    (item,) = machine.failed(moved, 7.0)
    assert isinstance(item, Disconnected), "moved at once is a failure"


@pytest.mark.parametrize("reason", ["DRAINING", "SWITCHED", "DISCONNECTED", "REAUTHENTICATE"])
def test_other_ends_are_breaks_and_resume(reason: str) -> None:
    machine = synced()
    ended = Unavailable("x", code=Code.UNAVAILABLE, reason=reason, retry_after=0.1)
    (item,) = machine.failed(ended, 60.0)
    assert isinstance(item, Disconnected)
    request = machine.request(62.0)
    assert request is not None
    assert request.resource_version == "5"


def test_an_error_that_a_retry_cannot_mend_ends_the_watch() -> None:
    machine = synced()
    denied = Forbidden("no", code=Code.PERMISSION_DENIED, reason="FORBIDDEN")
    with pytest.raises(Forbidden):
        machine.failed(denied, 1.0)
    assert machine.ended


def test_an_expired_version_restarts_or_fails_as_asked() -> None:
    old = Expired(
        "too old resource version: 5 (9)",
        code=Code.OUT_OF_RANGE,
        reason="RESOURCE_VERSION_TOO_OLD",
    )
    machine = synced()
    (item,) = machine.failed(old, 1.0)
    assert isinstance(item, Restarted)
    request = machine.request(3.0)
    assert request is not None
    assert (request.resource_version, request.cluster) == ("", "")
    with pytest.raises(Expired, match="list again"):
        synced(WatchOptions(on_expired=OnExpired.FAIL)).failed(old, 1.0)


def test_a_token_from_a_file_may_be_refused_once_it_was_accepted() -> None:
    refused = Unauthenticated("who?", code=Code.UNAUTHENTICATED, reason="UNAUTHENTICATED")
    fresh = state()
    assert fresh.request(0.0) is not None
    with pytest.raises(Unauthenticated):
        fresh.failed(refused, 0.0, token_may_change=True)
    answered = state()
    opened(answered)
    with pytest.raises(Unauthenticated):
        # The headers of the refusal came before its status.
        answered.failed(refused, 0.0, token_may_change=True)
    ended = state()
    opened(ended)
    old = Unavailable("log in again", code=Code.UNAVAILABLE, reason="REAUTHENTICATE")
    assert isinstance(ended.failed(old, 1.0, token_may_change=True)[0], Disconnected)
    assert isinstance(ended.failed(refused, 2.0, token_may_change=True)[0], Disconnected)
    assert isinstance(synced().failed(refused, 1.0, token_may_change=True)[0], Disconnected)
    with pytest.raises(Unauthenticated):
        synced().failed(refused, 1.0)


def test_the_timeout_counts_over_all_connections() -> None:
    machine = state(WatchOptions(timeout=10.0))
    assert opened(machine, 100.0).timeout_seconds == 10
    machine.failed(Unreachable("gone"), 104.0)
    assert machine.delay(109.9) == 0.0
    again = machine.request(107.5)
    assert again is not None
    assert again.timeout_seconds == 3
    machine.opened(107.5)
    assert machine.finished(110.0) == []
    assert machine.ended


def test_a_stream_has_a_limit_so_that_a_dead_proxy_is_noticed() -> None:
    machine = synced()
    opened(machine, 0.0)
    assert STREAM_SECONDS_MIN <= machine.call_seconds(0.0) <= 2 * STREAM_SECONDS_MIN + 3
    late = Unavailable("deadline", code=Code.DEADLINE_EXCEEDED)
    assert machine.failed(late, 700.0) == [], "no break for the caller"
    assert machine.delay(700.0) == 0.0


def test_a_server_that_ends_every_stream_at_once_is_not_asked_in_a_loop() -> None:
    machine = synced()
    opened(machine, 50.0)
    (item,) = machine.finished(50.1)
    assert isinstance(item, Disconnected)


def test_a_catch_up_moves_the_version_only_at_its_end() -> None:
    machine = synced()
    for message in (catch_up_begin("5"), event("DELETED", "a", "3", unknown=True)):
        machine.accept(message, 0.0)
    assert machine.resume_version == "5"
    machine.accept(catch_up_end("20"), 0.0)
    assert machine.resume_version == "20"


def test_an_unknown_message_of_a_newer_server_moves_the_version() -> None:
    machine = synced()
    assert machine.accept(api.WatchResponse(resume_version="6"), 0.0) == [Bookmark("6")]
    assert machine.resume_version == "6"


def test_a_projection_and_changes_only_are_asked_for() -> None:
    machine = state(WatchOptions(projection=Projection.fields("spec.nodeName"), only_changes=True))
    request = opened(machine)
    assert request.projection.type == api.PROJECTION_TYPE_FIELD_MASK
    assert list(request.projection.paths) == ["spec.nodeName"]
    assert request.projection.only_changes
    assert not opened(state()).HasField("projection")


def chunk(*events: api.Event) -> api.WatchResponse:
    content = b""
    for one in events:
        encoded = one.SerializeToString()
        assert len(encoded) < 128
        content += bytes([len(encoded)]) + encoded
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return api.WatchResponse(snapshot_chunk=api.SnapshotChunk(zstd=frame))


def delta(name: str, version: str, base: bytes, new: bytes) -> api.WatchResponse:
    dictionary = zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    compressor = zstandard.ZstdCompressor(
        dict_data=dictionary, write_checksum=True, write_dict_id=False
    )
    changed = made("MODIFIED", name, version)
    changed.object = b""
    changed.delta.base_crc32 = zlib.crc32(base)
    changed.delta.zstd = compressor.compress(new)
    return api.WatchResponse(resume_version=version, event=changed)


def test_chunks_and_deltas_become_events_with_whole_objects() -> None:
    machine = state(WatchOptions(encoding=Encoding.ZSTD_DELTA))
    assert not opened(machine).state_kept
    first = made("ADDED", "a", "3")
    items = []
    for message in (begin("5"), chunk(first, made("ADDED", "b", "4")), end("5", 2)):
        items += machine.accept(message, 0.0)
    assert [type(item) for item in items] == [SnapshotBegin, Event, Event, SnapshotEnd]
    (item,) = machine.accept(delta("a", "6", first.object, b'{"new":true}'), 0.0)
    assert isinstance(item, Event)
    assert (item.object.raw, item.object["new"]) == (b'{"new":true}', True)
    machine.failed(Unreachable("gone"), 1.0)
    assert opened(machine, 9.0).state_kept, "every object is here, as of the version"


def test_a_delta_with_a_wrong_base_is_asked_for_again_as_a_whole_object() -> None:
    machine = state(WatchOptions(encoding=Encoding.ZSTD_DELTA))
    opened(machine)
    for message in (begin("5"), event("ADDED", "a", "3"), end("5", 1)):
        machine.accept(message, 0.0)
    (item,) = machine.accept(delta("a", "6", b"other bytes", b"{}"), 0.0)
    assert isinstance(item, Disconnected)
    request = opened(machine, 9.0)
    assert (request.resource_version, request.state_kept) == ("5", False)
    assert request.encoding == api.ENCODING_ZSTD_DELTA


def test_a_span_that_broke_off_leaves_no_base_of_deltas() -> None:
    machine = synced(WatchOptions(encoding=Encoding.ZSTD_DELTA))
    for message in (gap_begin("5"), event("MODIFIED", "a", "7")):
        machine.accept(message, 0.0)
    machine.failed(Unreachable("gone"), 1.0)
    assert not opened(machine, 9.0).state_kept
    machine.accept(bookmark("5"), 9.0)
    machine.failed(Unreachable("gone"), 10.0)
    request = opened(machine, 19.0)
    assert (request.resource_version, request.state_kept) == ("5", False), "a is as of 7"


def test_above_the_memory_limit_the_watch_continues_without_deltas_in_the_same_form() -> None:
    machine = state(WatchOptions(encoding=Encoding.ZSTD_DELTA, delta_base_bytes_max=10))
    opened(machine)
    for message in (begin("5"), event("ADDED", "a", "3"), end("5", 1)):
        machine.accept(message, 0.0)
    machine.accept(delta("a", "6", b"x", b"{}"), 0.0)
    request = opened(machine, 9.0)
    assert request.encoding == api.ENCODING_ZSTD
    assert request.projection.drop_managed_fields
    assert not request.state_kept
