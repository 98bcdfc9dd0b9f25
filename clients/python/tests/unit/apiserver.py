"""An apiserver that answers by the script of a test."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional
from urllib.parse import parse_qs, urlsplit

from kubefan import Apiserver


def pod(name: str, version: str) -> dict[str, Any]:
    """An object, as a list has it."""
    metadata = {"namespace": "default", "name": name, "uid": f"uid-of-{name}"}
    return {"metadata": {**metadata, "resourceVersion": version}}


def line(kind: str, name: str, version: str) -> dict[str, Any]:
    """An event of a watch."""
    return {"type": kind, "object": {"kind": "Pod", "apiVersion": "v1", **pod(name, version)}}


class FakeApiserver:
    """Serves lists and watches, each by the next entry. A watch without an entry stays silent.

    A list may "hang" (no answer). Other entries of a watch are the status of a refusal, "hang",
    "end" (an answer that ends at once) and "later" (503, with a delay of an hour).

    Attributes:
        requests: The requests: `list`, `watch 5`, `get a`.
    """

    def __init__(
        self, lists: Optional[list[Any]] = None, watches: Optional[list[Any]] = None
    ) -> None:
        self.requests: list[str] = []
        self._lists, self._watches = lists or [], watches or []
        self._ended = threading.Event()
        self._came = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            """Answers one request."""

            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                """Answers a list, a get or a watch."""
                owner._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Is silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.client = Apiserver(f"http://127.0.0.1:{self._server.server_port}/prefix")

    def __enter__(self) -> FakeApiserver:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def until(self, *requests: str) -> None:
        """Waits until these requests have come."""
        with self._came:
            assert self._came.wait_for(lambda: self.requests == list(requests), 60), self.requests

    def _note(self, request: str) -> None:
        with self._came:
            self.requests.append(request)
            self._came.notify_all()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = parse_qs(url.query)
        if "watch" in query:
            self._note(f"watch {query['resourceVersion'][0]}")
            self._watch(handler, self._watches.pop(0) if self._watches else [])
        elif url.path == "/prefix/api/v1/pods":
            self._note("list")
            content = self._lists.pop(0)
            if content == "hang":
                self._ended.wait()
            else:
                self._send(handler, content)
        else:
            name = url.path.rpartition("/")[2]
            self._note(f"get {name}")
            self._send(handler, {"kind": "Pod", "apiVersion": "v1", **pod(name, "3")})

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        content: Any,
        status: int = 200,
        headers: Optional[dict[str, str]] = None,
    ) -> None:
        body = json.dumps(content).encode()
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _watch(self, handler: BaseHTTPRequestHandler, script: Any) -> None:
        if script == "hang":
            self._ended.wait()
            return
        if script == "end":
            handler.send_response(200)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if script == "later":
            self._send(handler, {"code": 503}, 503, {"Retry-After": "3600"})
            return
        if isinstance(script, int):
            self._send(handler, {"message": "refused", "code": script}, script)
            return
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for item in script:
            text = json.dumps(item, separators=(",", ":")).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self._ended.wait()


def listed(version: str, *names: str) -> dict[str, Any]:
    """A list."""
    items = [pod(name, "1") for name in names]
    return {
        "kind": "PodList",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": version},
        "items": items,
    }
