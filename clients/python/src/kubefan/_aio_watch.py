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
from ._aio_fallback import LoopClock, Worker, answer_in_time, health_of
from ._changes import Changes
from ._context import AsyncContextManager
from ._endpoint import Endpoint
from ._fallback import Verdict
from ._fallback_reads import StartWait
from ._token import metadata_of
from ._watch_fallback import WatchFallback
from ._watch_state import WatchState
from .errors import KubefanError, Unauthenticated, Unreachable, from_rpc
from .items import Disconnected, Event, WatchItem
from .options import Fallback, Target, WatchOptions
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
        self._fallback: Optional[WatchFallback] = None
        if made.fallback is not None and options.fallback != Fallback.NEVER:
            self._fallback = WatchFallback(made.fallback, self._state, target, options)
        self._worker: Optional[Worker] = None
        #: The step at the apiserver that is under way.
        self._reading: Optional[asyncio.Future[list[WatchItem]]] = None
        self.resume_version = options.resource_version
        if self._fallback is not None:
            self._fallback.reads.add(self)
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
        if self._fallback is not None:
            self._fallback.close()
        if self._worker is not None:
            self._worker.close()

    async def _exit(self) -> None:
        self.close()

    async def _step(self) -> list[WatchItem]:
        fallback = self._fallback
        if self._call is None and fallback is not None:
            is_under_way = self._reading is not None
            if is_under_way or fallback.goes_direct(time.monotonic()):
                return await self._direct(fallback)
        try:
            if self._call is None:
                return await self._open()
            message = await self._call.read()
        except grpc.RpcError as failed:
            return await self._failed(from_rpc(failed, self._endpoint.address))
        except Unreachable as error:
            return await self._failed(error)
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
        return items if fallback is None else fallback.filtered(items)

    async def _direct(self, fallback: WatchFallback) -> list[WatchItem]:
        """A step at the apiserver."""
        now = time.monotonic()
        if self._reading is None and not fallback.is_open:
            left = self._state.seconds_left(now)
            if self._state.is_over(now) or not await self._start(fallback, left):
                return []
        if self._reading is None:
            step = fallback.read if fallback.is_open else self._opened_direct
            self._reading = self._thread().run(step)
        # If the caller is cancelled, its next step gets the result.
        items = await asyncio.shield(self._reading)
        self._reading = None
        return items

    def _opened_direct(self) -> list[WatchItem]:
        return [] if self._fallback is None else self._fallback.open(time.monotonic())

    def _thread(self) -> Worker:
        if self._worker is None:
            clock = LoopClock()
            clock.bind()
            self._worker = Worker(clock)
        return self._worker

    async def _start(self, fallback: WatchFallback, left: Optional[float]) -> bool:
        """Waits for a start at the apiserver."""
        woken, loop, now = asyncio.Event(), asyncio.get_running_loop(), time.monotonic()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        forget = fallback.reads.monitor.listen(wake)
        try:
            if self._closed.is_set() or fallback.has_returned(now):
                return False
            delay = fallback.delay(now)
            if delay > 0:
                await self._woken_or_closed(woken, delay if left is None else min(delay, left))
                fallback.has_returned(time.monotonic())
                return False
        finally:
            forget()
        wait = StartWait(fallback.reads, fallback.has_state, fallback.view(), wake)
        try:
            await self._woken_or_closed(woken, left)
        finally:
            is_admitted = wait.end()
        if self._closed.is_set() or not is_admitted:
            fallback.has_returned(time.monotonic())
            return False
        return True

    async def _woken_or_closed(self, woken: asyncio.Event, seconds: Optional[float]) -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(woken.wait()), loop.create_task(self._closed.wait())]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _is_closed_within(self, seconds: float) -> bool:
        if seconds > 0:
            try:
                await asyncio.wait_for(self._closed.wait(), seconds)
            except asyncio.TimeoutError:
                return False
        return self._closed.is_set()

    async def _open(self) -> list[WatchItem]:
        if await self._is_closed_within(self._state.delay(time.monotonic())):
            return []
        now = time.monotonic()
        # Another read may have found meanwhile that kubefan is away.
        if self._fallback is not None and self._fallback.goes_direct(now):
            return []
        request = self._state.request(now)
        if request is None:
            return []
        reads = self._endpoint.fallback
        if self._fallback is not None:
            self._fallback.asks()
        try:
            self._sent = self._endpoint.authorization()
        except KubefanError as error:
            return await self._failed(error)
        call = self._method(
            request, metadata=metadata_of(self._sent), timeout=self._state.call_seconds(now)
        )
        self._call = call
        if reads is None:
            await call.initial_metadata()
        else:
            reads.learn(await answer_in_time(call, self._endpoint.address))
        # A call that was refused is already over, and its error comes with the next step.
        if call.done():
            return []
        if self._fallback is not None:
            self._fallback.opened(time.monotonic())
        return self._state.opened(time.monotonic())

    async def _failed(self, error: KubefanError) -> list[WatchItem]:
        self._call = None
        if self._closed.is_set():
            return []
        if isinstance(error, Unauthenticated):
            if not self._state.is_open and self._token.replacement(self._sent):
                return []
            self._token.expire(self._sent)
        elif error.reason == ErrorReason.REAUTHENTICATE:
            self._token.expire(self._sent)
        now, is_certain = time.monotonic(), True
        if self._fallback is not None:
            verdict = self._fallback.failed(error, now)
            if verdict == Verdict.BUSY_FOR_LONG:
                is_serving = await health_of(self._fallback.reads)
                now = time.monotonic()
                verdict = self._fallback.judged(error, now, is_serving)
            is_certain = verdict != Verdict.REFUSED
        return self._state.failed(error, now, self._token.may_change, is_certain)


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
