"""The client for asyncio: the same names as in `kubefan`, with `await` and `async for`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import grpc
import grpc.aio

from . import _keywords as messages
from ._changes import Changes
from ._endpoint import ClientOptions, Endpoint, endpoint
from ._in_cluster import in_cluster_options
from ._keywords import ObjectList, Statuses
from ._watch_state import WatchState
from .client import Metadata, metadata_of
from .errors import KubefanError, ProtocolError, Unauthenticated, Unreachable, from_call, from_rpc
from .items import Disconnected, Event, WatchItem
from .objects import Object
from .options import Target, WatchOptions, check_seconds
from .reasons import ErrorReason
from .v1alpha1 import watch_pb2 as api

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._in_cluster import ClientKeywords
    from ._keywords import GetKeywords, ListKeywords, WatchKeywords
    from .aio_informer import Informer

_T = TypeVar("_T")


class Client:
    """A client of one kubefan, for one event loop. All its calls share one connection."""

    def __init__(self, address: str, options: Optional[ClientOptions] = None) -> None:
        """Makes a client that connects with its first call. As `kubefan.Client`."""
        self._options = options or ClientOptions()
        self._endpoint = endpoint(address, self._options)
        self.address = address
        self._channel = _channel(self._endpoint)

    @classmethod
    async def connect(cls, address: str, options: Optional[ClientOptions] = None) -> Self:
        """Connects now. Raises `Unreachable` or `ProtocolError` if kubefan is not there."""
        client = cls(address, options)
        try:
            await client._call(client._ask_resources, client._options.connect_timeout)
        except (Unreachable, ProtocolError):
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

        async def ask(metadata: Metadata, seconds: float) -> ObjectList:
            reader = messages.ListReader()
            call = self._channel.unary_stream(
                messages.LIST,
                request_serializer=api.ListRequest.SerializeToString,
                response_deserializer=api.ListResponse.FromString,
            )
            async for chunk in call(request, metadata=metadata, timeout=seconds):
                reader.accept(chunk)
            found = reader.result()
            if found is None:
                raise ProtocolError(
                    f"{self.address} does not speak kubefan's protocol: "
                    "a list without a resource version"
                )
            return found

        return await self._call(ask, limit)

    async def get(
        self, resource: str, name: str, namespace: str = "", **keywords: Unpack[GetKeywords]
    ) -> Object:
        """Gets one object. Raises `NotFound`.

        Keywords: `group`, `version`, and as for `list` `resource_version`, `projection`, `timeout`.
        """
        request, limit = messages.get_request(resource, name, namespace, dict(keywords))

        async def ask(metadata: Metadata, seconds: float) -> Object:
            call = self._channel.unary_unary(
                messages.GET,
                request_serializer=api.GetRequest.SerializeToString,
                response_deserializer=api.GetResponse.FromString,
            )
            response: api.GetResponse = await call(request, metadata=metadata, timeout=seconds)
            return messages.object_of(response.object)

        return await self._call(ask, limit)

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
        return WatchItems(self, target, options)

    def informer(self, resource: str, **keywords: Unpack[WatchKeywords]) -> Informer:
        """An informer: a store that is kept equal to the server's state, and handlers."""
        from .aio_informer import Informer

        return Informer(self, resource, dict(keywords))

    async def close(self) -> None:
        """Closes the connection, and ends all its calls."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
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

    async def _call(self, ask: Callable[[Metadata, float], Awaitable[_T]], seconds: float) -> _T:
        """Asks with the token; once more if kubefan refuses it and the file has another."""
        end = time.monotonic() + seconds
        for attempt in (1, 2):
            sent = self._authorization()
            try:
                return await ask(metadata_of(sent), max(0.0, end - time.monotonic()))
            except grpc.RpcError as failed:
                error = from_call(failed, self.address, seconds)
                refused = isinstance(error, Unauthenticated)
                if not refused or attempt == 2 or not self._endpoint.token.replacement(sent):
                    raise error from None
        raise AssertionError("unreachable")

    def _authorization(self) -> Optional[str]:
        # A short file on a file system in memory: reading it does not keep the loop.
        try:
            return self._endpoint.token.header()
        except (OSError, ValueError) as error:
            raise Unreachable(f"cannot reach kubefan at {self.address}: {error}") from None


def _channel(made: Endpoint) -> grpc.aio.Channel:
    if made.credentials is None:
        return grpc.aio.insecure_channel(made.target, options=made.settings)
    return grpc.aio.secure_channel(made.target, made.credentials, options=made.settings)


class WatchItems(AsyncIterator[WatchItem]):
    """A running watch. One task reads it.

    Attributes:
        resume_version: Every item at or below this version has been returned. Empty until the first
            snapshot is complete.
    """

    def __init__(self, client: Client, target: Target, options: WatchOptions) -> None:
        self._client = client
        self._token = client._endpoint.token
        self._state = WatchState(target, options, client.address)
        self._ready: deque[WatchItem] = deque()
        self._call: Any = None
        self._sent: Optional[str] = None
        self._closed = asyncio.Event()
        self.resume_version = options.resource_version
        self._method = client._channel.unary_stream(
            messages.WATCH,
            request_serializer=api.WatchRequest.SerializeToString,
            response_deserializer=api.WatchResponse.FromString,
        )

    @property
    def cluster(self) -> str:
        """The cluster of `resume_version`, for `watch(cluster=…)`; empty if it is unknown."""
        return self._state.cluster

    async def __anext__(self) -> WatchItem:
        """The next item. Ends after the timeout or `close`, and raises as `kubefan.WatchItems`."""
        while not self._ready:
            if self._closed.is_set() or self._state.ended:
                raise StopAsyncIteration
            self._ready.extend(await self._step())
        item = self._ready.popleft()
        self.resume_version = item.resume_version or self.resume_version
        return item

    def close(self) -> None:
        """Ends the watch, also while another task reads it."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    async def _step(self) -> list[WatchItem]:
        try:
            if self._call is None:
                return await self._open()
            message = await self._call.read()
        except grpc.RpcError as failed:
            return self._failed(from_rpc(failed, self._client.address))
        except asyncio.CancelledError:
            # `close` cancels the call, which the reader notices as its own cancellation.
            if self._closed.is_set():
                return []
            raise
        if message is grpc.aio.EOF:
            self._call = None
            return self._state.finished(time.monotonic())
        items = self._state.accept(message, time.monotonic())
        if items and isinstance(items[-1], Disconnected):
            self._call.cancel()
            self._call = None
        return items

    async def _open(self) -> list[WatchItem]:
        delay = self._state.delay(time.monotonic())
        if delay > 0:
            try:
                await asyncio.wait_for(self._closed.wait(), delay)
                return []
            except asyncio.TimeoutError:
                pass
        now = time.monotonic()
        request = self._state.request(now)
        if request is None:
            return []
        try:
            self._sent = self._client._authorization()
        except KubefanError as error:
            return self._failed(error)
        call = self._method(
            request, metadata=metadata_of(self._sent), timeout=self._state.call_seconds(now)
        )
        self._call = call
        await call.initial_metadata()
        # A call that was refused is already over, and its error comes with the next step.
        return [] if call.done() else self._state.opened(time.monotonic())

    def _failed(self, error: KubefanError) -> list[WatchItem]:
        self._call = None
        if self._closed.is_set():
            return []
        if isinstance(error, Unauthenticated):
            if not self._state.is_open and self._token.replacement(self._sent):
                return []
            self._token.expire(self._sent)
        elif error.reason == ErrorReason.REAUTHENTICATE:
            self._token.expire(self._sent)
        return self._state.failed(error, time.monotonic(), self._token.may_change)


class WatchStream(AsyncIterator[Event]):
    """The events of a watch. One task reads it.

    Attributes:
        resume_version: Every event at or below this version has been returned.
    """

    def __init__(self, items: WatchItems) -> None:
        self._items = items
        self._changes = Changes()
        self._ready: deque[Event] = deque()
        self.resume_version = items.resume_version

    @property
    def cluster(self) -> str:
        """The cluster of `resume_version`, for `watch(cluster=…)`; empty if it is unknown."""
        return self._items.cluster

    async def __anext__(self) -> Event:
        """The next event. Ends after the timeout or `close`, and raises errors."""
        while not self._ready:
            item = await self._items.__anext__()
            self._ready.extend(self._changes.accept(item))
            if not self._ready:
                self.resume_version = item.resume_version or self.resume_version
        event = self._ready.popleft()
        self.resume_version = event.resume_version or self.resume_version
        return event

    def close(self) -> None:
        """Ends the watch, also while another task reads it."""
        self._items.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()
