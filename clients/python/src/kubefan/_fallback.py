"""When reads go to the apiserver instead of kubefan, and how often. Nothing here does I/O.

docs/clients-fallback.md is the contract. The time comes from a clock, so tests have their own.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol

import grpc

from .errors import (
    Expired,
    InvalidAddress,
    KubefanError,
    ProtocolError,
    Undecodable,
)
from .options import check_at_least, check_seconds
from .reasons import ErrorReason

#: kubefan may answer nothing but "later" to reads of one kind for this many seconds.
BUSY_SECONDS_MAX = 10.0
#: The longest time between two such answers in a row, in seconds. Watches ask again within 60.
BUSY_PAUSE_SECONDS_MAX = 120.0
#: kubefan must be healthy for this many seconds before reads return to it.
HOLD_SECONDS_MIN = 30.0
#: The longest hold, of a kubefan that fails soon after each return.
HOLD_SECONDS_MAX = 600.0
#: A smaller number of clients counts after only smaller ones were told for this many seconds: a
#: kubefan that has just started does not know all of its clients yet.
CLIENTS_KEPT_SECONDS = 600.0
#: The longest window of a budget, in seconds.
WINDOW_SECONDS_MAX = 600.0
#: Seconds between two probes of a kubefan that is away, a quarter more or less.
PROBE_SECONDS = 5.0
#: After a return, watches leave the apiserver at a random moment between these, in seconds.
RETURN_SECONDS_MIN = 2.0
RETURN_SECONDS_MAX = 60.0
#: The metadata of kubefan's answers that has its budget.
BUDGET_KEY = "kubefan-fallback"

Cancel = Callable[[], None]


class Side(enum.Enum):
    """Where the reads of a client go."""

    #: To kubefan.
    HEALTHY = "healthy"
    #: To the apiserver, within the budget.
    AWAY = "away"
    #: To the apiserver. kubefan has been healthy for a while.
    RETURNING = "returning"


@dataclass(frozen=True)
class Budget:
    """The limit of reads that clients start at the apiserver while kubefan is away.

    Attributes:
        clients: The number of programs that share it, such as the nodes of a DaemonSet.
        rate: The reads that all of them together start in a second.
    """

    clients: int = 100
    rate: float = 10.0

    def __post_init__(self) -> None:
        check_at_least("clients", self.clients, 1)
        check_seconds("rate", self.rate)

    @property
    def window(self) -> float:
        """The seconds in which each client may start one read."""
        return min(self.clients / self.rate, WINDOW_SECONDS_MAX)


_CLIENTS = re.compile(r"[0-9]{1,9}")
_RATE = re.compile(r"[0-9]{1,9}(\.[0-9]*)?")


def parse_budget(metadata: Iterable[tuple[str, Any]]) -> Optional[Budget]:
    """The budget in the metadata of an answer. None without one, and if a member is wrong."""
    members: dict[str, str] = {}
    for key, value in metadata:
        if key == BUDGET_KEY:
            for member in str(value).split(","):
                name, _, text = member.partition(";")[0].strip().partition("=")
                members[name] = text
    clients, rate = members.get("clients", ""), members.get("rate", "")
    if not (_CLIENTS.fullmatch(clients) and _RATE.fullmatch(rate)):
        return None
    if int(clients) < 1 or float(rate) <= 0:
        return None
    return Budget(int(clients), float(rate))


class Verdict(enum.Enum):
    """What the end of a call says about kubefan."""

    #: kubefan has answered, or the error is not about it.
    ANSWERED = enum.auto()
    #: kubefan cannot be reached.
    AWAY = enum.auto()
    #: kubefan asks to come back later.
    BUSY = enum.auto()
    #: It has asked so for a while. Its health decides whether it is away.
    BUSY_FOR_LONG = enum.auto()
    #: kubefan has no answer for this read, and the apiserver may have one.
    REFUSED = enum.auto()


_REFUSED = (ErrorReason.UPSTREAM_FORBIDDEN, ErrorReason.NOT_CACHED, ErrorReason.PASSTHROUGH)
_BUSY = (
    ErrorReason.NOT_SYNCED,
    ErrorReason.STALE,
    ErrorReason.UPSTREAM_UNAVAILABLE,
    ErrorReason.STOPPED,
    ErrorReason.LIMIT_REACHED,
)


def verdict_of(error: Optional[KubefanError]) -> Verdict:
    """What an error says about kubefan; None is an answer."""
    if error is None or isinstance(error, (ProtocolError, Expired, Undecodable, InvalidAddress)):
        return Verdict.ANSWERED
    if error.reason in _REFUSED:
        return Verdict.REFUSED
    if error.reason in _BUSY:
        return Verdict.BUSY
    if error.reason:
        return Verdict.ANSWERED
    if error.retry_after is not None:
        return Verdict.BUSY
    is_lost = error.is_retryable and error.code != grpc.StatusCode.DATA_LOSS
    return Verdict.AWAY if is_lost else Verdict.ANSWERED


class BusyRow:
    """A row of answers to reads of one kind that ask to come back later.

    Each kind has its own: one cache that never gets ready says nothing about the others.
    """

    def __init__(self) -> None:
        self._since = self._at = float("-inf")

    def lasts(self, now: float) -> bool:
        """Notes such an answer. Whether there was no other one for a while."""
        # Messages of open streams are no answers here, so only time can end an old row.
        if now - self._at > BUSY_PAUSE_SECONDS_MAX:
            self._since = now
        self._at = now
        return now - self._since >= BUSY_SECONDS_MAX


class Machine:
    """Decides where reads go. It has no clock and does nothing by itself."""

    def __init__(self) -> None:
        self.side = Side.HEALTHY
        #: The number of outages, so that an old failure does not begin a new one.
        self.epoch = 0
        self._returned_at: Optional[float] = None
        self._healthy_since = 0.0
        #: Probes must be answered for this many seconds in this outage. 0: one is enough.
        self._hold = 0.0

    def failed(self, now: float, epoch: int) -> None:
        """A request that was sent in this epoch found no kubefan."""
        if self.side != Side.HEALTHY or epoch != self.epoch:
            return
        returned, soon = self._returned_at, 2 * max(self._hold, HOLD_SECONDS_MIN)
        if returned is None or now - returned >= soon:
            self._hold = 0.0
        elif self._hold == 0:
            self._hold = HOLD_SECONDS_MIN
        else:
            self._hold = min(2 * self._hold, HOLD_SECONDS_MAX)
        self.side = Side.AWAY
        self.epoch += 1

    def moved(self) -> None:
        """A read was started at the apiserver, and should not move again soon."""
        if self.side != Side.HEALTHY:
            self._hold = max(self._hold, HOLD_SECONDS_MIN)

    def probed(self, now: float, is_healthy: bool) -> None:
        """A probe has ended."""
        if self.side == Side.HEALTHY:
            return
        if not is_healthy:
            self.side = Side.AWAY
            return
        if self.side == Side.AWAY:
            self.side, self._healthy_since = Side.RETURNING, now
        if now - self._healthy_since >= self._hold:
            self.side, self._returned_at = Side.HEALTHY, now


class Clock(Protocol):
    """The time, in seconds."""

    def now(self) -> float:
        """The present time."""

    def call_later(self, seconds: float, run: Callable[[], None]) -> Cancel:
        """Runs a function after a time, unless it is cancelled before."""


class ThreadClock:
    """The system's time. Functions run on a thread of their own."""

    def now(self) -> float:
        """The present time."""
        return time.monotonic()

    def call_later(self, seconds: float, run: Callable[[], None]) -> Cancel:
        """Runs a function after a time, unless it is cancelled before."""
        timer = threading.Timer(max(0.0, seconds), run)
        timer.daemon = True
        timer.start()
        return timer.cancel


