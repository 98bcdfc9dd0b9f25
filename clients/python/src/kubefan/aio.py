"""The client for asyncio: the same names as in `kubefan`, with `await` and `async for`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import grpc
import grpc.aio

from . import _keywords as messages
from ._aio_fallback import LoopClock, Worker, answer_in_time, health_of
from ._aio_watch import WatchItems, WatchStream
from ._context import AsyncContextManager
from ._endpoint import ClientOptions, Endpoint, endpoint
from ._fallback import Budget, Verdict, View
from ._fallback_reads import (
    HEALTH,
    LATE_SECONDS,
    PROBE_SECONDS_MAX,
    SERVING,
    FallbackReads,
    Kind,
    Reports,
    StartWait,
    closed,
    kind_of,
    late,
)
from ._in_cluster import in_cluster_options
from ._keywords import ObjectList, Statuses
from ._token import Metadata, metadata_of
from .aio_informer import Informer
from .apiserver import Abort
from .errors import KubefanError, ProtocolError, Unauthenticated, Unreachable, from_call
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


class Client(AsyncContextManager):
    """A client of one kubefan, for one event loop. All its calls share one connection."""

    def __init__(self, address: str, options: Optional[ClientOptions] = None) -> None:
        """Makes a client that connects with its first call. As `kubefan.Client`."""
        self._options = options or ClientOptions()
        self._endpoint = endpoint(address, self._options)
        self.address = address
        self._channel = _channel(self._endpoint)
        self._clock = LoopClock()
        self._probes: set[asyncio.Task[None]] = set()
        if self._options.apiserver is not None:
            reads = FallbackReads(
                address,
                self._options.apiserver,
                self._options.budget or Budget(),
                Reports(self._options.on_side, self._options.on_start),
                self._clock,
                self._probe,
            )
            self._endpoint = replace(self._endpoint, fallback=reads)

    @classmethod
    async def connect(cls, address: str, options: Optional[ClientOptions] = None) -> Self:
        """Connects now. Raises `Unreachable` or `ProtocolError` if kubefan is not there.

        With an apiserver, a kubefan that cannot be reached is no error.
        """
        client = cls(address, options)
        client._clock.bind()
        reads = client._endpoint.fallback
        try:
            await client._call(client._ask_resources, client._options.connect_timeout)
        except (Unreachable, ProtocolError) as error:
            if reads is not None and reads.note(error, 0, _RESOURCES) == Verdict.AWAY:
                return client  # Reads go to the apiserver.
            await client.close()
            raise
        except KubefanError:
            pass  # It is there. Not every caller may list its caches.
        return client

    @classmethod
    def in_cluster(cls, address: str = "", **options: Unpack[ClientKeywords]) -> Self:
        """A client for a pod: kubefan's Service, with the token of the pod's service account."""
        return cls(*in_cluster_options(address, dict(options)))

    async def list(self, resource: str, **keywords: Unpack[ListKeywords]) -> ObjectList:
        """Lists objects, at one version and in key order. As `kubefan.Client.list`."""
        request, limit = messages.list_request(resource, dict(keywords))
        target, projection = messages.read_options(resource, dict(keywords))

        async def ask(metadata: Metadata, seconds: float) -> ObjectList:
            reader = messages.ListReader()
            call = self._channel.unary_stream(
                messages.LIST,
                request_serializer=api.ListRequest.SerializeToString,
                response_deserializer=api.ListResponse.FromString,
            )
            chunks = call(request, metadata=metadata, timeout=seconds)
            await self._learn(chunks)
            async for chunk in chunks:
                reader.accept(chunk)
            found = reader.result()
            if found is None:
                raise ProtocolError(
                    f"{self.address} does not speak kubefan's protocol: "
                    "a list without a resource version"
                )
            if self._endpoint.fallback is not None:
                self._endpoint.fallback.resolved(target, found.resource)
            return found

        def direct(reads: FallbackReads, abort: Abort) -> ObjectList:
            found = reads.apiserver.list(reads.read(target, projection), abort)
            return messages.list_of_apiserver(*found)

        return await self._either(ask, direct, limit, kind_of("list", target))

    async def get(
        self, resource: str, name: str, namespace: str = "", **keywords: Unpack[GetKeywords]
    ) -> Object:
        """Gets one object. Raises `NotFound`.

        Keywords: `group`, `version`, and as for `list` `resource_version`, `projection`, `timeout`.
        """
        request, limit = messages.get_request(resource, name, namespace, dict(keywords))
        options = {**keywords, "name": name, "namespace": namespace}
        target, projection = messages.read_options(resource, options)

        async def ask(metadata: Metadata, seconds: float) -> Object:
            call = self._channel.unary_unary(
                messages.GET,
                request_serializer=api.GetRequest.SerializeToString,
                response_deserializer=api.GetResponse.FromString,
            )
            answer = call(request, metadata=metadata, timeout=seconds)
            await self._learn(answer)
            response: api.GetResponse = await answer
            return messages.object_of(response.object)

        def direct(reads: FallbackReads, abort: Abort) -> Object:
            return reads.apiserver.get(reads.read(target, projection), abort)

        return await self._either(ask, direct, limit, kind_of("get", target))

    async def list_resources(self, timeout: float = messages.CALL_SECONDS_MAX) -> Statuses:
        """The state of each cache, ordered by name. `timeout` as for `list`."""
        check_seconds("timeout", timeout)
        return await self._call(self._ask_resources, timeout)

    def watch(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchStream:
        """Watches objects. As `kubefan.Client.watch`, for `async for`."""
        return WatchStream(self.watch_items(resource, **keywords))

    def watch_items(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchItems:
        """As `watch`, with everything that the server and the connection say."""
        target, options = messages.watch_options(resource, dict(keywords))
        self._bind()
        return WatchItems(self._channel, self._endpoint, target, options)

    def informer(self, resource: str, **keywords: Unpack[WatchKeywords]) -> Informer:
        """An informer: a store that is kept equal to the server's state, and handlers."""
        self._bind()
        return Informer(self._channel, self._endpoint, resource, dict(keywords))

    async def close(self) -> None:
        """Closes the connection, and ends all its calls."""
        if self._endpoint.fallback is not None:
            self._endpoint.fallback.close()
        for task in self._probes:
            task.cancel()
        await self._channel.close()

    async def _exit(self) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    async def _ask_resources(self, metadata: Metadata, seconds: float) -> Statuses:
        call = self._channel.unary_unary(
            messages.LIST_RESOURCES,
            request_serializer=api.ListResourcesRequest.SerializeToString,
            response_deserializer=api.ListResourcesResponse.FromString,
        )
        response: api.ListResourcesResponse = await call(
            api.ListResourcesRequest(), metadata=metadata, timeout=seconds
        )
        return messages.statuses_of(response)

    def _bind(self) -> None:
        """Lets the fallback use the running loop."""
        if self._endpoint.fallback is not None:
            self._clock.bind()

    def _probe(self, done: Callable[[bool], None]) -> None:
        """Asks kubefan for its health, without credentials."""

        async def ask() -> None:
            check = self._channel.unary_unary(HEALTH)
            try:
                answer = await check(b"", timeout=PROBE_SECONDS_MAX, wait_for_ready=True)
                is_serving = answer == SERVING
            except (grpc.RpcError, grpc.aio.UsageError):
                is_serving = False
            done(is_serving)

        task = self._clock.bind().create_task(ask())
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _learn(self, call: Any) -> None:
        reads = self._endpoint.fallback
        if reads is not None:
            reads.learn(await answer_in_time(call, self.address))

    async def _either(
        self,
        ask: Callable[[Metadata, float], Awaitable[_T]],
        direct: Callable[[FallbackReads, Abort], _T],
        seconds: float,
        kind: Kind,
    ) -> _T:
        """Asks kubefan, and the apiserver while kubefan is away."""
        reads = self._endpoint.fallback
        if reads is None:
            return await self._call(ask, seconds)
        self._clock.bind()
        end = time.monotonic() + seconds
        while True:
            if reads.is_closed:
                raise closed(self.address)
            view, left = reads.monitor.look(), end - time.monotonic()
            if view.is_healthy:
                try:
                    found = await self._call(ask, max(0.0, left))
                except KubefanError as error:
                    # The server's own timer may be a little early.
                    is_late = time.monotonic() >= end - LATE_SECONDS
                    verdict = Verdict.ANSWERED
                    if not is_late:
                        verdict = reads.note(error, view.epoch, kind)
                    if verdict == Verdict.BUSY_FOR_LONG:
                        verdict = reads.judge(error, view.epoch, await health_of(reads))
                    if verdict in (Verdict.ANSWERED, Verdict.BUSY):
                        raise
                    if verdict == Verdict.AWAY:
                        continue
                else:
                    reads.note(None, view.epoch, kind)
                    return found
            if end <= time.monotonic():
                raise late(self.address, seconds)
            if await self._is_started(reads, view, end - time.monotonic()):
                return await self._run_direct(reads, direct, end - time.monotonic())

    async def _is_started(self, reads: FallbackReads, view: View, seconds: float) -> bool:
        woken = asyncio.Event()
        wait = StartWait(reads, False, view, lambda: self._clock.soon(woken.set))
        try:
            await asyncio.wait_for(woken.wait(), seconds)
        except asyncio.TimeoutError:
            pass
        finally:
            is_admitted = wait.end()
        return is_admitted

    async def _run_direct(
        self, reads: FallbackReads, direct: Callable[[FallbackReads, Abort], _T], seconds: float
    ) -> _T:
        abort, worker = Abort(), Worker(self._clock)
        cancel = self._clock.call_later(max(0.0, seconds), abort.set)
        try:
            return await worker.run(lambda: reads.direct(direct, abort))
        except asyncio.CancelledError:
            abort.set()
            raise
        finally:
            cancel()
            worker.close()

    async def _call(self, ask: Callable[[Metadata, float], Awaitable[_T]], seconds: float) -> _T:
        """Asks with the token; once more if kubefan refuses it and the file has another."""
        end = time.monotonic() + seconds
        for attempt in (1, 2):
            sent = self._endpoint.authorization()
            try:
                return await ask(metadata_of(sent), max(0.0, end - time.monotonic()))
            except grpc.RpcError as failed:
                error = from_call(failed, self.address, seconds)
                refused = isinstance(error, Unauthenticated)
                if not refused or attempt == 2 or not self._endpoint.token.replacement(sent):
                    raise error from None
        raise AssertionError("unreachable")


def _channel(made: Endpoint) -> grpc.aio.Channel:
    if made.credentials is None:
        return grpc.aio.insecure_channel(made.target, options=made.settings)
    return grpc.aio.secure_channel(made.target, made.credentials, options=made.settings)
