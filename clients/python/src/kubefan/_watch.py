"""A watch for ordinary programs: iterators that block."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Optional

import grpc

from . import _keywords as messages
from ._changes import Changes
from ._connection import Connection
from ._context import ContextManager
from ._endpoint import Endpoint
from ._fallback import Verdict
from ._fallback_reads import StartWait, answer_of
from ._token import metadata_of
from ._watch_fallback import WatchFallback
from ._watch_state import WatchState
from .errors import KubefanError, Unauthenticated, Unreachable, from_rpc
from .items import Disconnected, Event, WatchItem
from .options import Fallback, Target, WatchOptions
from .reasons import ErrorReason
from .v1alpha1 import watch_pb2 as api


class WatchItems(ContextManager, Iterator[WatchItem]):
    """A running watch. One thread reads it, any thread may `close` it.

    Attributes:
        resume_version: Every item at or below this version has been returned. Empty until the first
            snapshot is complete.
    """

    def __init__(
        self, connection: Connection, made: Endpoint, target: Target, options: WatchOptions
    ) -> None:
        self._connection = connection
        self._endpoint = made
        self._token = made.token
        self._state = WatchState(target, options, made.address)
        self._ready: deque[WatchItem] = deque()
        self._call: Any = None
        self._sent: Optional[str] = None
        self._closed = threading.Event()
        self._woken = threading.Event()
        self._fallback: Optional[WatchFallback] = None
        if made.fallback is not None and options.fallback != Fallback.NEVER:
            self._fallback = WatchFallback(made.fallback, self._state, target, options)
        self.resume_version = options.resource_version
        if self._fallback is not None:
            self._fallback.reads.add(self)
        self._method = connection.channel.unary_stream(
            messages.WATCH,
            request_serializer=api.WatchRequest.SerializeToString,
            response_deserializer=api.WatchResponse.FromString,
        )

    @property
    def cluster(self) -> str:
        """The cluster of `resume_version`, for `watch(cluster=…)`; empty if it is unknown."""
        return self._state.cluster

    def __next__(self) -> WatchItem:
        """The next item. Raises StopIteration after the timeout or `close`.

        Raises an error that a retry cannot fix, such as `Forbidden`; then the watch has ended.
        """
        while not self._ready:
            if self._closed.is_set() or self._state.ended:
                self._connection.ignore(self._listener)
                raise StopIteration
            self._ready.extend(self._step())
        item = self._ready.popleft()
        self.resume_version = item.resume_version or self.resume_version
        return item

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        self._woken.set()
        self._connection.ignore(self._listener)
        call = self._call
        if call is not None:
            call.cancel()
        if self._fallback is not None:
            self._fallback.close()

    def _exit(self) -> None:
        self.close()

    def _step(self) -> list[WatchItem]:
        fallback = self._fallback
        if self._call is None and fallback is not None and fallback.goes_direct(time.monotonic()):
            return self._direct(fallback)
        try:
            if self._call is None:
                return self._open()
            message = next(self._call)
        except StopIteration:
            self._call = None
            return self._state.finished(time.monotonic())
        except grpc.RpcError as failed:
            return self._failed(from_rpc(failed, self._endpoint.address))
        except Unreachable as error:
            return self._failed(error)
        except ValueError:
            # The channel was closed.
            self._closed.set()
            return []
        items = self._state.accept(message, time.monotonic())
        if items and isinstance(items[-1], Disconnected):
            self._call.cancel()
            self._call = None
        return items if fallback is None else fallback.filtered(items)

    def _direct(self, fallback: WatchFallback) -> list[WatchItem]:
        """A step at the apiserver."""
        now = time.monotonic()
        self._connection.ignore(self._listener)
        if fallback.is_open:
            return fallback.read()
        left = self._state.seconds_left(now)
        if self._state.is_over(now):
            return []
        self._woken.clear()
        forget = fallback.reads.monitor.listen(self._woken.set)
        try:
            if self._closed.is_set() or fallback.has_returned(now):
                return []
            delay = fallback.delay(now)
            if delay > 0:
                self._woken.wait(delay if left is None else min(delay, left))
                fallback.has_returned(time.monotonic())
                return []
        finally:
            forget()
        wait = StartWait(fallback.reads, fallback.has_state, fallback.view(), self._woken.set)
        self._woken.wait(left)
        is_admitted = wait.end()
        if self._closed.is_set() or not is_admitted:
            fallback.has_returned(time.monotonic())
            return []
        return fallback.open(time.monotonic())

    def _open(self) -> list[WatchItem]:
        if self._closed.wait(self._state.delay(time.monotonic())):
            return []
        now = time.monotonic()
        # Another read may have found meanwhile that kubefan is away.
        if self._fallback is not None and self._fallback.goes_direct(now):
            return []
        request = self._state.request(now)
        if request is None:
            return []
        if self._fallback is not None:
            self._fallback.asks()
        try:
            self._sent = self._endpoint.authorization()
        except KubefanError as error:
            return self._failed(error)
        call = self._method(
            request, metadata=metadata_of(self._sent), timeout=self._state.call_seconds(now)
        )
        self._call = call
        if self._closed.is_set():
            call.cancel()
        reads = self._endpoint.fallback
        if reads is None:
            call.initial_metadata()
        else:
            reads.learn(answer_of(call, self._endpoint.address))
        # A call that was refused is already over, and its error comes with the next step.
        if not call.is_active():
            return []
        if self._fallback is not None:
            self._fallback.opened(time.monotonic())
        self._connection.ignore(self._listener)
        return self._state.opened(time.monotonic())

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
        now, is_certain = time.monotonic(), True
        if self._fallback is not None:
            verdict = self._fallback.failed(error, now)
            if verdict == Verdict.BUSY_FOR_LONG:
                is_serving = self._fallback.reads.is_serving()
                now = time.monotonic()
                verdict = self._fallback.judged(error, now, is_serving)
            is_certain = verdict != Verdict.REFUSED
        try:
            items = self._state.failed(error, now, self._token.may_change, is_certain)
        except KubefanError:
            self._connection.ignore(self._listener)
            raise
        if isinstance(error, Unreachable):
            self._connection.attend(self._listener)
        else:
            self._connection.ignore(self._listener)
        # `close` may have come in between, when there was no listener yet.
        if self._closed.is_set():
            self._connection.ignore(self._listener)
        return items

    def _listener(self, _: grpc.ChannelConnectivity) -> None:
        """The state of the connection shows in the next call."""


class WatchStream(ContextManager, Iterator[Event]):
    """The events of a watch. One thread reads it, any thread may `close` it.

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

    def __next__(self) -> Event:
        """The next event. Raises StopIteration after the timeout or `close`, and errors."""
        while not self._ready:
            item = next(self._items)
            self._ready.extend(self._changes.accept(item))
            if not self._ready:
                self.resume_version = item.resume_version or self.resume_version
        event = self._ready.popleft()
        self.resume_version = event.resume_version or self.resume_version
        return event

    def close(self) -> None:
        """Ends the watch."""
        self._items.close()

    def _exit(self) -> None:
        self.close()