class Start:
    """A read that waits for its start at the apiserver."""

    def __init__(self, admitted: Callable[[], None], overtaken_until: float) -> None:
        self.admitted = admitted
        #: Until then reads of callers without a state go first.
        self.overtaken_until = overtaken_until


class Gate:
    """Spaces the reads that a client starts at the apiserver while kubefan is away.

    The hazard is a fleet whose clients all turn to the apiserver at once: it would make one outage
    into two. So each client has one start in each window, and the first window begins at a random
    moment. A read whose caller has a state waits for one window more, so that those without a state
    go first, in the whole fleet and in each client. After two windows they take turns.
    """

    def __init__(
        self, clock: Clock, budget: Budget, generator: Optional[random.Random] = None
    ) -> None:
        self._clock = clock
        self._random = generator or random.Random()
        self._lock = threading.RLock()
        self._budget = budget
        #: The largest number of clients that kubefan told.
        self._told_clients = 0
        #: The time since which it told only smaller ones.
        self._smaller_since: Optional[float] = None
        self._next = float("-inf")
        #: The first start for a caller with a state.
        self._later_from = float("-inf")
        self._first: deque[Start] = deque()
        self._later: deque[Start] = deque()
        #: The last start was one with a state.
        self._was_later = False
        self._due: Optional[float] = None
        self._cancel: Optional[Cancel] = None

    def set_budget(self, budget: Budget) -> None:
        """Takes the budget that kubefan tells. Starts that wait keep their moment."""
        with self._lock:
            now = self._clock.now()
            since = now if self._smaller_since is None else self._smaller_since
            if budget.clients < self._told_clients and now < since + CLIENTS_KEPT_SECONDS:
                self._smaller_since = since
                budget = dataclasses.replace(budget, clients=self._told_clients)
            else:
                self._told_clients, self._smaller_since = budget.clients, None
            self._budget = budget

    def enter(self, has_state: bool, admitted: Callable[[], None]) -> Start:
        """Calls `admitted` at the moment of a start, unless it leaves before."""
        with self._lock:
            now, window = self._clock.now(), self._budget.window
            made = Start(admitted, now + 2 * window)
            if not self._first and not self._later and now >= self._next:
                self._next = now + self._random.random() * window
                self._later_from = self._next + window
            (self._later if has_state else self._first).append(made)
            self._arm()
            return made

    def leave(self, start: Start) -> None:
        """Takes a start back, if it still waits."""
        with self._lock:
            for waiting in (self._first, self._later):
                if start in waiting:
                    waiting.remove(start)
            self._arm()

    def _arm(self) -> None:
        due: Optional[float] = None
        if self._first:
            due = self._next
        elif self._later:
            due = max(self._next, self._later_from)
        if due == self._due:
            return
        if self._cancel is not None:
            self._cancel()
        self._due, self._cancel = due, None
        if due is not None:
            self._cancel = self._clock.call_later(due - self._clock.now(), lambda: self._admit(due))

    def _admit(self, due: Optional[float]) -> None:
        with self._lock:
            if self._due != due:
                return
            self._due = self._cancel = None
            now = self._clock.now()
            is_overdue = (
                bool(self._later)
                and now >= max(self._later_from, self._later[0].overtaken_until)
                and not self._was_later
            )
            self._was_later = is_overdue or not self._first
            start = (self._later if self._was_later else self._first).popleft()
            # Not from `due`: a start that came late would be followed by the next one at once.
            self._next = now + self._budget.window
            self._arm()
        start.admitted()


