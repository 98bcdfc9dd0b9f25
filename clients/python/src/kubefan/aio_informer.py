"""An informer for asyncio: one task for the watch, and one for each handler."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any, Callable, Optional

import grpc.aio

from ._aio_watch import WatchItems
from ._context import AsyncContextManager
from ._endpoint import Endpoint
from ._informer_state import InformerState, version_number
from .errors import KubefanError, Stopped
from .handlers import (
    BACKLOG_CALLS_MAX,
    INITIAL_LIST_END,
    Add,
    BacklogQueue,
    Call,
    HandlerFunctions,
    OnAdd,
    OnDelete,
    OnUpdate,
    _InitialListEnd,
)
from .informer import STOP_SECONDS_MAX, Observer
from .items import Disconnected, Restarted
from .store import Indexer

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("kubefan")


class Registration:
    """A handler of an informer."""

    def __init__(self, informer: Informer, functions: HandlerFunctions, calls_max: int) -> None:
        self._informer = informer
        self._functions = functions
        self._queue = BacklogQueue(calls_max)
        self._changed = asyncio.Event()
        self._ended = False
        self._synced = asyncio.Event()
        self._task: Optional[asyncio.Task[None]] = None

    async def wait_for_sync(self, timeout: Optional[float] = None) -> bool:
        """Waits until the handler has been called for the whole initial list.

        Returns False after `timeout` seconds.
        """
        try:
            await asyncio.wait_for(self._synced.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    @property
    def backlog(self) -> int:
        """The calls that wait."""
        return len(self._queue)

    async def remove(self) -> None:
        """Ends the handler: it gets no more calls. Waits for the running call."""
        if self in self._informer._handlers:
            self._informer._handlers.remove(self)
        self._end()
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])

    def _push(self, calls: list[Call]) -> None:
        for call in calls:
            self._queue.push(call)
        self._changed.set()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()

    async def _run(self) -> None:
        while not self._ended:
            call = self._queue.pop()
            if call is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            if isinstance(call, _InitialListEnd):
                self._synced.set()
                continue
            try:
                result = self._functions.call(call)
                if inspect.isawaitable(result):
                    await result
                else:
                    # Other tasks get their turn between the calls of a long list.
                    await asyncio.sleep(0)
            except Exception as error:
                self._informer._report(error)


class Informer(AsyncContextManager):
    """Keeps a store equal to the server's state, and calls handlers for each change.

    As `kubefan.Informer`, for one event loop: `async with client.informer("pods") as pods`. The
    functions of handlers may be coroutine functions.

    Attributes:
        indexer: The store. It changes before a handler is called, and is complete after
            `wait_for_sync`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        made: Endpoint,
        resource: str,
        keywords: dict[str, Any],
    ) -> None:
        self._channel = channel
        self._endpoint = made
        self._state = InformerState(resource, keywords)
        self.indexer: Indexer = self._state.indexer
        self.indexer._observer = self._report
        self._changed = asyncio.Condition()
        self._handlers: list[Registration] = []
        self._observers: list[Observer] = []
        self._stopped = asyncio.Event()
        self._task: Optional[asyncio.Task[None]] = None

    @property
    def resource_version(self) -> str:
        """Everything at or below this version is in the store. Empty before the first state."""
        return self._state.resource_version

    @property
    def has_synced(self) -> bool:
        """Whether the first state is complete in the store."""
        return self._state.synced

    def add_event_handler(
        self,
        on_add: Optional[OnAdd] = None,
        on_update: Optional[OnUpdate] = None,
        on_delete: Optional[OnDelete] = None,
        *,
        backlog_max: int = BACKLOG_CALLS_MAX,
    ) -> Registration:
        """Adds a handler, before or after the start. It first gets all objects as additions.

        As `kubefan.Informer.add_event_handler`, on a task of its own. Raises `Stopped`.
        """
        if self._stopped.is_set():
            raise Stopped("the informer has been stopped")
        handler = Registration(self, HandlerFunctions(on_add, on_update, on_delete), backlog_max)
        if self._state.synced:
            present: list[Call] = [Add(made, True) for made in self.indexer.list()]
            handler._push([*present, INITIAL_LIST_END])
        self._handlers.append(handler)
        handler._task = asyncio.get_running_loop().create_task(handler._run())
        return handler

    def on_error(self, observer: Observer) -> None:
        """Calls `observer` with each error; without one they are logged. It must not block."""
        self._observers.append(observer)

    def start(self) -> Self:
        """Starts the informer. A second start does nothing. Raises `Stopped`."""
        if self._stopped.is_set():
            raise Stopped("the informer has been stopped")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def wait_for_sync(self, timeout: Optional[float] = None) -> bool:
        """Waits until the first state is complete in the store.

        Returns False after `timeout` seconds. Raises `Stopped` if the informer is stopped before.
        """
        return await self._wait(lambda: self._state.synced, timeout)

    async def wait_until(self, resource_version: str, timeout: Optional[float] = None) -> bool:
        """Waits until the store has everything up to this version. As `kubefan.Informer`."""
        wanted = version_number(resource_version)
        if wanted is None:
            raise ValueError(f"{resource_version!r} is not a resource version")

        def reached() -> bool:
            version = version_number(self._state.resource_version)
            return version is not None and version >= wanted

        return await self._wait(reached, timeout)

    async def stop(self, timeout: float = STOP_SECONDS_MAX) -> None:
        """Ends the watch and, after the calls under way, the handlers. Final.

        After `timeout` seconds calls that are still under way are cancelled. The store keeps its
        last state.
        """
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()
        for handler in self._handlers:
            handler._end()
        async with self._changed:
            self._changed.notify_all()
        own = asyncio.current_task()
        tasks = [handler._task for handler in self._handlers]
        waited = [task for task in [*tasks, self._task] if task is not None and task is not own]
        if waited:
            _, late = await asyncio.wait(waited, timeout=timeout)
            for task in late:
                task.cancel()

    async def __aenter__(self) -> Self:
        return self.start()

    async def _exit(self) -> None:
        await self.stop()

    async def _run(self) -> None:
        while not self._stopped.is_set():
            items = self._watch()
            try:
                await self._follow(items)
            except KubefanError as error:
                self._report(error)
                delay = self._state.failed(error, items.resume_version, time.monotonic())
                await asyncio.sleep(delay)
            finally:
                items.close()

    def _watch(self) -> WatchItems:
        target, options = self._state.target, self._state.options()
        return WatchItems(self._channel, self._endpoint, target, options)

    async def _follow(self, items: WatchItems) -> None:
        async for item in items:
            if isinstance(item, (Disconnected, Restarted)):
                self._report(item.error)
            was_synced = self._state.synced
            calls: list[Call] = [*self._state.accept(item, items.cluster)]
            if self._state.synced and not was_synced:
                calls.append(INITIAL_LIST_END)
            if calls:
                for handler in self._handlers:
                    handler._push(calls)
            if item.resume_version:
                async with self._changed:
                    self._changed.notify_all()

    async def _wait(self, condition: Callable[[], bool], timeout: Optional[float]) -> bool:
        async def met() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: condition() or self._stopped.is_set())

        try:
            await asyncio.wait_for(met(), timeout)
        except asyncio.TimeoutError:
            return condition()
        if not condition():
            raise Stopped("the informer has been stopped")
        return True

    def _report(self, error: Exception) -> None:
        if not self._observers:
            logger.warning("informer of %s: %s", self._state.target.resource, error)
        for observer in self._observers:
            try:
                observer(error)
            except Exception:
                logger.exception("an error observer failed")
