"""The duties of a client, step by step, against a real kubefan and a real kube-apiserver."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kubefan import (
    BackoffOptions,
    Client,
    ClientOptions,
    Disconnected,
    Encoding,
    Event,
    Expired,
    Forbidden,
    InvalidArgument,
    NotFound,
    OnExpired,
    Projection,
    Reconnected,
    SnapshotBegin,
    SnapshotEnd,
    Unauthenticated,
    Unavailable,
)
from tests.recorder import KINDS, Recorder

from .processes import ApiServer, Kubefan, Link, until

FAST = BackoffOptions(initial=0.05, max=0.2)
both = pytest.mark.parametrize("kind", KINDS)


def names(seen: list[Any]) -> list[str]:
    return [f"{one.type} {one.object.name}" for one in seen if isinstance(one, Event)]


def kinds(seen: list[Any]) -> list[str]:
    return [type(one).__name__ for one in seen if not isinstance(one, Event)]


def saw(*expected: str) -> Any:
    return lambda seen: names(seen) == list(expected)


def has(version: str) -> Any:
    return lambda seen: any(
        isinstance(one, Event) and one.object.resource_version == version for one in seen
    )


@both
def test_a_snapshot_and_each_change_arrive_in_order(
    kind: str, api: ApiServer, kubefan: Kubefan
) -> None:
    space = api.namespace(f"order-{kind}")
    for name in ("b", "a"):
        api.create(space, name)
    with Recorder(kind, kubefan.address, "watch_items", "configmaps", namespace=space) as watch:
        watch.until(saw("ADDED a", "ADDED b"), "the snapshot in key order")
        api.patch(space, "a", {"data": {"key": "new"}})
        api.delete(space, "b")
        last = api.create(space, "c")
        watch.until(
            saw("ADDED a", "ADDED b", "MODIFIED a", "DELETED b", "ADDED c"), "the changes in order"
        )
        assert kinds(watch.seen) == ["SnapshotBegin", "SnapshotEnd"]
        assert watch.resume_version.partition(".")[0] == last
        assert watch.cluster != ""
        changed = next(one for one in watch.seen if getattr(one, "type", "") == "MODIFIED")
        assert changed.object["data"] == {"key": "new"}


@both
def test_an_object_that_leaves_the_selector_is_deleted_with_that_reason(
    kind: str, api: ApiServer, kubefan: Kubefan
) -> None:
    space = api.namespace(f"selector-{kind}")
    api.create(space, "a", {"app": "web"})
    api.create(space, "other", {"app": "db"})
    with Recorder(
        kind, kubefan.address, "watch", "configmaps", namespace=space, label_selector="app=web"
    ) as watch:
        watch.until(saw("ADDED a"), "the selected object")
        api.patch(space, "a", {"metadata": {"labels": {"app": "db"}}})
        api.patch(space, "other", {"metadata": {"labels": {"app": "web"}}})
        api.delete(space, "other")
        watch.until(saw("ADDED a", "DELETED a", "ADDED other", "DELETED other"), "both ways")
        assert [one.delete_reason for one in watch.seen if one.type == "DELETED"] == [
            "LEFT_SELECTOR",
            "OBJECT_DELETED",
        ]


@both
def test_a_watch_resumes_from_a_saved_version(kind: str, api: ApiServer, kubefan: Kubefan) -> None:
    space = api.namespace(f"resume-{kind}")
    api.create(space, "a")
    with Recorder(kind, kubefan.address, "watch", "configmaps", namespace=space) as watch:
        until("the version", lambda: watch.resume_version)
        version, cluster = watch.resume_version, watch.cluster
    api.create(space, "b")
    api.delete(space, "a")
    with Recorder(
        kind,
        kubefan.address,
        "watch_items",
        "configmaps",
        namespace=space,
        resource_version=version,
        cluster=cluster,
    ) as again:
        again.until(saw("ADDED b", "DELETED a"), "exactly what was missed")
        assert kinds(again.seen) == []


@both
@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda one: str(one.value))
def test_every_encoding_brings_the_same_objects(
    kind: str, encoding: Encoding, api: ApiServer, kubefan: Kubefan
) -> None:
    space = api.namespace(f"encoding-{kind}-{encoding.value}")
    for number in range(20):
        api.create(space, f"c-{number:02}")
    keywords: dict[str, Any] = {"namespace": space, "encoding": encoding}
    with Recorder(kind, kubefan.address, "watch", "configmaps", **keywords) as watch:
        watch.until(lambda seen: len(seen) == 20, "the snapshot")
        for text in ("one", "two"):
            api.patch(space, "c-07", {"data": {"key": text}})
        watch.until(lambda seen: len(seen) == 22, "both changes")
        states = [one.object["data"]["key"] for one in watch.seen if one.object.name == "c-07"]
        assert states == ["value", "one", "two"]
    drop = Projection(drop_managed_fields=True)
    with Client(kubefan.address) as client:
        listed = client.list("configmaps", namespace=space, projection=drop)
        whole = client.list("configmaps", namespace=space)
    last = {one.object.name: one.object for one in watch.seen}
    for one, canonical in zip(whole, listed):
        expected = canonical if encoding == Encoding.ZSTD_DELTA else one
        assert last[one.name].raw == expected.raw


@both
def test_a_projection_sends_only_its_fields_and_only_their_changes(
    kind: str, api: ApiServer, kubefan: Kubefan
) -> None:
    space = api.namespace(f"projection-{kind}")
    api.create(space, "a", {"app": "web"})
    with Recorder(
        kind,
        kubefan.address,
        "watch",
        "configmaps",
        namespace=space,
        projection=Projection.fields("metadata.labels.app"),
        only_changes=True,
    ) as watch:
        watch.until(saw("ADDED a"), "the object")
        assert watch.seen[0].object.to_dict() == {"metadata": {"labels": {"app": "web"}}}
        api.patch(space, "a", {"data": {"key": "unseen"}})
        version = api.patch(space, "a", {"metadata": {"labels": {"app": "db"}}})
        watch.until(saw("ADDED a", "MODIFIED a"), "the one change")
        assert watch.seen[1].object["metadata"]["labels"] == {"app": "db"}
        assert watch.seen[1].object.resource_version == version


def test_reads_and_their_errors(api: ApiServer, kubefan: Kubefan) -> None:
    space = api.namespace("reads")
    version = api.create(space, "a")
    with Client.connect(kubefan.address) as client:
        listed = client.list("cm", namespace=space, resource_version=version)
        assert [one.key for one in listed] == [f"{space}/a"]
        assert listed.resource is not None
        assert listed.resource.kind == "ConfigMap"
        assert client.get("configmaps", "a", space) == listed.objects[0]
        (status,) = [one for one in client.list_resources() if one.name == "configmaps"]
        assert status.state == "SYNCED"
        with pytest.raises(NotFound) as missing:
            client.get("configmaps", "none", space)
        assert missing.value.reason == "OBJECT_NOT_FOUND"
        with pytest.raises(NotFound, match="no resource"):
            client.list("nonsenses")
        with pytest.raises(InvalidArgument) as bad:
            client.list("configmaps", label_selector="app==(")
        assert bad.value.field == "target.label_selector"
        with pytest.raises(InvalidArgument):
            next(client.watch("configmaps", field_selector="spec.none=1"))
        with pytest.raises(Unavailable) as ahead:
            client.list("configmaps", resource_version="999999999")
        assert ahead.value.is_retryable


@both
def test_a_killed_kubefan_costs_no_event(kind: str, api: ApiServer) -> None:
    space = api.namespace(f"killed-{kind}")
    api.create(space, "a")
    first = Kubefan.serve(api)
    with Recorder(
        kind, first.address, "watch_items", "configmaps", namespace=space, backoff=FAST
    ) as watch:
        watch.until(saw("ADDED a"), "the snapshot")
        first.end()
        watch.until(lambda seen: any(isinstance(one, Disconnected) for one in seen), "the break")
        api.create(space, "b")
        api.delete(space, "a")
        with Kubefan.serve(api, address=first.address):
            watch.until(saw("ADDED a", "ADDED b", "DELETED a"), "what was missed")
            (back,) = [one for one in watch.seen if isinstance(one, Reconnected)]
            assert back.since != ""


@both
def test_a_drain_and_another_replica_cost_no_event(kind: str, api: ApiServer) -> None:
    space = api.namespace(f"drain-{kind}")
    api.create(space, "a")
    with (
        Kubefan.serve(api) as other,
        Kubefan.serve(api, "--drain-timeout", "1s") as first,
        Link(first.address) as link,
        Recorder(
            kind, link.address, "watch_items", "configmaps", namespace=space, backoff=FAST
        ) as watch,
    ):
        watch.until(saw("ADDED a"), "the snapshot")
        link.target = other.address
        first.end(signal.SIGTERM)
        api.create(space, "b")
        watch.until(saw("ADDED a", "ADDED b"), "the change, from the other replica")
        breaks = [one.error.reason for one in watch.seen if isinstance(one, Disconnected)]
        assert breaks[:1] == ["DRAINING"], breaks


@both
def test_a_half_open_connection_is_noticed_by_pings(
    kind: str, api: ApiServer, kubefan: Kubefan
) -> None:
    space = api.namespace(f"half-open-{kind}")
    api.create(space, "a")
    options = ClientOptions(keepalive_interval=1.0, keepalive_timeout=1.0)
    with (
        Link(kubefan.address) as link,
        Recorder(
            kind, link.address, "watch_items", "configmaps", options, namespace=space, backoff=FAST
        ) as watch,
    ):
        watch.until(saw("ADDED a"), "the snapshot")
        link.freeze()
        api.create(space, "b")
        link.thaw_only_new()
        watch.until(saw("ADDED a", "ADDED b"), "the change, over a new connection")
        assert any(isinstance(one, Disconnected) for one in watch.seen)


@both
def test_a_gap_and_a_catch_up_take_effect_as_units(kind: str, private_api: ApiServer) -> None:
    api = private_api
    space = api.namespace("gap")
    for name in ("a", "b"):
        api.create(space, name)
    with Link(f"127.0.0.1:{api.port}") as link:
        flags = ["limits.ringEventsMax=4", "tuning.upstreamIdleTimeout=30s"]
        with Kubefan.serve(api, *flags, upstream=f"https://{link.address}") as server:
            keywords: dict[str, Any] = {"namespace": space, "backoff": FAST}
            items = Recorder(kind, server.address, "watch_items", "configmaps", **keywords)
            events = Recorder(kind, server.address, "watch", "configmaps", **keywords)
            informer = Recorder(kind, server.address, "informer", "configmaps", **keywords)
            for watch in (items, events):
                watch.until(saw("ADDED a", "ADDED b"), "the snapshot")
            informer.until(lambda seen: len(seen) == 2, "the first state")
            cluster = items.cluster
            # Changes made while kubefan is cut off are compacted, so it has to list again.
            link.freeze()
            link.cut()
            api.delete(space, "a")
            latest = api.create(space, "c")
            api.compact(latest)
            api.restart()
            link.thaw()
            items.until(lambda seen: "GapEnd" in kinds(seen), "the gap")
            assert kinds(items.seen)[-2:] == ["GapBegin", "GapEnd"]
            unit = names(items.seen)[2:]
            assert sorted(unit) == ["ADDED c", "DELETED a"]
            events.until(lambda seen: len(seen) == 4, "the events of the gap")
            assert events.seen[-1].resume_version != ""
            assert all(one.resume_version == "" for one in events.seen[:3])
            informer.until(lambda seen: "add c" in seen, "the calls of the gap")
            assert "delete a unknown" in informer.seen
            # A version that has left the ring is answered by a catch-up.
            behind = items.resume_version
            for number in range(12):
                version = api.patch(space, "b", {"data": {"key": str(number)}})
                # One by one, so that the streams do not fall behind a ring of four events.
                items.until(has(version), "the change")
            with Recorder(
                kind,
                server.address,
                "watch_items",
                "configmaps",
                resource_version=behind,
                cluster=cluster,
                **keywords,
            ) as late:
                late.until(lambda seen: "CatchUpEnd" in kinds(seen), "the catch-up")
                assert names(late.seen) == ["MODIFIED b"]
                assert late.seen[1].object["data"]["key"] == "11"
            for recorder in (items, events, informer):
                recorder.close()


@both
def test_after_a_restart_with_a_snapshot_deletions_are_real(
    kind: str, private_api: ApiServer
) -> None:
    api = private_api
    space = api.namespace("restart")
    for name in ("a", "b"):
        api.create(space, name)
    first = Kubefan.serve(api)
    keywords: dict[str, Any] = {"namespace": space, "backoff": FAST}
    with (
        Recorder(kind, first.address, "watch", "configmaps", **keywords) as watch,
        Recorder(kind, first.address, "informer", "configmaps", **keywords) as informer,
    ):
        watch.until(saw("ADDED a", "ADDED b"), "the snapshot")
        informer.until(lambda seen: len(seen) == 2, "the first state")
        until("the version", lambda: watch.resume_version)
        version, cluster = watch.resume_version, watch.cluster
        first.end()
        api.delete(space, "a")
        latest = api.create(space, "c")
        api.compact(latest)
        api.restart()
        with Kubefan.serve(api, address=first.address):
            watch.until(lambda seen: len(seen) == 4, "what has changed")
            assert sorted(names(watch.seen)[2:]) == ["ADDED c", "DELETED a"]
            deleted = next(one for one in watch.seen if one.type == "DELETED")
            assert deleted.delete_reason == "FINAL_STATE_UNKNOWN"
            assert deleted.object["metadata"]["name"] == "a"
            informer.until(lambda seen: "add c" in seen, "the calls")
            assert sorted(informer.seen[2:]) == ["add c", "delete a unknown"]
            stored = {one.name: one.resource_version for one in informer.store}
            assert stored == api.stored(space)
            # A caller that has only a version learns that it is expired, or restarts as asked.
            keywords.update(resource_version=version, cluster=cluster)
            fails = Recorder(kind, first.address, "watch", "configmaps", **keywords)
            fails.until(lambda _: fails.ended, "the end")
            assert isinstance(fails.errors[0], Expired)
            assert "list again" in str(fails.errors[0])
            keywords.update(on_expired=OnExpired.RESTART)
            with Recorder(
                kind, first.address, "watch_items", "configmaps", **keywords
            ) as restarted:
                restarted.until(lambda seen: "SnapshotEnd" in kinds(seen), "a new snapshot")
                begin, end = restarted.seen[0], restarted.seen[-1]
                assert isinstance(begin, SnapshotBegin)
                assert version == begin.restarted_from + ".end" and isinstance(end, SnapshotEnd)


def allow(api: ApiServer, space: str) -> None:
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch", "get"]}]
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}"
    api.ask("POST", f"{roles}/roles", {"metadata": {"name": "r"}, "rules": rules})
    group = "rbac.authorization.k8s.io"
    body = {
        "metadata": {"name": "b"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "r"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "reader"}],
    }
    api.ask("POST", f"{roles}/rolebindings", body)


@both
def test_denials_revocations_and_tokens(kind: str, api: ApiServer, tmp_path: Path) -> None:
    space = api.namespace(f"rights-{kind}")
    api.create(space, "a")
    files = {name: str(api.directory / name) for name in ("ca.pem", "server.pem")}
    with Kubefan.serve(
        api,
        "--tls-cert-file",
        files["server.pem"],
        "--tls-private-key-file",
        str(api.directory / "server-key.pem"),
        "--access=authorized",
        "tuning.reauthorizeInterval=1s",
        "tuning.authorizationWebhookCacheAuthorizedTtl=1s",
        "tuning.authorizationWebhookCacheUnauthorizedTtl=1s",
        "limits.streamAgeMax=1s",
    ) as server:
        address = f"https://{server.address}"
        token_file = tmp_path / "token"
        token_file.write_text("token-of-no-one")
        options = ClientOptions(ca_file=files["ca.pem"], token_file=str(token_file))
        keywords: dict[str, Any] = {"namespace": space, "backoff": FAST}

        unknown = Recorder(kind, address, "watch", "configmaps", options, **keywords)
        unknown.until(lambda _: unknown.ended, "the refusal")
        assert isinstance(unknown.errors[0], Unauthenticated)

        token_file.write_text("token-of-reader")
        denied = Recorder(kind, address, "watch", "configmaps", options, **keywords)
        denied.until(lambda _: denied.ended, "the denial")
        assert isinstance(denied.errors[0], Forbidden)
        assert "reader" in str(denied.errors[0])

        allow(api, space)

        def is_allowed() -> bool:
            with Client(address, options) as client:
                try:
                    next(client.watch("configmaps", namespace=space))
                    return True
                except Forbidden:
                    return False

        until("the right to count", is_allowed)
        watch = Recorder(kind, address, "watch_items", "configmaps", options, **keywords)
        watch.until(lambda seen: "ADDED a" in names(seen), "the snapshot")
        # The stream ends with its age. The watch resumes with the token that the file has then.
        token_file.write_text("token-of-admin")
        watch.until(lambda seen: "Reconnected" in kinds(seen), "the resume")
        api.create(space, "b")
        watch.until(lambda seen: "ADDED b" in names(seen), "the change")
        assert names(watch.seen).count("ADDED a") == 1, "no event is repeated"
        ended = [one.error.reason for one in watch.seen if isinstance(one, Disconnected)]
        assert set(ended) == {"REAUTHENTICATE"}
        watch.close()

        # A client certificate names the same user.
        by_certificate = ClientOptions(
            ca_file=files["ca.pem"],
            client_certificate_file=str(api.directory / "reader.pem"),
            client_key_file=str(api.directory / "reader-key.pem"),
        )
        revoked = Recorder(kind, address, "watch", "configmaps", by_certificate, **keywords)
        revoked.until(lambda seen: "ADDED a" in names(seen), "the snapshot")
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/rolebindings/b"
        api.ask("DELETE", path)
        revoked.until(lambda _: revoked.ended, "the end of the right")
        assert isinstance(revoked.errors[0], Forbidden)