@dataclass(frozen=True)
class View:
    """The state of kubefan as a read finds it."""

    is_healthy: bool
    epoch: int


class Monitor:
    """Has the state of kubefan, and probes it while it is away."""

    def __init__(
        self,
        clock: Clock,
        probe: Callable[[Callable[[bool], None]], None],
        on_side: Callable[[Side, str], None],
        generator: Optional[random.Random] = None,
    ) -> None:
        """`probe` asks kubefan for its health, and calls its argument with the outcome."""
        self._clock = clock
        self._probe = probe
        self._on_side = on_side
        self._random = generator or random.Random()
        self._lock = threading.RLock()
        self._machine = Machine()
        self._listeners: list[Callable[[], None]] = []
        self._cancel: Optional[Cancel] = None
        self._is_probing = False
        self._closed = False
        #: Those that wait for the answer to a question about kubefan's health.
        self._asking: list[Callable[[bool], None]] = []

    @property
    def side(self) -> Side:
        """Where reads go."""
        return self._machine.side

    def look(self) -> View:
        """The state for a read."""
        with self._lock:
            return View(self._machine.side == Side.HEALTHY, self._machine.epoch)

    def note(self, reason: str, step: Callable[[Machine, float], None]) -> None:
        """Lets the machine take a step, and makes a change known."""
        with self._lock:
            before = self._machine.side
            step(self._machine, self._clock.now())
            after = self._machine.side
            self._arm()
            has_moved = (before == Side.HEALTHY) != (after == Side.HEALTHY)
            listeners = list(self._listeners) if has_moved else []
            for listener in listeners:
                listener()
            # Last, and under the lock, so that the changes are told in their order.
            if before != after:
                self._on_side(after, reason)

    def listen(self, listener: Callable[[], None]) -> Cancel:
        """Calls a function whenever reads go to another server, until it is cancelled."""
        with self._lock:
            self._listeners.append(listener)

        def cancel() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return cancel

    def await_return(self, leave: Callable[[], None]) -> Cancel:
        """Calls `leave` at a random moment after a return of kubefan, if it is healthy then."""
        timers: list[Cancel] = []

        def due() -> None:
            if self.look().is_healthy:
                leave()

        def changed() -> None:
            for stop in timers:
                stop()
            timers.clear()
            if self.look().is_healthy:
                spread = RETURN_SECONDS_MAX - RETURN_SECONDS_MIN
                after = RETURN_SECONDS_MIN + self._random.random() * spread
                timers.append(self._clock.call_later(after, due))

        forget = self.listen(changed)
        changed()

        def cancel() -> None:
            forget()
            for stop in timers:
                stop()

        return cancel

    def ask(self, done: Callable[[bool], None]) -> None:
        """Asks kubefan for its health, once for all that want to know at the same time."""
        with self._lock:
            self._asking.append(done)
            if len(self._asking) > 1:
                return

        def answered(is_serving: bool) -> None:
            with self._lock:
                asking, self._asking = self._asking, []
            for each in asking:
                each(is_serving)

        self._probe(answered)

    def close(self) -> None:
        """Ends the probes."""
        with self._lock:
            self._closed = True
            if self._cancel is not None:
                self._cancel()
            asking, self._asking = self._asking, []
        for each in asking:
            each(False)

    def _arm(self) -> None:
        if self._machine.side == Side.HEALTHY or self._is_probing or self._closed:
            return
        self._is_probing = True
        after = PROBE_SECONDS * (0.75 + self._random.random() / 2)
        self._cancel = self._clock.call_later(after, lambda: self._probe(self._probed))

    def _probed(self, is_healthy: bool) -> None:
        def step(machine: Machine, now: float) -> None:
            self._is_probing = False
            machine.probed(now, is_healthy)

        self.note(f"kubefan's health is {'' if is_healthy else 'not '}SERVING", step)
