"""An informer for ordinary programs: one thread for the watch, and one for each handler."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Optional

from ._connection import Connection
from ._context import ContextManager
from ._endpoint import Endpoint
from ._informer_state import InformerState, version_number
from ._watch import WatchItems
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
from .items import Disconnected, Restarted
from .store import Indexer

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("kubefan")

#: How long `stop` waits for the calls of handlers that are under way, in seconds.
STOP_SECONDS_MAX = 10.0

Observer = Callable[[Exception], None]


class Registration:
    """A handler of an informer."""

    def __init__(self, informer: Informer, functions: HandlerFunctions, calls_max: int) -> None:
        self._informer = informer
        self._functions = functions
        self._queue = BacklogQueue(calls_max)
        self._changed = threading.Condition()
        self._ended = False
        self._synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubefan-handler", daemon=True)

    def wait_for_sync(self, timeout: Optional[float] = None) -> bool:
        """Waits until the handler has been called for the whole initial list.

        Returns False after `timeout` seconds.
        """
        return self._synced.wait(timeout)

    @property
    def backlog(self) -> int:
        """The calls that wait."""
        return len(self._queue)

    def remove(self) -> None:
        """Ends the handler: it gets no more calls. Waits for the running call."""
        self._informer._remove(self)
        self._end()
        self._join(None)

    def _push(self, calls: list[Call]) -> None:
        with self._changed:
            for call in calls:
                self._queue.push(call)
            self._changed.notify()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _join(self, timeout: Optional[float]) -> None:
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                call = None if self._ended else self._queue.pop()
                while call is None and not self._ended:
                    self._changed.wait()
                    call = None if self._ended else self._queue.pop()
            if call is None:
                return
            if isinstance(call, _InitialListEnd):
                self._synced.set()
                continue
            try:
                self._functions.call(call)
            except Exception as error:
                self._informer._report(error)


class Informer(ContextManager):
    """Keeps a store equal to the server's state, and calls handlers for each change.

    It resumes after every break, and an error never ends it: errors go to the observers. Use it as
    a context manager, or call `start` and `stop`. `stop` is final.

    Attributes:
        indexer: The store. It changes before a handler is called, and is complete after
            `wait_for_sync`.
    """

    def __init__(
        self, connection: Connection, made: Endpoint, resource: str, keywords: dict[str, Any]
    ) -> None:
        self._connection = connection
        self._endpoint = made
        self._state = InformerState(resource, keywords)
        self.indexer: Indexer = self._state.indexer
        self.indexer._observer = self._report
        #: Covers a change of the store and its calls, so that a late handler misses nothing.
        self._changed = threading.Condition()
        self._handlers: list[Registration] = []
        self._observers: list[Observer] = []
        self._stopped = threading.Event()
        self._items: Optional[WatchItems] = None
        self._thread: Optional[threading.Thread] = None

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

        Its calls come one at a time, in order, on a thread of its own: `on_add(object,
        is_in_initial_list)`, `on_update(old, new)`, `on_delete(deleted)`. More than `backlog_max`
        waiting calls are merged by object. An error that a function raises goes to the observers,
        and the next call follows. Raises `Stopped`.
        """
        functions = HandlerFunctions(on_add, on_update, on_delete)
        handler = Registration(self, functions, backlog_max)
        with self._changed:
            if self._stopped.is_set():
                raise Stopped("the informer has been stopped")
            if self._state.synced:
                present: list[Call] = [Add(made, True) for made in self.indexer.list()]
                handler._push([*present, INITIAL_LIST_END])
            self._handlers.append(handler)
            handler._thread.start()
        return handler

    def on_error(self, observer: Observer) -> None:
        """Calls `observer` with each error; without one they are logged. It must not block."""
        self._observers.append(observer)

    def start(self) -> Self:
        """Starts the informer. A second start does nothing. Raises `Stopped`."""
        with self._changed:
            if self._stopped.is_set():
                raise Stopped("the informer has been stopped")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kubefan-informer", daemon=True
                )
                self._thread.start()
        return self

    def wait_for_sync(self, timeout: Optional[float] = None) -> bool:
        """Waits until the first state is complete in the store.

        Returns False after `timeout` seconds. Raises `Stopped` if the informer is stopped before.
        """
        return self._wait(lambda: self._state.synced, timeout)

    def wait_until(self, resource_version: str, timeout: Optional[float] = None) -> bool:
        """Waits until the store has everything up to this version, such as of an own write.

        With a selector, a write that does not match arrives only with the next bookmark, after up
        to a minute. Returns False after `timeout` seconds. Raises `Stopped`, and ValueError for a
        version that is not a number.
        """
        wanted = version_number(resource_version)
        if wanted is None:
            raise ValueError(f"{resource_version!r} is not a resource version")

        def reached() -> bool:
            version = version_number(self._state.resource_version)
            return version is not None and version >= wanted

        return self._wait(reached, timeout)

    def stop(self, timeout: float = STOP_SECONDS_MAX) -> None:
        """Ends the watch and, after the calls under way, the handlers. Final.

        Waits up to `timeout` seconds. The store keeps its last state.
        """
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
            handlers, items = list(self._handlers), self._items
        if items is not None:
            items.close()
        for handler in handlers:
            handler._end()
        end = time.monotonic() + timeout
        for handler in handlers:
            handler._join(max(0.0, end - time.monotonic()))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Self:
        return self.start()

    def _exit(self) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.is_set():
            items = self._watch()
            with self._changed:
                self._items = items
                if self._stopped.is_set():
                    return
            delay = 0.0
            try:
                self._follow(items)
            except KubefanError as error:
                self._report(error)
                delay = self._state.failed(error, items.resume_version, time.monotonic())
            finally:
                items.close()
            self._stopped.wait(delay)

    def _watch(self) -> WatchItems:
        target, options = self._state.target, self._state.options()
        return WatchItems(self._connection, self._endpoint, target, options)

    def _follow(self, items: WatchItems) -> None:
        for item in items:
            if isinstance(item, (Disconnected, Restarted)):
                self._report(item.error)
            with self._changed:
                if self._stopped.is_set():
                    return
                was_synced = self._state.synced
                calls: list[Call] = [*self._state.accept(item, items.cluster)]
                if self._state.synced and not was_synced:
                    calls.append(INITIAL_LIST_END)
                if calls:
                    for handler in self._handlers:
                        handler._push(calls)
                if item.resume_version:
                    self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout: Optional[float]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._stopped.is_set(), timeout)
            if condition():
                return True
            if self._stopped.is_set():
                raise Stopped("the informer has been stopped")
            return False

    def _remove(self, handler: Registration) -> None:
        with self._changed:
            if handler in self._handlers:
                self._handlers.remove(handler)

    def _report(self, error: Exception) -> None:
        if not self._observers:
            logger.warning("informer of %s: %s", self._state.target.resource, error)
        for observer in self._observers:
            try:
                observer(error)
            except Exception:
                logger.exception("an error observer failed")
