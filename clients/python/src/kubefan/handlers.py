"""The handlers that an informer calls, and the calls that wait.

A handler that is slower than the changes must not delay others, and must not fill the memory. So up
to a limit every call waits, in order. Above it a change joins the last waiting call of the same
object: the handler gets the first old state and the last new one. A deletion and a new object of
the same name stay two calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

from .objects import Object

#: The calls that wait for a handler before calls of one object are merged.
BACKLOG_CALLS_MAX = 10_000


@dataclass(frozen=True)
class Deleted:
    """A deleted object.

    Attributes:
        object: Its last state, as far as it is known.
        final_state_unknown: Whether the deletion itself was missed, such as during a disconnect.
            Then `object` is the last state that was received.
    """

    object: Object
    final_state_unknown: bool = False

    @property
    def key(self) -> str:
        """`namespace/name`, or the name of an object without a namespace."""
        return self.object.key


@dataclass(frozen=True)
class Add:
    """An object is new."""

    object: Object
    is_in_initial_list: bool

    @property
    def key(self) -> str:
        """The key of the object."""
        return self.object.key


@dataclass(frozen=True)
class Update:
    """An object has changed."""

    old: Object
    new: Object

    @property
    def key(self) -> str:
        """The key of the object."""
        return self.new.key


Notification = Union[Add, Update, Deleted]
OnAdd = Callable[[Object, bool], Any]
OnUpdate = Callable[[Object, Object], Any]
OnDelete = Callable[[Deleted], Any]


class _InitialListEnd:
    """Waits behind the calls of the initial list."""


INITIAL_LIST_END = _InitialListEnd()
Call = Union[Notification, _InitialListEnd]


@dataclass(frozen=True)
class HandlerFunctions:
    """The functions of a handler. Each may be missing."""

    on_add: Optional[OnAdd] = None
    on_update: Optional[OnUpdate] = None
    on_delete: Optional[OnDelete] = None

    def call(self, notification: Notification) -> Any:
        """Calls the function for a notification, and returns its result."""
        if isinstance(notification, Add):
            if self.on_add is not None:
                return self.on_add(notification.object, notification.is_in_initial_list)
        elif isinstance(notification, Update):
            if self.on_update is not None:
                return self.on_update(notification.old, notification.new)
        elif self.on_delete is not None:
            return self.on_delete(notification)
        return None


class BacklogQueue:
    """The calls that wait for one handler. Not safe for threads."""

    def __init__(self, calls_max: int = BACKLOG_CALLS_MAX) -> None:
        self._calls_max = calls_max
        #: Cells, so that a waiting call can be replaced. None: it was cancelled.
        self._cells: deque[list[Optional[Call]]] = deque()
        self._last: dict[str, list[Optional[Call]]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, call: Call) -> None:
        """Adds a call, or merges it."""
        cell: list[Optional[Call]] = [call]
        if not isinstance(call, _InitialListEnd):
            if self._waiting >= self._calls_max and self._merge(call):
                return
            self._last[call.key] = cell
        self._cells.append(cell)
        self._waiting += 1

    def pop(self) -> Optional[Call]:
        """The next call; None if no call waits."""
        while self._cells:
            cell = self._cells.popleft()
            call = cell[0]
            if call is None:
                continue
            self._waiting -= 1
            if not isinstance(call, _InitialListEnd) and self._last.get(call.key) is cell:
                del self._last[call.key]
            return call
        return None

    def _merge(self, call: Notification) -> bool:
        cell = self._last.get(call.key)
        if cell is None:
            return False
        waiting = cell[0]
        if isinstance(waiting, Add) and isinstance(call, Update):
            cell[0] = Add(call.new, waiting.is_in_initial_list)
        elif isinstance(waiting, Update) and isinstance(call, Update):
            cell[0] = Update(waiting.old, call.new)
        elif isinstance(waiting, Update) and isinstance(call, Deleted):
            cell[0] = call
        elif isinstance(waiting, Add) and isinstance(call, Deleted):
            # The handler never hears of the object.
            cell[0] = None
            del self._last[call.key]
            self._waiting -= 1
            if len(self._cells) > 2 * (self._waiting + self._calls_max):
                self._cells = deque(cell for cell in self._cells if cell[0] is not None)
        else:
            return False
        return True
