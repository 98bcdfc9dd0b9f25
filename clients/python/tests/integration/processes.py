"""Real processes on loopback: etcd, kube-apiserver and kubefan, and a proxy that can fail."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

import pytest

#: The limit of each wait, in seconds. It is only reached by a test that fails.
WAIT_SECONDS_MAX = 90.0
_POLL_SECONDS = 0.05
_T = TypeVar("_T")


def until(what: str, condition: Callable[[], _T], seconds: float = WAIT_SECONDS_MAX) -> _T:
    """Waits until a condition is true, and returns its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"waited {seconds} s for {what}")


def kubefan_program() -> str:
    """The kubefan under test. Without `KUBEFAN` the test is skipped."""
    program = os.environ.get("KUBEFAN")
    if not program:
        pytest.skip("set KUBEFAN to the program")
    return program


def assets() -> Path:
    """The directory with etcd and kube-apiserver. Without it the test is skipped."""
    directory = os.environ.get("KUBEFAN_TEST_ASSETS")
    if not directory:
        pytest.skip("set KUBEFAN_TEST_ASSETS to a directory with etcd and kube-apiserver")
    return Path(directory)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as probes:
        # All are open until the end: a port that is free again could be the next one.
        opened = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in opened:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in opened]


#: Makes the names of files different.
_numbers = itertools.count()


