"""A server that answers each watch with a script, for cases no real server produces on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, Callable, Optional

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from kubefan.v1alpha1 import watch_pb2 as api

Script = Callable[[api.WatchRequest, Any], Iterator[api.WatchResponse]]


class Server:
    """A WatchService on a Unix socket or a port. Each watch gets the next script.

    Calls that list or get have no complete answer, and end when the client gives up.

    Attributes:
        requests: The watches that were asked for.
        tokens: The `authorization` of each.
        limits: The seconds that each call to list or get had left when it arrived.
        is_serving: What its health is.
    """

    def __init__(self, *scripts: Script, address: str = "127.0.0.1:0") -> None:
        self.requests: list[api.WatchRequest] = []
        self.tokens: list[str] = []
        self.limits: list[float] = []
        self.is_serving = True
        self._scripts = list(scripts)
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        methods = {
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._watch,
                request_deserializer=api.WatchRequest.FromString,
                response_serializer=api.WatchResponse.SerializeToString,
            ),
            "List": grpc.unary_stream_rpc_method_handler(self._answer_a_part),
            "Get": grpc.unary_unary_rpc_method_handler(self._answer_nothing),
            "ListResources": grpc.unary_unary_rpc_method_handler(self._answer_nothing),
        }
        handler = grpc.method_handlers_generic_handler("kubefan.v1alpha1.WatchService", methods)
        check = grpc.unary_unary_rpc_method_handler(
            lambda *_: b"\x08\x01" if self.is_serving else b"\x08\x02"
        )
        health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
        self._server.add_generic_rpc_handlers((handler, health))
        port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _answer_nothing(self, _: bytes, context: Any) -> bytes:
        self._limit(context)
        wait(context)
        return b""

    def _answer_a_part(self, _: bytes, context: Any) -> Iterator[bytes]:
        self._limit(context)
        yield api.ListResponse(resource_version="5").SerializeToString()
        wait(context)

    def _limit(self, context: Any) -> None:
        with self._lock:
            self.limits.append(context.time_remaining())

    def _watch(self, request: api.WatchRequest, context: Any) -> Iterator[api.WatchResponse]:
        with self._lock:
            self.requests.append(request)
            metadata = dict(context.invocation_metadata())
            self.tokens.append(str(metadata.get("authorization", "")))
            script = self._scripts.pop(0) if self._scripts else idle
        context.send_initial_metadata(())
        yield from script(request, context)


def idle(_: api.WatchRequest, context: Any) -> Iterator[api.WatchResponse]:
    """Stays silent until the client ends the call."""
    wait(context)
    yield from ()


def wait(context: Any) -> None:
    """Waits until the client ends the call."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait()


def sends(*messages: api.WatchResponse, then: Optional[Script] = None) -> Script:
    """Sends messages, then does something else; by default it stays silent."""

    def script(request: api.WatchRequest, context: Any) -> Iterator[api.WatchResponse]:
        yield from messages
        yield from (then or idle)(request, context)

    return script


def fails(
    code: grpc.StatusCode, reason: str = "", message: str = "", delay: Optional[float] = None
) -> Script:
    """Ends the call with one of kubefan's errors."""

    def script(_: api.WatchRequest, context: Any) -> Iterator[api.WatchResponse]:
        details: list[Any] = []
        if reason:
            details.append(error_details_pb2.ErrorInfo(reason=reason, domain="kubefan.dev"))
        if delay is not None:
            nanos = round(delay * 1e9)
            details.append(
                error_details_pb2.RetryInfo(
                    retry_delay=duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
                )
            )
        packed = []
        for detail in details:
            box = any_pb2.Any()
            box.Pack(detail)
            packed.append(box)
        status = status_pb2.Status(code=code.value[0], message=message, details=packed)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(code, message or reason)
        yield from ()

    return script
