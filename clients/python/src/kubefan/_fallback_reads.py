"""The state that all reads of a client share which may go to the apiserver."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol, TypeVar

import grpc

from ._fallback import (
    Budget,
    BusyRow,
    Cancel,
    Clock,
    Gate,
    Monitor,
    Side,
    Verdict,
    View,
    parse_budget,
    verdict_of,
)
from .apiserver import Abort, Apiserver, Read
from .errors import KubefanError, Unreachable
from .items import Resource, SnapshotBegin, WatchItem
from .options import Projection, Target

logger = logging.getLogger("kubefan")

#: kubefan may keep a call for this many seconds without the metadata of an answer.
ANSWER_SECONDS_MAX = 10.0
#: An error that comes so soon before the end of the caller's own time is due to it.
LATE_SECONDS = 0.1
#: The name of gRPC's health check, its request and the answer SERVING.
HEALTH = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
#: The limit of a probe, in seconds.
PROBE_SECONDS_MAX = 3.0

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

OnSide = Callable[[Side, str], None]
OnStart = Callable[[float], None]


_T = TypeVar("_T")
#: The method and the resource of a call, whose busy answers count together.
Kind = tuple[str, str, str, str]


def kind_of(method: str, target: Target) -> Kind:
    """The kind of a read."""
    return (method, target.group, target.version, target.resource)


class Closable(Protocol):
    """A watch."""

    def close(self) -> None:
        """Ends it, from any thread."""


@dataclass(frozen=True)
class Reports:
    """The functions of a program that are told what its reads do."""

    on_side: Optional[OnSide] = None
    on_start: Optional[OnStart] = None


class FallbackReads:
    """Says where a read goes, and when."""

    def __init__(
        self,
        address: str,
        apiserver: Apiserver,
        budget: Budget,
        reports: Reports,
        clock: Clock,
        probe: Callable[[Callable[[bool], None]], None],
    ) -> None:
        self.address = address
        self.apiserver = apiserver
        self.clock = clock
        self.gate = Gate(clock, budget)
        self.monitor = Monitor(clock, probe, self._changed)
        self._reports = reports
        self._side = Side.HEALTHY
        self._resolved: dict[tuple[str, str, str], Resource] = {}
        self._busy: dict[Kind, BusyRow] = {}
        self._lock = threading.RLock()
        #: The client was closed.
        self.is_closed = False
        self._watches: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._ends: list[Callable[[], None]] = []

    def note(self, error: Optional[KubefanError], epoch: int, kind: Kind) -> Verdict:
        """Notes the outcome of a call to kubefan that was made in this epoch.

        After `BUSY_FOR_LONG` the caller asks kubefan's health and calls `judge`.
        """
        if self.is_closed:
            return Verdict.ANSWERED
        verdict = verdict_of(error)
        with self._lock:
            if verdict != Verdict.BUSY:
                self._busy.pop(kind, None)
            elif self._busy.setdefault(kind, BusyRow()).lasts(self.clock.now()):
                return Verdict.BUSY_FOR_LONG
        if verdict == Verdict.AWAY:
            self._failed(str(error), epoch)
        return verdict

    def judge(self, error: KubefanError, epoch: int, is_serving: bool) -> Verdict:
        """Decides about a kubefan that is busy for long, by its health."""
        if self.is_closed:
            return Verdict.ANSWERED
        if is_serving:
            # One resource or one limit is no outage: the other reads stay.
            return Verdict.REFUSED
        self._failed(str(error), epoch)
        return Verdict.AWAY

    def is_serving(self) -> bool:
        """Asks kubefan for its health, and waits for the answer on this thread."""
        has_answer, answers = threading.Event(), list[bool]()

        def done(is_serving: bool) -> None:
            answers.append(is_serving)
            has_answer.set()

        self.monitor.ask(done)
        has_answer.wait()
        return answers[0]

    def moves_alone(self, resource: str, error: KubefanError) -> None:
        """Logs that one watch goes to the apiserver."""
        text = "kubefan at %s has no answer: a watch of %s goes to the apiserver: %s"
        logger.warning(text, self.address, resource, error)

    def _failed(self, reason: str, epoch: int) -> None:
        self.monitor.note(reason, lambda machine, now: machine.failed(now, epoch))

    def learn(self, metadata: Any) -> None:
        """Reads the budget that kubefan tells."""
        budget = parse_budget(metadata or ())
        if budget is not None:
            self.gate.set_budget(budget)

    def remember(self, target: Target, items: list[WatchItem]) -> None:
        """Remembers a resource that kubefan has resolved."""
        for item in items:
            if isinstance(item, SnapshotBegin):
                self.resolved(target, item.resource)

    def resolved(self, target: Target, resource: Optional[Resource]) -> None:
        """Remembers a resource that kubefan has resolved."""
        if resource is not None and resource.version:
            self._resolved[(target.group, target.version, target.resource)] = resource

    def read(self, target: Target, projection: Projection) -> Read:
        """The request to the apiserver."""
        known = self._resolved.get((target.group, target.version, target.resource))
        return Read(target, projection, known)

    def started(self, waited: float) -> None:
        """A read was admitted, after this many seconds."""
        self.monitor.note("", lambda machine, _: machine.moved())
        if self._reports.on_start is not None:
            self._reports.on_start(waited)

    def add(self, watch: Closable) -> None:
        """Closes a watch with the client."""
        with self._lock:
            self._watches.add(watch)
            is_late = self.is_closed
        if is_late:
            watch.close()

    def until_closed(self, end: Callable[[], None]) -> Cancel:
        """Calls a function when the client is closed, until it is cancelled."""
        with self._lock:
            self._ends.append(end)
            is_late = self.is_closed
        if is_late:
            end()

        def cancel() -> None:
            with self._lock:
                if end in self._ends:
                    self._ends.remove(end)

        return cancel

    def direct(self, read: Callable[[FallbackReads, Abort], _T], abort: Abort) -> _T:
        """Makes a list or a get at the apiserver, on this thread."""
        forget = self.until_closed(abort.set)
        try:
            return read(self, abort)
        except KubefanError:
            if self.is_closed:
                raise closed(self.address) from None
            raise
        finally:
            forget()

    def close(self) -> None:
        """Ends the probes, and all that reads or waits."""
        with self._lock:
            self.is_closed = True
            watches, ends = list(self._watches), list(self._ends)
        self.monitor.close()
        for watch in watches:
            watch.close()
        for end in ends:
            end()

    def _changed(self, side: Side, reason: str) -> None:
        # One line for each change of the server, not for each change of the state.
        if (self._side == Side.HEALTHY) != (side == Side.HEALTHY):
            if side == Side.HEALTHY:
                logger.info("reads return to kubefan at %s", self.address)
            else:
                text = "kubefan at %s is away: reads go to the apiserver: %s"
                logger.warning(text, self.address, reason)
        self._side = side
        if self._reports.on_side is not None:
            # A mistake there must not end a read.
            try:
                self._reports.on_side(side, reason)
            except Exception:
                logger.exception("on_side has failed")


class StartWait:
    """A wait for a start at the apiserver. `wake` is called when it is over, from any thread."""

    def __init__(
        self, reads: FallbackReads, has_state: bool, view: View, wake: Callable[[], None]
    ) -> None:
        self._reads = reads
        self._since = reads.clock.now()
        self.is_admitted = False
        self._wake = wake
        # While kubefan is healthy it has no answer for this read, so its state does not matter.
        self._forget: Optional[Cancel] = None
        if not view.is_healthy:
            self._forget = reads.monitor.listen(wake)
        self._forget_close = reads.until_closed(wake)
        self._start = reads.gate.enter(has_state, self._admitted)
        if not view.is_healthy and reads.monitor.look() != view:
            wake()

    def end(self) -> bool:
        """Ends the wait. Whether the read may start."""
        if self._forget is not None:
            self._forget()
        self._forget_close()
        self._reads.gate.leave(self._start)
        self.is_admitted = self.is_admitted and not self._reads.is_closed
        if self.is_admitted:
            self._reads.started(self._reads.clock.now() - self._since)
        return self.is_admitted

    def _admitted(self) -> None:
        self.is_admitted = True
        self._wake()


def wait_for_start(reads: FallbackReads, view: View, seconds: Optional[float]) -> bool:
    """Waits on this thread for the start of a list or a get. False if kubefan changed, or late."""
    woken = threading.Event()
    wait = StartWait(reads, False, view, woken.set)
    woken.wait(seconds)
    return wait.end()


def answer_of(call: Any, address: str) -> Any:
    """The metadata of a call's answer. Raises `Unreachable` if there is none in time."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        call.cancel()

    timer = threading.Timer(ANSWER_SECONDS_MAX, end)
    timer.daemon = True
    timer.start()
    try:
        metadata = call.initial_metadata()
    except grpc.RpcError:
        metadata = None
    finally:
        timer.cancel()
    if is_late.is_set():
        raise no_answer(address)
    return metadata


def no_answer(address: str) -> Unreachable:
    """The error of a call without an answer."""
    problem = f"no answer within {ANSWER_SECONDS_MAX:g} s"
    return Unreachable(f"cannot reach kubefan at {address}: {problem}", code=_UNAVAILABLE)


def closed(address: str) -> Unreachable:
    """The error of a list or a get whose client was closed."""
    problem = f"the client of kubefan at {address} was closed"
    return Unreachable(problem, code=grpc.StatusCode.CANCELLED)


def late(address: str, seconds: float) -> Unreachable:
    """The error of a list or a get whose own time is over."""
    problem = f"no complete answer from kubefan at {address} or the apiserver within {seconds:g} s"
    return Unreachable(problem, code=grpc.StatusCode.DEADLINE_EXCEEDED)
