"""The part of a watch that reads from the apiserver. The sync and the asyncio watch drive it.

`open` and `read` block. The asyncio watch calls them on a thread, one at a time.
"""

from __future__ import annotations

import time
from typing import Optional

from ._fallback import Cancel, Verdict, View, verdict_of
from ._fallback_reads import FallbackReads, kind_of
from ._watch_state import WatchState
from .apiserver import Abort, ApiserverWatch
from .errors import Expired, KubefanError
from .items import (
    Bookmark,
    CatchUpEnd,
    Disconnected,
    Event,
    GapEnd,
    Restarted,
    SnapshotBegin,
    SnapshotEnd,
    WatchItem,
)
from .objects import DeleteReason, EventType
from .options import Target, WatchOptions

#: A watch that kubefan has no answer for stays at the apiserver for this many seconds.
REFUSED_SECONDS = 300.0
#: The same after answers that ask to come back later.
BUSY_SECONDS = 60.0
#: A stream that ends sooner, without a message, was never open: the headers of a refusal may arrive
#: before its status.
SHORT_STREAM_SECONDS = 1.0
#: The place after all events of a version.
_END = ".end"


class AtVersion:
    """The objects that had an event at the last version.

    Several events may have one version, and the apiserver knows no place between them.
    """

    def __init__(self) -> None:
        self._version = ""
        self._keys: set[str] = set()
        #: The server has changed since, so events of this version may come again.
        self.moved = False

    def accepts(self, event: Event) -> bool:
        """Notes an event. False for one that was returned before."""
        made = event.object
        if made.resource_version != self._version:
            self._version, self.moved = made.resource_version, False
            self._keys.clear()
        if self.moved and made.key in self._keys:
            return False
        self._keys.add(made.key)
        return True

    def from_version(self, resume_version: str) -> str:
        """The version to watch the apiserver from.

        After some events of a version it is the one before, so that the others are sent. A place
        in a version proves that there are others.
        """
        version, _, place = resume_version.partition(".")
        is_known = version == self._version and bool(self._keys)
        is_part = place != "end" and (is_known or place != "")
        if not is_part or not version.isdecimal():
            return version
        return str(max(int(version) - 1, 1))


