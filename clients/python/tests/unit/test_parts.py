"""Small parts: objects, the store, tokens, addresses, delays."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kubefan import (
    BackoffOptions,
    Client,
    ClientOptions,
    Disconnected,
    Event,
    EventType,
    InvalidAddress,
    Object,
    Projection,
    Target,
)
from kubefan._backoff import Backoff
from kubefan._connection import Connection
from kubefan._endpoint import endpoint
from kubefan._in_cluster import ADDRESS, CA_FILE, TOKEN_FILE, in_cluster_options
from kubefan._keywords import ListReader, get_request, list_request, watch_options
from kubefan._token import READ_INTERVAL_SECONDS, Token
from kubefan.objects import DECODED_MAX
from kubefan.options import OnExpired
from kubefan.store import Indexer
from kubefan.v1alpha1 import watch_pb2 as api


def pod(name: str, node: str = "n1", app: str = "web", version: str = "1") -> Object:
    text = f'{{"metadata":{{"labels":{{"app":"{app}"}}}},"spec":{{"nodeName":"{node}"}}}}'
    return Object("default", name, f"uid-{name}", version, text.encode())


def test_an_object_reads_like_its_json_and_a_copy_may_be_changed() -> None:
    made = pod("a")
    assert made["spec"]["nodeName"] == "n1"
    assert made.get("status") is None
    assert (made.key, made.namespace, made.name) == ("default/a", "default", "a")
    assert dict(made.labels) == {"app": "web"}
    copy = made.to_dict()
    copy["spec"]["nodeName"] = "n2"
    assert made["spec"]["nodeName"] == "n1"
    assert Object("", "node-1", "u", "1", b"{}").key == "node-1"
    assert Object("", "node-1", "u", "1", b"{}").namespace == ""


def test_only_some_objects_keep_their_decoded_form() -> None:
    objects = [pod(f"p{number}") for number in range(DECODED_MAX + 50)]
    for made in objects:
        assert made["spec"]
    assert sum(made._decoded is not None for made in objects) <= DECODED_MAX
    assert all(made["spec"]["nodeName"] == "n1" for made in objects)


def test_an_event_type_is_equal_to_its_name() -> None:
    event = Event(EventType.ADDED, pod("a"))
    assert event.type == "ADDED"
    assert f"{event.type}" == "ADDED"


def test_an_index_follows_the_store() -> None:
    store = Indexer()
    store._write([("default/a", pod("a")), ("default/b", pod("b", "n2"))])
    store.add_index("node", lambda made: [made["spec"]["nodeName"]])
    store.add_label_index("app")
    assert [made.name for made in store.by_index("node", "n1")] == ["a"]
    store._write([("default/a", pod("a", "n2", app="db")), ("default/b", None)])
    assert store.by_index("node", "n1") == []
    assert store.index_values("node") == ["n2"]
    assert [made.name for made in store.by_label("app", "db")] == ["a"]
    assert [made.name for made in store.by_namespace("default")] == ["a"]
    assert (len(store), "default/a" in store, store.get("default/b")) == (1, True, None)
    with pytest.raises(ValueError, match="already"):
        store.add_index("node", lambda made: [])
    with pytest.raises(KeyError):
        store.by_index("unknown", "x")


def test_an_index_function_that_fails_is_reported_and_harms_nothing_else() -> None:
    store = Indexer()
    errors: list[Exception] = []
    store._observer = errors.append
    store.add_index("broken", lambda made: [made["no such field"]])
    store._write([("default/a", pod("a"))])
    assert (len(errors), len(store), store.index_values("broken")) == (1, 1, [])


def test_a_token_file_is_read_again_in_time_and_after_a_refusal(tmp_path: Path) -> None:
    now = [0.0]
    file = tmp_path / "token"
    token = Token(token_file=str(file), clock=lambda: now[0])
    with pytest.raises(OSError, match="No such file"):
        token.header()
    file.write_text("first\n")
    assert token.header() == "Bearer first"
    file.write_text("second")
    assert token.header() == "Bearer first"
    assert token.replacement("Bearer first")
    assert token.header() == "Bearer second"
    assert not token.replacement("Bearer second"), "the file has no other one"
    file.write_text("third")
    token.expire("Bearer first")
    assert token.header() == "Bearer second", "it was replaced before"
    token.expire("Bearer second")
    assert token.header() == "Bearer third"
    file.unlink()
    now[0] = READ_INTERVAL_SECONDS
    assert token.header() == "Bearer third", "the last one stays in use"
    assert "third" not in repr(token)


def test_no_error_quotes_a_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        Token("very\nsecret")
    assert "secret" not in str(raised.value)
    file = tmp_path / "token"
    file.write_bytes(b"secret\xff")
    with pytest.raises(ValueError) as raised:
        Token(token_file=str(file)).header()
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert "secret" not in repr(ClientOptions(token="secret"))


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("127.0.0.1:7443", "127.0.0.1:7443"),
        ("http://127.0.0.1:7443", "127.0.0.1:7443"),
        ("[::1]:7443", "[::1]:7443"),
        ("dns:kubefan.svc:7443", "kubefan.svc:7443"),
        ("dns:///kubefan.svc:7443", "kubefan.svc:7443"),
        ("https://h:1", "h:1"),
        ("unix:/run/k.sock", "unix:/run/k.sock"),
    ],
)
def test_every_documented_form_of_address_is_accepted(address: str, target: str) -> None:
    made = endpoint(address, ClientOptions())
    assert made.target == target
    assert (made.credentials is not None) == address.startswith("https")


@pytest.mark.parametrize(
    "address", ["a b:c", "localhost:notaport", "https://h:99999", "h", "", ":"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidAddress, match="not an address of kubefan"):
        endpoint(address, ClientOptions())


@pytest.mark.parametrize("address", ["127.0.0.1:7443", "http://h:1", "dns:h:1"])
def test_a_token_is_sent_only_where_no_one_else_can_read_it(address: str) -> None:
    options = ClientOptions(token="secret")
    with pytest.raises(InvalidAddress, match="https://") as raised:
        endpoint(address, options)
    assert "secret" not in str(raised.value)
    assert endpoint("https://h:1", options).token.header() == "Bearer secret"
    assert endpoint("unix:/k.sock", options).token.header() == "Bearer secret"


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    with pytest.raises(InvalidAddress, match=r"ca\.pem"):
        endpoint("https://h:1", ClientOptions(ca_file=str(ca)))
    ca.write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(InvalidAddress, match="contains no PEM certificate"):
        endpoint("https://h:1", ClientOptions(ca_file=str(ca)))
    with pytest.raises(InvalidAddress, match="both"):
        endpoint("https://h:1", ClientOptions(client_key_file=str(ca)))


@pytest.mark.parametrize(
    "option", ["ca_file", "client_certificate_file", "client_key_file", "server_name"]
)
@pytest.mark.parametrize("address", ["h:1", "http://h:1", "unix:/k.sock"])
def test_what_only_tls_has_is_not_ignored_without_it(option: str, address: str) -> None:
    given: Any = {option: "/a.pem"}
    with pytest.raises(InvalidAddress, match=f"only an https:// address takes {option}"):
        endpoint(address, ClientOptions(**given))


def test_a_pod_takes_the_token_of_its_service_account_unless_it_has_another() -> None:
    address, options = in_cluster_options("", {})
    assert (address, options.ca_file, options.token_file) == (ADDRESS, CA_FILE, TOKEN_FILE)
    _, options = in_cluster_options("https://h:1", {"token": "own", "ca_file": "own.pem"})
    assert (options.token, options.token_file, options.ca_file) == ("own", None, "own.pem")


def test_a_server_name_replaces_the_host_of_the_address() -> None:
    made = endpoint("https://h:1", ClientOptions(server_name="kubefan.example.com"))
    assert ("grpc.ssl_target_name_override", "kubefan.example.com") in made.settings


def test_delays_double_up_to_a_limit_and_start_again_after_two_healthy_minutes() -> None:
    backoff = Backoff(BackoffOptions(jitter=0.0), random.Random(1))
    now, delays = 0.0, []
    for _ in range(8):
        delays.append(backoff.next_delay(now))
        now += delays[-1]
    assert delays == pytest.approx([0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])
    assert backoff.next_delay(now + 119) == 30.0
    assert backoff.next_delay(now + 119 + 30 + 120) == 0.8
    assert backoff.next_delay(now + 400, retry_after=20.0) == 20.0
    jittered = Backoff(BackoffOptions(), random.Random(7)).next_delay(0.0)
    assert 0.8 <= jittered <= 1.6


def test_a_version_of_the_callers_own_expires_by_default() -> None:
    target, options = watch_options("pods", {"namespace": "n", "resource_version": "5"})
    assert (target, options.on_expired) == (Target("pods", "n"), OnExpired.FAIL)
    assert watch_options("pods", {})[1].on_expired == OnExpired.RESTART
    with pytest.raises(TypeError):
        watch_options("pods", {"no_such_option": 1})
    with pytest.raises(ValueError, match="either"):
        Projection(paths=("a",), metadata_only=True)


def test_grpc_connects_between_the_calls_of_a_broken_watch() -> None:
    # gRPC looks at a socket only every five seconds while no call waits for it.
    client = Client("127.0.0.1:1")
    asked: list[str] = []
    client._channel.subscribe = lambda *_, **__: asked.append("subscribe")
    client._channel.unsubscribe = lambda *_: asked.append("unsubscribe")
    watch = client.watch_items("pods", backoff=BackoffOptions(initial=0.001, max=0.001))
    for _ in range(3):
        assert isinstance(next(watch), Disconnected)
    assert asked == ["subscribe"]
    watch.close()
    watch.close()
    assert asked == ["subscribe", "unsubscribe"]
    # Also if the watch ends by itself.
    asked.clear()
    again = client.watch_items("pods", backoff=BackoffOptions(initial=0.01, max=0.01), timeout=0.2)
    assert all(isinstance(item, Disconnected) for item in again)
    assert asked == ["subscribe", "unsubscribe"]
    client.close()


def test_a_channel_is_closed_after_the_last_look_of_the_thread_that_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise that thread would print an exception.
    now, asked = [100.0], []
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: asked.append(f"{seconds:.1f} s")
    )
    monkeypatch.setattr("kubefan._connection.time", clock)

    class Channel:
        def subscribe(self, _: object, try_to_connect: bool) -> None:
            asked.append("subscribe")

        def unsubscribe(self, _: object) -> None:
            asked.append("unsubscribe")

        def close(self) -> None:
            asked.append("close")

    def listener(_: object) -> None: ...

    idle: Any = Channel()
    Connection(idle).close()
    assert asked == ["close"], "no wait without a listener"

    for attending_at_close in (True, False):
        asked.clear()
        connection = Connection(idle)
        connection.attend(listener)
        if not attending_at_close:
            connection.ignore(listener)
            now[0] += 0.1
        connection.close()
        connection.attend(listener)
        waited = "0.4 s" if attending_at_close else "0.3 s"
        assert asked == ["subscribe", "unsubscribe", waited, "close"]


def test_the_version_of_a_list_is_complete_and_is_read_without_its_place() -> None:
    for is_complete, text in ((True, "5.end"), (False, "5")):
        reader = ListReader()
        for _ in range(2):
            reader.accept(api.ListResponse(resource_version="5", version_is_complete=is_complete))
        listed = reader.result()
        assert listed is not None
        assert listed.resource_version == text
        assert list_request("pods", {"resource_version": text})[0].resource_version == "5"
        got = get_request("pods", "a", "n", {"resource_version": text})[0]
        assert got.resource_version == "5"
