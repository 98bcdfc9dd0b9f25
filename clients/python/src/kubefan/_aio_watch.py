"""A watch for asyncio: asynchronous iterators."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Optional

import grpc
import grpc.aio

from . import _keywords as messages
from ._changes import Changes
from ._context import AsyncContextManager
from ._endpoint import Endpoint
from ._token import metadata_of
from ._watch_state import WatchState
from .errors import KubefanError, Unauthenticated, from_rpc
from .items import Disconnected, Event, WatchItem
from .options import Target, WatchOptions
from .reasons import ErrorReason
from .v1alpha1 import watch_pb2 as api


class WatchItems(AsyncContextManager, AsyncIterator[WatchItem]):
    """A running watch. One task reads it.

    Attributes:
        resume_version: Every item at or below this version has been returned. Empty until the first
            snapshot is complete.
    """

    def __init__(
        self, channel: grpc.aio.Channel, made: Endpoint, target: Target, options: WatchOptions
    ) -> None:
        self._endpoint = made
        self._token = made.token
        self._state = WatchState(target, options, made.address)
        self._ready: deque[WatchItem] = deque()
        self._call: Any = None
        self._sent: Optional[str] = None
        self._closed = asyncio.Event()
        self.resume_version = options.resource_version
        self._method = channel.unary_stream(
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

    async def _exit(self) -> None:
        self.close()

    async def _step(self) -> list[WatchItem]:
        try:
            if self._call is None:
                return await self._open()
            message = await self._call.read()
        except grpc.RpcError as failed:
            return self._failed(from_rpc(failed, self._endpoint.address))
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
            self._sent = self._endpoint.authorization()
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


class WatchStream(AsyncContextManager, AsyncIterator[Event]):
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

    async def _exit(self) -> None:
        self.close()
