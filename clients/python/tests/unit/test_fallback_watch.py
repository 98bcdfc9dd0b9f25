"""Watches and reads that go on at an apiserver, in both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kubefan import (
    Apiserver,
    BackoffOptions,
    Bookmark,
    Budget,
    Client,
    ClientOptions,
    Disconnected,
    Event,
    Expired,
    Fallback,
    Side,
    SnapshotEnd,
    Unreachable,
    _fallback,
    aio,
)
from tests.recorder import KINDS, Recorder

from .apiserver import FakeApiserver, line, listed
from .messages import begin, end, event
from .server import Server, fails, sends

Code = grpc.StatusCode
FAST = BackoffOptions(initial=0.001, max=0.001)
#: What a proxy without a kubefan answers.
GONE = fails(Code.UNAVAILABLE, message="no healthy upstream")
FIRST = (begin("5"), event("ADDED", "a", "1"), end("5", 1))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Probes often, and returns soon."""
    for name, seconds in (
        ("PROBE_SECONDS", 0.02),
        ("HOLD_SECONDS_MIN", 0.05),
        ("RETURN_SECONDS_MIN", 0.01),
        ("RETURN_SECONDS_MAX", 0.02),
    ):
        monkeypatch.setattr(_fallback, name, seconds)
    yield


def options(apiserver: FakeApiserver, **more: Any) -> ClientOptions:
    """A client with a fallback, whose window is a millisecond."""
    return ClientOptions(apiserver=apiserver.client, budget=Budget(1, 1000.0), **more)


def pods(kind: str, server: Server, options: ClientOptions, **keywords: Any) -> Recorder:
    """A watch of the pods of a server."""
    return Recorder(kind, server.address, "watch_items", "pods", options=options, **keywords)


def words(seen: list[Any]) -> list[str]:
    """The items as words: names and versions."""
    made = []
    for item in seen:
        word = type(item).__name__
        if isinstance(item, Event):
            word = f"{item.object.name} {item.resume_version}"
        elif isinstance(item, (Bookmark, SnapshotEnd)):
            word += f" {item.resume_version}"
        made.append(word)
    return made


