"""A watch while kubefan, or kubefan and the apiserver, fail: nothing is lost or repeated.

`check --integration` prints the seconds until each watch went on. With KUBEFAN_TYPESCRIPT_RUNNER,
the command that starts the runner of the TypeScript client, that client is tested too.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import signal
import subprocess
import threading
import time
from typing import Any, Callable

import pytest

from kubefan import Apiserver, Budget, ClientOptions, Event, Projection, Target
from kubefan.apiserver import Abort, Read
from tests.recorder import KINDS, Recorder

from .processes import ApiServer, Kubefan, until

#: Each client may start a read every half second.
_BUDGET = Budget(1, 2.0)


class Writer:
    """Changes an object all the time.

    Attributes:
        failed: The number of writes that failed.
        last: The version of the last one.
        versions: Those of all that succeeded.
    """

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.failed, self.count, self.last = 0, 0, api.create(namespace, "object")
        self.versions: list[str] = []
        self._api, self._namespace = api, namespace
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def until_written(self, count: int) -> None:
        """Waits for as many more changes."""
        wanted = self.count + count
        until(f"{count} changes", lambda: self.count >= wanted)

    def end(self) -> str:
        """Ends it, and returns the last version."""
        self._ended.set()
        self._thread.join()
        return self.last

    def _write(self) -> None:
        while not self._ended.wait(0.02):
            try:
                body = {"data": {"number": str(self.count)}}
                self.last = self._api.patch(self._namespace, "object", body)
                self.versions.append(self.last)
                self.count += 1
            except (OSError, http.client.HTTPException):
                self.failed += 1


class Refusal:
    """A server in the place of kubefan that answers 503."""

    def __init__(self, address: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            """Refuses each request."""

            def handle(self) -> None:
                """Answers the preface of HTTP/2, too."""
                self.request.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")

        host, port = address.split(":")
        self._server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


Fault = Callable[[Kubefan, ApiServer, contextlib.ExitStack], None]


def _killed(kubefan: Kubefan, api: ApiServer, after: contextlib.ExitStack) -> None:
    kubefan.end(signal.SIGKILL)


def _hangs(kubefan: Kubefan, api: ApiServer, after: contextlib.ExitStack) -> None:
    kubefan._process.process.send_signal(signal.SIGSTOP)


def _answers_503(kubefan: Kubefan, api: ApiServer, after: contextlib.ExitStack) -> None:
    kubefan.end(signal.SIGKILL)
    after.callback(Refusal(kubefan.address).close)


def _both_killed(kubefan: Kubefan, api: ApiServer, after: contextlib.ExitStack) -> None:
    kubefan.end(signal.SIGKILL)
    api.restart()


def _apiserver_killed(kubefan: Kubefan, api: ApiServer, after: contextlib.ExitStack) -> None:
    api.restart()


_FAULTS: list[Fault] = [_killed, _hangs, _answers_503, _apiserver_killed, _both_killed]


def _apiserver(api: ApiServer) -> Apiserver:
    return Apiserver(api.url, ca_file=str(api.directory / "ca.pem"), token="token-of-admin")


def _changes(api: ApiServer, namespace: str, version: str, last: str) -> list[str]:
    """The versions of a direct watch after one version, up to another."""
    server = _apiserver(api)
    read = Read(Target("configmaps", namespace, version="v1"), Projection())
    found: list[str] = []
    watch = server.watch(read, version, Abort())
    while not found or found[-1] != last:
        item = watch.next()
        if isinstance(item, tuple):
            found.append(item[1].resource_version)
    watch.close()
    return found


class Versions:
    """The versions that a watch of the Python client brings."""

    def __init__(self, kind: str, api: ApiServer, kubefan: Kubefan, namespace: str) -> None:
        options = ClientOptions(budget=_BUDGET, apiserver=_apiserver(api))
        self._watch = Recorder(
            kind, kubefan.address, "watch_items", "configmaps", options, namespace=namespace
        )

    def until(self, condition: Callable[[list[str]], Any], what: str) -> list[str]:
        """Waits until a condition is true."""

        def found(seen: list[Any]) -> list[str]:
            events = [item.object for item in seen if isinstance(item, Event)]
            versions = [made.resource_version for made in events if made.name == "object"]
            return versions if versions and condition(versions) else []

        return self._watch.until(found, what)

    def close(self) -> None:
        """Ends it."""
        self._watch.close()


class RunnerVersions:
    """The versions that a watch of another client brings, by its runner in clients/conformance."""

    def __init__(self, runner: str, api: ApiServer, kubefan: Kubefan, namespace: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            runner.split(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._versions: list[str] = []
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        client = {
            "address": kubefan.address,
            "lazy": True,
            "apiserver": api.url,
            "apiserver_ca_file": str(api.directory / "ca.pem"),
            "apiserver_token": "token-of-admin",
            "budget_clients": 1,
            "budget_rate": 2,
        }
        self._say({"id": 1, "op": "connect", "as": "c", **client})
        watched = {"client": "c", "resource": "configmaps", "namespace": namespace}
        self._say({"id": 2, "op": "watch", "as": "w", **watched})

    def until(self, condition: Callable[[list[str]], Any], what: str) -> list[str]:
        """Waits until a condition is true."""

        def is_true() -> bool:
            return bool(self._versions) and bool(condition(self._versions))

        with contextlib.suppress(AssertionError):
            until(what, is_true)
        assert is_true(), f"{what}: {self._lines[-3:]}"
        return list(self._versions)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()

    def _say(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.append(text)
            line = json.loads(text)
            if line.get("item") == "event" and line["key"].endswith("/object"):
                self._versions.append(line["version"])


def _watch(kind: str, api: ApiServer, kubefan: Kubefan, namespace: str) -> Any:
    if kind in KINDS:
        return contextlib.closing(Versions(kind, api, kubefan, namespace))
    runner = os.environ.get("KUBEFAN_TYPESCRIPT_RUNNER")
    if not runner:
        pytest.skip("set KUBEFAN_TYPESCRIPT_RUNNER to the command that runs it")
    return contextlib.closing(RunnerVersions(runner, api, kubefan, namespace))


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.__name__.strip("_"))
@pytest.mark.parametrize("kind", [*KINDS, "typescript"])
def test_a_watch_loses_and_repeats_nothing(
    kind: str, fault: Fault, private_api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    api = private_api
    namespace = api.namespace("faults")
    with Kubefan.serve(api) as kubefan, contextlib.ExitStack() as after:
        writer = Writer(api, namespace)
        with _watch(kind, api, kubefan, namespace) as watch:
            watch.until(lambda versions: len(versions) > 10, "events of kubefan")
            begin = time.monotonic()
            fault(kubefan, api, after)
            # Both were made after the fault, but for a write that was under way.
            writer.until_written(2)
            made = writer.last
            watch.until(lambda versions: int(versions[-1]) >= int(made), "an event after it")
            went_on = time.monotonic() - begin
            writer.until_written(50)
            last = writer.end()
            got = watch.until(lambda versions: versions[-1] == last, "the last event")
    # An apiserver that has started anew has no history of before.
    is_new = fault in (_apiserver_killed, _both_killed)
    if is_new:
        expected = [version for version in writer.versions if int(version) > int(got[0])]
    else:
        expected = _changes(api, namespace, got[0], last)
    lost, repeated = set(expected) - set(got), len(got) - len(set(got))
    with capsys.disabled():
        name = fault.__name__.strip("_")
        print(
            f"\n{kind:10} {name:17} {went_on:5.1f} s  lost {len(lost)}  repeated {repeated}"
            f"  failed writes {writer.failed}"
        )
    if is_new:
        # A client that has to list has the states in between as one.
        assert got == sorted(set(got), key=int)
    else:
        assert got[1:] == expected