class WatchFallback:
    """A watch of the apiserver in the place of kubefan's."""

    def __init__(
        self, reads: FallbackReads, state: WatchState, target: Target, options: WatchOptions
    ) -> None:
        self.reads = reads
        self._state = state
        self._target = target
        self._projection = options.projection
        self._kind = kind_of("watch", target)
        self._has_selector = bool(target.label_selector or target.field_selector)
        self._at = AtVersion()
        self._watch: Optional[ApiserverWatch] = None
        self._watch_opened_at = 0.0
        self._abort: Optional[Abort] = None
        #: Whether a start was made, and the watch of it has not ended.
        self.is_open = False
        self._leaves = False
        self._closed = False
        self._cancel: Cancel = _nothing
        #: The time of the next attempt after an error of the apiserver.
        self._retry_at = 0.0
        #: For so long kubefan has no answer for this watch.
        self._refused_until = 0.0
        self._refused_for = REFUSED_SECONDS
        #: The caller has a state, although the version has expired.
        self._had_state = False
        #: The outage before the attempt to open a call. None after its first message.
        self._epoch: Optional[int] = None
        self._asked_in = 0
        self._opened_at: Optional[float] = None
        #: The outage in which the apiserver has refused this watch.
        self._barred_in: Optional[int] = None

    @property
    def has_state(self) -> bool:
        """Whether the caller has a state."""
        return self._state.resume_version != "" or self._had_state

    def goes_direct(self, now: float) -> bool:
        """Whether the watch reads from the apiserver now."""
        if self.is_open:
            return True
        view = self.reads.monitor.look()
        if view.is_healthy:
            return now < self._refused_until
        return self._barred_in != view.epoch

    def delay(self, now: float) -> float:
        """Seconds to wait before the next start."""
        return max(0.0, self._retry_at - now)

    def has_returned(self, now: float) -> bool:
        """Whether kubefan is to be asked again. Ends the wait after an error of the apiserver."""
        if self.goes_direct(now):
            return False
        self._state.soon(now)
        return True

    def view(self) -> View:
        """The state of kubefan."""
        return self.reads.monitor.look()

    def asks(self) -> None:
        """A call of kubefan is about to be made."""
        self._epoch, self._opened_at = self.view().epoch, None

    def opened(self, now: float) -> None:
        """The call was answered."""
        self.reads.note(None, self.view().epoch, self._kind)
        self._opened_at = now

    def failed(self, error: KubefanError, now: float) -> Verdict:
        """A call of kubefan has failed. After `BUSY_FOR_LONG` the caller calls `judged`.

        For a stream that was open for a while, the attempt to resume decides about kubefan.
        """
        self._at.moved = True
        self._had_state = self.has_state
        epoch, opened_at = self._epoch, self._opened_at
        if opened_at is not None and now - opened_at >= SHORT_STREAM_SECONDS:
            epoch = None
        self._epoch = None
        kind = self._kind
        verdict = verdict_of(error) if epoch is None else self.reads.note(error, epoch, kind)
        self._asked_in = epoch or 0
        if verdict == Verdict.REFUSED:
            self._refuse(error, now, REFUSED_SECONDS)
        return verdict

    def judged(self, error: KubefanError, now: float, is_serving: bool) -> Verdict:
        """Decides after kubefan was busy for long, and was asked for its health."""
        verdict = self.reads.judge(error, self._asked_in, is_serving)
        if verdict == Verdict.REFUSED:
            self._refuse(error, now, BUSY_SECONDS)
        return verdict

    def _refuse(self, error: KubefanError, now: float, seconds: float) -> None:
        if now >= self._refused_until:
            self.reads.moves_alone(self._target.resource, error)
        self._refused_for, self._refused_until = seconds, now + seconds

    def filtered(self, items: list[WatchItem]) -> list[WatchItem]:
        """The items of kubefan, without events that the apiserver has brought."""
        self._epoch = None
        self.reads.remember(self._target, items)
        kept: list[WatchItem] = []
        for item in items:
            if isinstance(item, (SnapshotEnd, GapEnd, CatchUpEnd)):
                self._at, self._had_state = AtVersion(), False
            if not isinstance(item, Event) or not item.resume_version or self._at.accepts(item):
                kept.append(item)
        return kept

    def open(self, now: float) -> list[WatchItem]:
        """Makes an admitted start: lists without a version, and watches."""
        self._abort = abort = Abort()
        self._leaves, self.is_open = False, True
        if self._closed:
            return []
        # Before the requests: an apiserver that accepts them may never answer.
        self._await_return(now)
        read = self.reads.read(self._target, self._projection)
        items: list[WatchItem] = []
        try:
            if self._state.resume_version == "":
                version, resource, objects = self.reads.apiserver.list(read, abort)
                items = self._state.opened(now)
                items.append(SnapshotBegin(version, "", resource))
                items += [Event(EventType.ADDED, made) for made in objects]
                items.append(SnapshotEnd(len(objects), version + _END))
                # The apiserver does not tell the cluster.
                self._state.moved_to(version + _END, "")
                self._at, self._had_state = AtVersion(), False
            version = self._at.from_version(self._state.resume_version)
            self._watch = self.reads.apiserver.watch(read, version, abort)
            self._at.moved = True
        except KubefanError as error:
            return items + self._ended(error)
        self._watch_opened_at = time.monotonic()
        return items or self._state.opened(now)

    def read(self) -> list[WatchItem]:
        """Waits for the next item."""
        if self._watch is None:
            return self._ended(None)
        try:
            found = self._watch.next()
        except KubefanError as error:
            return self._ended(error)
        if found is None:
            return self._ended(None)
        if isinstance(found, str):
            self._state.moved_to(found + _END)
            return [Bookmark(found + _END)]
        kind, made = found
        reason = None
        # With a selector the object may exist, and have ceased to match.
        if kind == EventType.DELETED and not self._has_selector:
            reason = DeleteReason.OBJECT_DELETED
        event = Event(kind, made, reason, made.resource_version)
        if not self._at.accepts(event):
            return []
        self._state.moved_to(made.resource_version)
        return [event]

    def leave(self) -> None:
        """Ends the watch of the apiserver, so that kubefan is asked. From any thread."""
        self._leaves = True
        if self._abort is not None:
            self._abort.set()

    def close(self) -> None:
        """Ends the watch. From any thread."""
        self._closed = True
        self.leave()
        self._cancel()

    def _await_return(self, now: float) -> None:
        clock, left = self.reads.clock, self._state.seconds_left(now)
        cancels: list[Cancel] = []
        if self.view().is_healthy:
            # From its start on, for which it has waited.
            self._refused_until = now + self._refused_for
            cancels.append(clock.call_later(self._refused_for, self.leave))
        else:
            cancels.append(self.reads.monitor.await_return(self.leave))
        if left is not None and self._abort is not None:
            cancels.append(clock.call_later(left, self._abort.set))

        def cancel() -> None:
            for each in cancels:
                each()

        self._cancel()
        self._cancel = cancel
        # `close` may have come in between.
        if self._closed:
            cancel()

    def _ended(self, error: Optional[KubefanError]) -> list[WatchItem]:
        watch, self._watch = self._watch, None
        self._cancel()
        self.is_open, self._at.moved = False, True
        if watch is not None:
            watch.close()
        now = time.monotonic()
        if self._leaves:
            self._refused_until = 0.0
            return []
        if self._state.is_over(now):
            return []
        if error is None:
            # A server that ends each watch at once is not asked in a tight loop.
            if now - self._watch_opened_at < SHORT_STREAM_SECONDS:
                self._retry_at = now + self._state.pause(now)
            return []
        self._had_state = self.has_state
        view = self.view()
        if not isinstance(error, Expired) and not error.is_retryable:
            if view.is_healthy:
                # Neither has an answer.
                return self._state.failed(error, now)
            self._barred_in = view.epoch
        items = self._state.failed(error, now, is_certain=False)
        for item in items:
            if isinstance(item, (Disconnected, Restarted)):
                self._retry_at = now + item.retry_in
        return items


def _nothing() -> None:
    """Cancels nothing."""