class Process:
    """A process with its output in a file. It is killed at the end."""

    def __init__(self, arguments: list[str], log: Path, **options: Any) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                arguments, stdout=file, stderr=subprocess.STDOUT, **options
            )

    def text(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")

    def until_written(self, pattern: str, seconds: float = WAIT_SECONDS_MAX) -> re.Match[str]:
        """Waits until it has written something."""

        def found() -> Optional[re.Match[str]]:
            # Before the text is read: a process may write its last line and end.
            is_running = self.process.poll() is None
            match = re.search(pattern, self.text())
            assert is_running or match, f"it ended: {self.text()[-2000:]}"
            return match

        match = until(f"{pattern!r} in {self.log.name}", found, seconds)
        assert match is not None
        return match

    def end(self, how: int = signal.SIGKILL) -> None:
        """Ends it."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(WAIT_SECONDS_MAX)


class ApiServer:
    """A control plane: etcd and kube-apiserver, with users by token."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._programs = assets()
        _make_certificates(directory)
        users = [("admin", "system:masters"), ("kubefan", "system:masters"), ("reader", "readers")]
        (directory / "users.csv").write_text(
            "".join(f'token-of-{user},{user},{user},"{group}"\n' for user, group in users)
        )
        self._etcd_port, peer_port, self.port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self._tls = ssl.create_default_context(cafile=str(directory / "ca.pem"))
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, peer_port))
        self._etcd = Process(
            [
                str(self._programs / "etcd"),
                f"--data-dir={directory}/etcd",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
            directory / "etcd.log",
        )
        self._apiserver = self._start()
        self._ready()

    def close(self) -> None:
        """Ends both."""
        self._apiserver.end()
        self._etcd.end()

    def restart(self) -> None:
        """Kills kube-apiserver and starts it again, with the same data and address."""
        self._apiserver.end()
        self._apiserver = self._start()
        self._ready()

    def compact(self, revision: str) -> None:
        """Compacts etcd: versions below this one are gone."""
        body = json.dumps({"revision": revision, "physical": True}).encode()
        url = f"http://127.0.0.1:{self._etcd_port}/v3/kv/compaction"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as response:
            response.read()

    def ask(
        self, method: str, path: str, body: Any = None, token: str = "token-of-admin"
    ) -> dict[str, Any]:
        """A request to the apiserver. Raises urllib.error.HTTPError."""
        kind = "merge-patch+json" if method == "PATCH" else "json"
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": f"application/{kind}"},
            method=method,
        )
        with urllib.request.urlopen(request, context=self._tls, timeout=30) as response:
            text = response.read()
        value: dict[str, Any] = json.loads(text) if text.startswith(b"{") else {}
        return value

    def namespace(self, name: str) -> str:
        """Makes a namespace."""
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def create(self, namespace: str, name: str, labels: Optional[dict[str, str]] = None) -> str:
        """Makes a config map, and returns its version."""
        body = {"metadata": {"name": name, "labels": labels or {}}, "data": {"key": "value"}}
        made = self.ask("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)
        return str(made["metadata"]["resourceVersion"])

    def patch(self, namespace: str, name: str, body: dict[str, Any]) -> str:
        """Changes a config map, and returns its version."""
        made = self.ask("PATCH", f"/api/v1/namespaces/{namespace}/configmaps/{name}", body)
        return str(made["metadata"]["resourceVersion"])

    def delete(self, namespace: str, name: str) -> None:
        """Deletes a config map."""
        self.ask("DELETE", f"/api/v1/namespaces/{namespace}/configmaps/{name}")

    def stored(self, namespace: str, labels: str = "") -> dict[str, str]:
        """The versions of the config maps of a namespace, by name."""
        query = f"?labelSelector={labels}" if labels else ""
        found = self.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps{query}")
        return {
            one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in found["items"]
        }

    def kubeconfig(self, url: str = "") -> str:
        """A kubeconfig for kubefan, to this address or to a proxy in front of it."""
        file = self.directory / f"kubeconfig-{next(_numbers)}"
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "c",
                            "cluster": {
                                "server": url or self.url,
                                "certificate-authority": str(self.directory / "ca.pem"),
                            },
                        }
                    ],
                    "users": [{"name": "u", "user": {"token": "token-of-kubefan"}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return str(file)

    def _start(self) -> Process:
        def file(flag: str, name: str) -> str:
            return f"--{flag}={self.directory / name}"

        return Process(
            [
                str(self._programs / "kube-apiserver"),
                f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
                f"--secure-port={self.port}",
                file("cert-dir", "certs"),
                file("client-ca-file", "ca.pem"),
                file("tls-cert-file", "server.pem"),
                file("tls-private-key-file", "server-key.pem"),
                file("token-auth-file", "users.csv"),
                file("service-account-key-file", "server-key.pem"),
                file("service-account-signing-key-file", "server-key.pem"),
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--disable-admission-plugins=ServiceAccount",
                "--authorization-mode=RBAC",
            ],
            self.directory / "kube-apiserver.log",
        )

    def _ready(self) -> None:
        def is_ready() -> bool:
            process = self._apiserver
            assert process.process.poll() is None, process.text()[-2000:]
            try:
                self.ask("GET", "/readyz")
                self.ask("GET", "/api/v1/namespaces/default")
            except (OSError, urllib.error.HTTPError):
                return False
            return True

        until("kube-apiserver to be ready", is_ready)


def _make_certificates(directory: Path) -> None:
    """A CA, the certificate of the servers on loopback, and one of the client `reader`."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    openssl(*make, "-subj", "/CN=test-ca", "-keyout", "ca-key.pem", "-out", "ca.pem")
    for name, subject, extension in [
        ("server", "/CN=server", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ("reader", "/O=readers/CN=reader", "extendedKeyUsage=clientAuth"),
    ]:
        files = ["-keyout", f"{name}-key.pem", "-out", f"{name}.pem"]
        signed = ["-CA", "ca.pem", "-CAkey", "ca-key.pem", "-addext", extension]
        openssl(*make, *signed, "-addext", "basicConstraints=CA:FALSE", "-subj", subject, *files)


class Kubefan:
    """A kubefan in front of an apiserver, or the demo with a simulated one."""

    def __init__(self, arguments: list[str], directory: Path, address: str = "") -> None:
        port, admin_port = free_ports(2)
        self.address = address or f"127.0.0.1:{port}"
        self._admin = f"127.0.0.1:{admin_port}"
        listen = ["--listen", self.address, "--admin-listen", self._admin]
        environment = {**os.environ, "RUST_LOG": "info"}
        self._process = Process(
            [kubefan_program(), *arguments, *listen],
            directory / f"kubefan-{next(_numbers)}.log",
            env=environment,
        )
        until("kubefan to be ready", self._is_ready)

    @classmethod
    def serve(cls, api: ApiServer, *flags: str, address: str = "", upstream: str = "") -> Kubefan:
        """`kubefan serve` with config maps. A setting without a flag is like limits.readsMax=5."""
        arguments = ["serve", "--kubeconfig", api.kubeconfig(upstream), "--resource", "configmaps"]
        settings = [flag for flag in flags if flag.startswith(("limits.", "tuning."))]
        if settings:
            arguments += ["--config", write_settings(api.directory, settings)]
        arguments += [flag for flag in flags if flag not in settings]
        return cls(arguments, api.directory, address)

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.process.pid

    def metrics(self) -> str:
        """The metrics."""
        return self._get("/metrics") or ""

    def end(self, how: int = signal.SIGKILL) -> None:
        """Ends it: SIGTERM drains it first."""
        self._process.end(how)

    def __enter__(self) -> Kubefan:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _is_ready(self) -> bool:
        assert self._process.process.poll() is None, self._process.text()[-2000:]
        return self._get("/readyz") is not None

    def _get(self, path: str) -> Optional[str]:
        try:
            with urllib.request.urlopen(f"http://{self._admin}{path}", timeout=5) as response:
                text: bytes = response.read()
        except OSError:
            return None
        return text.decode()


def write_settings(directory: Path, settings: list[str]) -> str:
    """Writes a configuration file with settings like limits.readsMax=5."""
    text = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n"
    for place in ("limits", "tuning"):
        prefix = f"{place}."
        given = [one[len(prefix) :] for one in settings if one.startswith(prefix)]
        entries = [one.replace("=", ": ", 1) for one in given]
        if entries:
            text += f"{place}:\n" + "".join(f"  {entry}\n" for entry in entries)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=directory, delete=False) as file:
        file.write(text)
    return file.name


class Link:
    """A TCP proxy that can freeze: its connections stay open, and nothing passes any more."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._refuse = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Nothing passes any more, and no connection is closed. New ones hang, too."""
        self._open.clear()

    def thaw(self) -> None:
        """New connections pass again. Those of before stay dead."""
        with self._lock:
            dead, self._sockets = self._sockets, []
        self._open = threading.Event()
        self._open.set()
        _close(dead)

    def thaw_only_new(self) -> None:
        """New connections pass again. Those of before stay open and silent."""
        self._open = threading.Event()
        self._open.set()

    def cut(self) -> None:
        """Closes all connections."""
        with self._lock:
            ended, self._sockets = self._sockets, []
        _close(ended)

    def close(self) -> None:
        """Ends the proxy."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._open.set()
        self.cut()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near, self._open), daemon=True).start()

    def _connect(self, near: socket.socket, gate: threading.Event) -> None:
        gate.wait()
        host, port = self.target.rsplit(":", 1)
        try:
            far = socket.create_connection((host, int(port)))
        except OSError:
            near.close()
            return
        with self._lock:
            self._sockets += [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, sink, gate), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
    try:
        while data := source.recv(1 << 16):
            gate.wait()
            sink.sendall(data)
    except OSError:
        pass
    _close([source, sink])


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