def lasting(seen: list[Any]) -> list[str]:
    """The items without those about the connection, which may break several times."""
    return [word for word in words(seen) if word not in ("Disconnected", "Reconnected")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_continues_at_the_apiserver_and_returns(kind: str) -> None:
    brought = [line("MODIFIED", "a", "7"), line("ADDED", "b", "7"), line("DELETED", "b", "9")]
    script = sends(*FIRST, event("MODIFIED", "a", "7", "7"), then=GONE)
    # What kubefan sends after 9 includes an event that the apiserver has brought.
    last = sends(event("DELETED", "b", "9", "9"), event("ADDED", "c", "9", "9.1"))
    with (
        Server(script, GONE, last) as server,
        FakeApiserver(watches=[brought]) as apiserver,
    ):
        server.is_serving = False
        sides: list[Side] = []
        made = options(apiserver, on_side=lambda side, _: sides.append(side))
        with pods(kind, server, made, backoff=FAST) as watch:
            watch.until(lambda seen: "b 9" in words(seen), "the events of the apiserver")
            expected = ["SnapshotBegin", "a ", "SnapshotEnd 5", "a 7", "b 7", "b 9"]
            assert lasting(watch.seen) == expected
            assert words(watch.seen)[-3] == "Reconnected"
            assert apiserver.requests == ["watch 6"]
            server.is_serving = True
            watch.until(lambda seen: "c 9.1" in words(seen), "the events of kubefan")
            assert lasting(watch.seen) == [*expected, "c 9.1"]
            assert server.requests[-1].resource_version == "9"
            assert sides == [Side.AWAY, Side.RETURNING, Side.HEALTHY]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_never_reached_kubefan_gets_its_state_from_the_apiserver(kind: str) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "30"}}}
    lists, watches = [listed("20", "a")], [[line("ADDED", "b", "21"), bookmark]]
    with Server(GONE) as server, FakeApiserver(lists, watches) as apiserver:
        server.is_serving = False
        made = options(apiserver)
        with pods(kind, server, made, backoff=FAST) as watch:
            watch.until(lambda seen: len(seen) >= 7, "the state")
            assert words(watch.seen) == [
                "Disconnected",
                "Reconnected",
                "SnapshotBegin",
                "a ",
                "SnapshotEnd 20.end",
                "b 21",
                "Bookmark 30.end",
            ]
            assert watch.seen[3].object["kind"] == "Pod"
            assert apiserver.requests == ["list", "watch 20"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_that_has_expired_restarts_or_ends_the_watch(kind: str) -> None:
    for on_expired in ("restart", "fail"):
        with Server(GONE) as server, FakeApiserver([listed("20")], [410]) as apiserver:
            server.is_serving = False
            watch = Recorder(
                kind,
                server.address,
                "watch_items",
                "pods",
                options=options(apiserver),
                backoff=FAST,
                resource_version="5",
                on_expired=on_expired,
            )
            if on_expired == "fail":
                watch.until_ended()
                assert isinstance(watch.errors[0], Expired)
                continue
            watch.until(lambda seen: "SnapshotEnd 20.end" in words(seen), "a state")
            assert "Restarted" in words(watch.seen)
            watch.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_that_the_apiserver_refuses_waits_for_kubefan(kind: str) -> None:
    script = sends(event("ADDED", "x", "6", "6"))
    with Server(GONE, script) as server, FakeApiserver(watches=[403]) as apiserver:
        server.is_serving = False
        made = options(apiserver)
        with pods(kind, server, made, backoff=FAST, resource_version="5") as watch:
            watch.until(lambda seen: "x 6" in words(seen), "kubefan's event")
            assert apiserver.requests == ["watch 5"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_that_kubefan_has_no_answer_for_is_read_from_the_apiserver(kind: str) -> None:
    refused = fails(Code.FAILED_PRECONDITION, "NOT_CACHED", "not cached")
    with Server(refused) as server, FakeApiserver(watches=[[line("ADDED", "x", "6")]]) as apiserver:
        sides: list[Side] = []
        made = options(apiserver, on_side=lambda side, _: sides.append(side))
        with pods(kind, server, made, backoff=FAST, resource_version="5") as watch:
            watch.until(lambda seen: "x 6" in words(seen), "the apiserver's event")
            assert sides == []


@pytest.mark.parametrize("is_serving", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resource_that_stays_busy_moves_only_its_watch_if_kubefan_serves(
    kind: str, is_serving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each answer that asks to come back later is one of a long row.
    monkeypatch.setattr(_fallback, "BUSY_SECONDS_MAX", 0.0)
    busy = fails(Code.UNAVAILABLE, "NOT_SYNCED", "not synced", 0.001)
    with Server(busy) as server, FakeApiserver(watches=[[line("ADDED", "x", "6")]]) as apiserver:
        server.is_serving = is_serving
        sides: list[Side] = []
        made = options(apiserver, on_side=lambda side, _: sides.append(side))
        with pods(kind, server, made, backoff=FAST, resource_version="5") as watch:
            watch.until(lambda seen: "x 6" in words(seen), "the apiserver's event")
            assert sides == ([] if is_serving else [Side.AWAY])


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_waits_instead_of_falling_back(kind: str) -> None:
    with Server(GONE, GONE, sends(*FIRST)) as server, FakeApiserver() as apiserver:
        made = options(apiserver)
        with pods(kind, server, made, backoff=FAST, fallback=Fallback.NEVER) as watch:
            watch.until(lambda seen: "SnapshotEnd 5" in words(seen), "kubefan's state")
            assert apiserver.requests == []


def test_lists_and_gets_are_made_at_the_apiserver_too() -> None:
    with Server() as server, FakeApiserver([listed("20", "a"), listed("21")]) as apiserver:
        address = server.address
        server.__exit__()
        with Client.connect(address, options(apiserver)) as client:
            found = client.list("pods")
            assert (found.resource_version, found.objects[0].name) == ("20.end", "a")
            assert client.get("pods", "x", "default").name == "x"

        async def read() -> str:
            async with await aio.Client.connect(address, options(apiserver)) as client:
                assert (await client.get("pods", "y", "default")).name == "y"
                return (await client.list("pods")).resource_version

        assert asyncio.run(read()) == "21.end"
        assert apiserver.requests == ["list", "get x", "get y", "list"]


def test_a_failure_of_on_side_ends_no_read() -> None:
    def on_side(side: Side, reason: str) -> None:
        raise RuntimeError(reason)

    with Server(GONE) as server, FakeApiserver([listed("20", "a")]) as apiserver:
        address = server.address
        server.__exit__()
        with Client(address, options(apiserver, on_side=on_side)) as client:
            assert client.list("pods").resource_version == "20.end"


def test_close_ends_watches_and_reads_at_the_apiserver_too() -> None:
    with Server(GONE) as server, FakeApiserver(["hang"]) as apiserver:
        server.is_serving = False
        client = Client(server.address, options(apiserver))
        items = client.watch_items("pods", backoff=FAST, resource_version="5")
        assert words([next(items), next(items)]) == ["Disconnected", "Reconnected"]
        with futures.ThreadPoolExecutor(2) as threads:
            watch = threads.submit(lambda: list(items))
            read = threads.submit(lambda: client.list("pods"))
            apiserver.until("watch 5", "list")
            client.close()
            assert watch.result() == []
            with pytest.raises(Unreachable, match="was closed"):
                read.result()
        with pytest.raises(Unreachable, match="was closed"):
            client.list("pods")


def test_close_ends_watches_and_reads_at_the_apiserver_too_with_asyncio() -> None:
    async def run(address: str, apiserver: FakeApiserver) -> None:
        client = aio.Client(address, options(apiserver))
        items = client.watch_items("pods", backoff=FAST, resource_version="5")
        seen = [await items.__anext__(), await items.__anext__()]
        assert words(seen) == ["Disconnected", "Reconnected"]
        watch = asyncio.create_task(anext_or_none(items))
        read = asyncio.create_task(client.list("pods"))
        await asyncio.get_running_loop().run_in_executor(None, apiserver.until, "watch 5", "list")
        await client.close()
        assert await watch is None
        with pytest.raises(Unreachable, match="was closed"):
            await read

    async def anext_or_none(items: Any) -> Any:
        async for item in items:
            return item
        return None

    with Server(GONE) as server, FakeApiserver(["hang"]) as apiserver:
        server.is_serving = False
        asyncio.run(run(server.address, apiserver))


def test_credentials_of_a_kubeconfig_need_tls_to_another_machine() -> None:
    def of(host: str) -> SimpleNamespace:
        return SimpleNamespace(
            host=host, ssl_ca_cert=None, cert_file=None, key_file=None, verify_ssl=True
        )

    with pytest.raises(ValueError, match="has no TLS"):
        Apiserver.from_configuration(of("http://10.0.0.1:6443"))
    for host in ("https://10.0.0.1:6443", "http://127.0.0.1:8001", "http://localhost:8001"):
        assert Apiserver.from_configuration(of(host)).server == host


def _returns(kind: str, entry: Any, **keywords: Any) -> list[Any]:
    """The items until kubefan's event, which has returned while the apiserver does not serve."""
    last = sends(event("ADDED", "x", "6", "6"))
    with Server(GONE, last) as server, FakeApiserver(watches=[entry]) as apiserver:
        server.is_serving = False
        with pods(kind, server, options(apiserver), resource_version="5", **keywords) as watch:
            apiserver.until("watch 5")
            server.is_serving = True
            watch.until(lambda seen: "x 6" in words(seen), "kubefan's event")
            return watch.seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_to_an_apiserver_that_hangs_ends_when_kubefan_returns(kind: str) -> None:
    assert lasting(_returns(kind, "hang", backoff=FAST)) == ["x 6"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_wait_after_an_error_of_the_apiserver_ends_when_kubefan_returns(kind: str) -> None:
    seen = _returns(kind, "later", backoff=FAST)
    assert lasting(seen) == ["x 6"]
    # The delay that the apiserver asks for has a bound.
    assert max(item.retry_in for item in seen if isinstance(item, Disconnected)) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_that_ends_at_once_is_not_repeated_at_once(kind: str) -> None:
    backoff = BackoffOptions(initial=3600.0, max=3600.0)
    with Server(GONE) as server, FakeApiserver(watches=["end"]) as apiserver:
        server.is_serving = False
        made = options(apiserver)
        with pods(kind, server, made, backoff=backoff, resource_version="5") as watch:
            watch.until(lambda seen: "Reconnected" in words(seen), "the watch")
        assert apiserver.requests == ["watch 5"]
