"""The client for ordinary programs: calls that block."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import grpc

from . import _keywords as messages
from ._connection import Connection
from ._context import ContextManager
from ._endpoint import ClientOptions, Endpoint, endpoint
from ._fallback import Budget, ThreadClock, Verdict
from ._fallback_reads import (
    HEALTH,
    LATE_SECONDS,
    PROBE_SECONDS_MAX,
    SERVING,
    FallbackReads,
    Kind,
    Reports,
    answer_of,
    closed,
    kind_of,
    late,
    wait_for_start,
)
from ._in_cluster import in_cluster_options
from ._keywords import ObjectList, Statuses
from ._token import Metadata, metadata_of
from ._watch import WatchItems, WatchStream
from .apiserver import Abort
from .errors import KubefanError, ProtocolError, Unauthenticated, Unreachable, from_call
from .informer import Informer
from .items import Resource
from .objects import Object
from .options import Target, check_seconds
from .v1alpha1 import watch_pb2 as api

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._in_cluster import ClientKeywords
    from ._keywords import GetKeywords, ListKeywords, WatchKeywords

__all__ = ["Client", "WatchItems", "WatchStream"]

_T = TypeVar("_T")
_RESOURCES = kind_of("list_resources", Target(""))


class Client(ContextManager):
    """A client of one kubefan. Threads may share it, and all its calls share one connection.

    It connects with the first call, and again whenever the connection broke. Use it as a context
    manager, or call `close`.
    """

    def __init__(self, address: str, options: Optional[ClientOptions] = None) -> None:
        """Makes a client that connects with its first call: a watch waits for the server.

        `address` is `host:port`, `https://host:port`, `dns:host:port` or `unix:/path`. Raises
        `InvalidAddress`.
        """
        self._options = options or ClientOptions()
        self._endpoint = endpoint(address, self._options)
        self.address = address
        self._connection = Connection(_channel(self._endpoint))
        self._channel = self._connection.channel
        if self._options.apiserver is not None:
            options = self._options
            reads = FallbackReads(
                address,
                self._options.apiserver,
                options.budget or Budget(),
                Reports(options.on_side, options.on_start),
                ThreadClock(),
                self._probe,
            )
            self._endpoint = replace(self._endpoint, fallback=reads)

    @classmethod
    def connect(cls, address: str, options: Optional[ClientOptions] = None) -> Self:
        """Connects now. Raises `Unreachable` or `ProtocolError` if kubefan is not there.

        With an apiserver, a kubefan that cannot be reached is no error.
        """
        client = cls(address, options)
        reads = client._endpoint.fallback
        try:
            client._call(client._ask_resources, client._options.connect_timeout)
        except (Unreachable, ProtocolError) as error:
            if reads is not None and reads.note(error, 0, _RESOURCES) == Verdict.AWAY:
                return client  # Reads go to the apiserver.
            client.close()
            raise
        except KubefanError:
            pass  # It is there. Not every caller may list its caches.
        return client

    @classmethod
    def in_cluster(cls, address: str = "", **options: Unpack[ClientKeywords]) -> Self:
        """A client for a pod: kubefan's Service, with the token of the pod's service account.

        `options` are those of `ClientOptions`. docs/attach.md shows how a pod gets kubefan's CA.
        """
        return cls(*in_cluster_options(address, dict(options)))

    def list(self, resource: str, **keywords: Unpack[ListKeywords]) -> ObjectList:
        """Lists objects, at one version and in key order.

        Keywords: those of `Target`, `resource_version` (the state is not older), `projection`, and
        `timeout`: after this many seconds without the complete answer, 300 by default, it raises
        `Unreachable` with the code `DEADLINE_EXCEEDED`.
        """
        request, limit = messages.list_request(resource, dict(keywords))
        target, projection = messages.read_options(resource, dict(keywords))

        def ask(metadata: Metadata, seconds: float) -> ObjectList:
            reader = messages.ListReader()
            call = self._channel.unary_stream(
                messages.LIST,
                request_serializer=api.ListRequest.SerializeToString,
                response_deserializer=api.ListResponse.FromString,
            )
            chunks = call(request, metadata=metadata, timeout=seconds)
            self._learn(chunks)
            for chunk in chunks:
                reader.accept(chunk)
            found = reader.result()
            if found is None:
                raise ProtocolError(
                    f"{self.address} does not speak kubefan's protocol: "
                    "a list without a resource version"
                )
            self._remember(target, found.resource)
            return found

        def direct(reads: FallbackReads, abort: Abort) -> ObjectList:
            found = reads.apiserver.list(reads.read(target, projection), abort)
            return messages.list_of_apiserver(*found)

        return self._either(ask, direct, limit, kind_of("list", target))

    def get(
        self, resource: str, name: str, namespace: str = "", **keywords: Unpack[GetKeywords]
    ) -> Object:
        """Gets one object. Raises `NotFound`.

        Keywords: `group`, `version`, and as for `list` `resource_version`, `projection`, `timeout`.
        """
        request, limit = messages.get_request(resource, name, namespace, dict(keywords))
        options = {**keywords, "name": name, "namespace": namespace}
        target, projection = messages.read_options(resource, options)

        def ask(metadata: Metadata, seconds: float) -> Object:
            call = self._channel.unary_unary(
                messages.GET,
                request_serializer=api.GetRequest.SerializeToString,
                response_deserializer=api.GetResponse.FromString,
            )
            future = call.future(request, metadata=metadata, timeout=seconds)
            self._learn(future)
            response: api.GetResponse = future.result()
            return messages.object_of(response.object)

        def direct(reads: FallbackReads, abort: Abort) -> Object:
            return reads.apiserver.get(reads.read(target, projection), abort)

        return self._either(ask, direct, limit, kind_of("get", target))

    def list_resources(self, timeout: float = messages.CALL_SECONDS_MAX) -> Statuses:
        """The state of each cache, ordered by name. `timeout` as for `list`."""
        check_seconds("timeout", timeout)
        return self._call(self._ask_resources, timeout)

    def watch(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchStream:
        """Watches objects: first those that exist, as ADDED, then every change.

        The stream resumes by itself after a break. If it has to start over, it only has the
        changes, with DELETED events for objects that are gone. Keywords: those of `Target` and
        `WatchOptions`. With a `resource_version`, `on_expired` is `OnExpired.FAIL` by default.
        """
        return WatchStream(self.watch_items(resource, **keywords))

    def watch_items(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchItems:
        """Like `watch`, with everything that the server and the connection report.

        Snapshots, gaps and catch-ups have marks; the caller applies them as units.
        """
        target, options = messages.watch_options(resource, dict(keywords))
        return WatchItems(self._connection, self._endpoint, target, options)

    def informer(self, resource: str, **keywords: Unpack[WatchKeywords]) -> Informer:
        """An informer: a store that is kept equal to the server's state, and handlers.

        Keywords as for `watch`; with a projection, `only_changes` is true by default.
        """
        return Informer(self._connection, self._endpoint, resource, dict(keywords))

    def close(self) -> None:
        """Closes the connection, and ends all its calls. Takes up to 0.4 s during an outage."""
        if self._endpoint.fallback is not None:
            self._endpoint.fallback.close()
        self._connection.close()

    def _exit(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    def _ask_resources(self, metadata: Metadata, seconds: float) -> Statuses:
        call = self._channel.unary_unary(
            messages.LIST_RESOURCES,
            request_serializer=api.ListResourcesRequest.SerializeToString,
            response_deserializer=api.ListResourcesResponse.FromString,
        )
        response: api.ListResourcesResponse = call(
            api.ListResourcesRequest(), metadata=metadata, timeout=seconds
        )
        return messages.statuses_of(response)

    def _probe(self, done: Callable[[bool], None]) -> None:
        """Asks kubefan for its health, without credentials."""
        check = self._channel.unary_unary(HEALTH)
        try:
            answer = check(b"", timeout=PROBE_SECONDS_MAX, wait_for_ready=True)
            is_serving = answer == SERVING
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed.
            is_serving = False
        done(is_serving)

    def _learn(self, call: Any) -> None:
        reads = self._endpoint.fallback
        if reads is not None:
            reads.learn(answer_of(call, self.address))

    def _remember(self, target: Target, resource: Optional[Resource]) -> None:
        if self._endpoint.fallback is not None:
            self._endpoint.fallback.resolved(target, resource)

    def _either(
        self,
        ask: Callable[[Metadata, float], _T],
        direct: Callable[[FallbackReads, Abort], _T],
        seconds: float,
        kind: Kind,
    ) -> _T:
        """Asks kubefan, and the apiserver while kubefan is away."""
        reads = self._endpoint.fallback
        if reads is None:
            return self._call(ask, seconds)
        end = time.monotonic() + seconds
        while True:
            if reads.is_closed:
                raise closed(self.address)
            view, left = reads.monitor.look(), end - time.monotonic()
            if view.is_healthy:
                try:
                    found = self._call(ask, max(0.0, left))
                except KubefanError as error:
                    # The server's own timer may be a little early.
                    is_late = time.monotonic() >= end - LATE_SECONDS
                    verdict = Verdict.ANSWERED
                    if not is_late:
                        verdict = reads.note(error, view.epoch, kind)
                    if verdict == Verdict.BUSY_FOR_LONG:
                        verdict = reads.judge(error, view.epoch, reads.is_serving())
                    if verdict in (Verdict.ANSWERED, Verdict.BUSY):
                        raise
                    if verdict == Verdict.AWAY:
                        continue
                else:
                    reads.note(None, view.epoch, kind)
                    return found
            if end <= time.monotonic():
                raise late(self.address, seconds)
            if wait_for_start(reads, view, end - time.monotonic()):
                abort = Abort()
                cancel = reads.clock.call_later(max(0.0, end - time.monotonic()), abort.set)
                try:
                    return reads.direct(direct, abort)
                finally:
                    cancel()

    def _call(self, ask: Callable[[Metadata, float], _T], seconds: float) -> _T:
        """Asks with the token; once more if kubefan refuses it and the file has another."""
        end = time.monotonic() + seconds
        for attempt in (1, 2):
            sent = self._endpoint.authorization()
            try:
                return ask(metadata_of(sent), max(0.0, end - time.monotonic()))
            except grpc.RpcError as failed:
                error = from_call(failed, self.address, seconds)
                refused = isinstance(error, Unauthenticated)
                if not refused or attempt == 2 or not self._endpoint.token.replacement(sent):
                    raise error from None
        raise AssertionError("unreachable")


def _channel(made: Endpoint) -> grpc.Channel:
    if made.credentials is None:
        return grpc.insecure_channel(made.target, options=made.settings)
    return grpc.secure_channel(made.target, made.credentials, options=made.settings)
