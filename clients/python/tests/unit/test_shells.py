"""The sync and the asyncio client, against a server with scripts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from kubefan import (
    BackoffOptions,
    Client,
    ClientOptions,
    Disconnected,
    Event,
    Forbidden,
    Reconnected,
    Stopped,
    Unauthenticated,
    Undecodable,
    Unreachable,
    aio,
)
from tests.recorder import KINDS, WAIT_SECONDS_MAX, Recorder

from .messages import begin, end, event, made
from .server import Server, fails, idle, sends

Code = grpc.StatusCode
FAST = BackoffOptions(initial=0.001, max=0.001)
FIRST = (begin("5"), event("ADDED", "a", "1"), end("5", 1))

pytestmark = pytest.mark.parametrize("kind", KINDS)


def names(seen: list[object]) -> list[str]:
    return [f"{one.type} {one.object.name}" for one in seen if isinstance(one, Event)]


def test_a_broken_watch_resumes_after_its_last_version(kind: str) -> None:
    lost = fails(Code.UNAVAILABLE, "DRAINING", delay=0.001)
    with (
        Server(sends(*FIRST, then=lost), sends(event("MODIFIED", "a", "7", "7"))) as server,
        Recorder(kind, server.address, "watch_items", "pods", backoff=FAST) as watch,
    ):
        watch.until(lambda seen: names(seen) == ["ADDED a", "MODIFIED a"], "the change")
        assert [request.resource_version for request in server.requests] == ["", "5"]
        assert [type(item) for item in watch.seen[3:5]] == [Disconnected, Reconnected]
        assert (watch.resume_version, watch.cluster) == ("7", "c1")


def test_a_refusal_ends_a_watch_with_its_error(kind: str) -> None:
    denied = fails(Code.PERMISSION_DENIED, "FORBIDDEN", 'pods is forbidden: User "u" cannot list')
    with Server(denied) as server:
        watch = Recorder(kind, server.address, "watch", "pods")
        watch.until_ended()
        (error,) = watch.errors
        assert isinstance(error, Forbidden)
        assert (error.reason, "cannot list" in str(error)) == ("FORBIDDEN", True)


def test_a_watch_ends_at_its_timeout_and_when_it_is_closed(kind: str) -> None:
    ends = sends(*FIRST, then=lambda *_: iter(()))
    with Server(ends, lambda *_: iter(())) as server:
        watch = Recorder(kind, server.address, "watch", "pods", timeout=0.3)
        watch.until_ended()
        assert (names(watch.seen), watch.errors) == (["ADDED a"], [])
    with Server(sends(*FIRST)) as server:
        watch = Recorder(kind, server.address, "watch", "pods")
        watch.until(len, "the first state")
        watch.close()
        assert watch.errors == []


def test_the_next_token_of_a_file_is_used_when_the_old_one_ends(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    ends = fails(Code.UNAVAILABLE, "REAUTHENTICATE", delay=0.001)
    refuses = fails(Code.UNAUTHENTICATED, "UNAUTHENTICATED")
    options = ClientOptions(token_file=str(file))
    rotated = threading.Event()

    def rotate(*_: object) -> object:
        file.write_text("second")
        rotated.set()
        return iter(())

    with (
        Server(
            sends(*FIRST, then=lambda *a: (rotate() and None) or ends(*a)),
            sends(event("MODIFIED", "a", "7", "7"), then=refuses),
            sends(event("MODIFIED", "a", "8", "8")),
            address=f"unix:{tmp_path}/socket",
        ) as server,
        Recorder(kind, server.address, "watch_items", "pods", options, backoff=FAST) as watch,
    ):
        watch.until(lambda seen: len(names(seen)) == 3, "both changes")
        assert server.tokens == ["Bearer first", "Bearer second", "Bearer second"]


def test_a_token_that_was_never_accepted_is_a_mistake(kind: str, tmp_path: Path) -> None:
    refuses = fails(Code.UNAUTHENTICATED, "UNAUTHENTICATED", "not known")
    with Server(refuses, address=f"unix:{tmp_path}/socket") as server:
        options = ClientOptions(token="secret")
        watch = Recorder(kind, server.address, "watch", "pods", options)
        watch.until_ended()
        assert isinstance(watch.errors[0], Unauthenticated)
        assert "secret" not in str(watch.errors[0])


def test_a_message_that_cannot_be_decoded_is_asked_for_again(kind: str) -> None:
    broken = event("MODIFIED", "a", "7", "7")
    broken.event.delta.zstd = b"nonsense"
    with (
        Server(sends(*FIRST, broken), sends(event("MODIFIED", "a", "7", "7"))) as server,
        Recorder(kind, server.address, "watch_items", "pods", backoff=FAST) as watch,
    ):
        watch.until(lambda seen: names(seen) == ["ADDED a", "MODIFIED a"], "the change")
        (item,) = [item for item in watch.seen if isinstance(item, Disconnected)]
        assert isinstance(item.error, Undecodable)
        assert [request.resource_version for request in server.requests] == ["", "5"]


def test_an_informer_survives_errors_and_reports_them(kind: str) -> None:
    with (
        Server(
            fails(Code.PERMISSION_DENIED, "FORBIDDEN"),
            sends(*FIRST, then=fails(Code.UNAVAILABLE, "STOPPED", delay=0.001)),
            sends(event("DELETED", "a", "7", "7")),
        ) as server,
        Recorder(kind, server.address, "informer", "pods", backoff=FAST) as informer,
    ):
        informer.until(lambda seen: "delete a" in seen, "the deletion")
        assert informer.seen == ["add a initial", "delete a"]
        assert len(informer.store) == 0
        assert [type(error).__name__ for error in informer.errors] == ["Forbidden", "Unavailable"]
        assert [request.resource_version for request in server.requests] == ["", "", "5"]


CALLS: dict[str, tuple[Any, ...]] = {
    "list": ("pods",),
    "get": ("pods", "a", "n"),
    "list_resources": (),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_read_without_a_complete_answer_ends_at_the_limit_of_the_caller(
    kind: str, method: str
) -> None:
    with Server() as server:
        with pytest.raises(Unreachable, match=r"no complete answer .* within 0\.5 s") as raised:
            read(kind, server.address, method, *CALLS[method], timeout=0.5)
        assert (raised.value.code, raised.value.is_retryable) == (Code.DEADLINE_EXCEEDED, True)
        # The server knows the limit, and need not continue. gRPC rounds a limit up on its way.
        assert all(limit < 1 for limit in server.limits)
        with pytest.raises(ValueError, match=r"timeout=0 is not possible"):
            read(kind, server.address, method, *CALLS[method], timeout=0)


def test_a_server_that_accepts_connections_and_never_answers_is_not_there(kind: str) -> None:
    options = ClientOptions(connect_timeout=0.2)
    with Server() as server, pytest.raises(Unreachable):
        if kind == "sync":
            Client.connect(server.address, options)
        else:
            asyncio.run(aio.Client.connect(server.address, options))


def read(kind: str, address: str, method: str, *arguments: Any, **keywords: Any) -> Any:
    if kind == "sync":
        with Client(address) as client:
            return getattr(client, method)(*arguments, **keywords)

    async def ask() -> Any:
        async with aio.Client(address) as client:
            return await getattr(client, method)(*arguments, **keywords)

    return asyncio.run(ask())


def test_an_error_of_a_handler_is_reported_and_the_next_call_follows(kind: str) -> None:
    def fail(text: str) -> None:
        if text.startswith("add"):
            raise LookupError(text)

    with (
        Server(sends(*FIRST, event("MODIFIED", "a", "6", "6"))) as server,
        Recorder(kind, server.address, "informer", "pods", on_call=fail) as informer,
    ):
        informer.until(lambda seen: seen == ["update a"], "the update")
        assert [str(error) for error in informer.errors] == ["add a initial"]


def test_a_stop_is_final(kind: str) -> None:
    if kind == "asyncio":
        pytest.skip("one state machine and one rule; the sync one is enough")
    with Server(sends(*FIRST)) as server, Client(server.address) as client:
        informer = client.informer("pods")
        with informer:
            assert informer.wait_for_sync(WAIT_SECONDS_MAX)
        assert len(informer.indexer) == 1, "the store stays readable"
        with pytest.raises(Stopped):
            informer.start()
        with pytest.raises(Stopped):
            informer.add_event_handler()
        with pytest.raises(Stopped):
            informer.wait_until("99")


def test_a_slow_handler_delays_only_itself_and_a_late_one_gets_the_present_state(kind: str) -> None:
    if kind == "asyncio":
        pytest.skip("tasks that wait delay no other by nature")
    changes = [event("MODIFIED", "a", str(at), str(at)) for at in range(6, 20)]
    release = threading.Event()
    with Server(sends(*FIRST, *changes)) as server, Client(server.address) as client:
        informer = client.informer("pods")
        slow: list[str] = []
        quick: list[str] = []
        last = threading.Event()

        def on_update(_: object, new: object) -> None:
            quick.append(getattr(new, "resource_version", ""))
            if quick[-1] == "19":
                last.set()

        def wait(*_: object) -> None:
            release.wait(WAIT_SECONDS_MAX)
            slow.append("call")

        held = informer.add_event_handler(wait, wait, backlog_max=2)
        informer.add_event_handler(on_update=on_update)
        with informer:
            assert last.wait(WAIT_SECONDS_MAX)
            assert (slow, held.backlog <= 4) == ([], True)
            late: list[str] = []
            registration = informer.add_event_handler(
                lambda one, initial: late.append(f"{one.resource_version} {initial}")
            )
            assert registration.wait_for_sync(WAIT_SECONDS_MAX)
            assert late == ["19 True"]
            release.set()
        assert quick == [str(at) for at in range(6, 20)]


def test_everything_up_to_a_version_can_be_waited_for(kind: str) -> None:
    if kind == "asyncio":
        pytest.skip("as above")
    change = event("MODIFIED", "a", "9", "9")
    with Server(sends(*FIRST, change)) as server, Client(server.address) as client:
        with client.informer("pods") as informer:
            assert informer.wait_until("9", WAIT_SECONDS_MAX)
            assert informer.wait_until("9.end", WAIT_SECONDS_MAX)
            assert not informer.wait_until("10", 0.01)
            with pytest.raises(ValueError, match="not a resource version"):
                informer.wait_until("x")
        stored = informer.indexer.get("default/a")
        assert stored is not None
        assert stored.raw == made("MODIFIED", "a", "9").object


def test_a_server_that_is_not_there_is_waited_for(kind: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with Recorder(kind, address, "informer", "pods", backoff=FAST) as informer:
        with Server(sends(*FIRST, then=idle), address=address):
            informer.until(lambda seen: seen == ["add a initial"], "the first state")
        assert all(type(error).__name__ == "Unreachable" for error in informer.errors)
