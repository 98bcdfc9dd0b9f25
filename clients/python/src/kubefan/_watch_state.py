"""The state machine of a watch, without I/O and without a clock.

Every message that can be resumed from carries a `resume_version`. The machine keeps the last one,
and asks with it for the rest after a break: the server then sends exactly the changes in between.
It never resumes from an object's own version, because that does not say which changes the selector
has already covered.

The sync and the asyncio watch drive it: they open the calls that it asks for, and hand it what
arrives, with the time.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Optional

from google.protobuf.duration_pb2 import Duration

from ._backoff import Backoff
from ._delta import DeltaBase, DeltaError, OverLimitError, decode_chunk
from ._resume_version import received, sent
from .errors import Expired, KubefanError, Unauthenticated, Undecodable, Unreachable
from .items import (
    Bookmark,
    CatchUpBegin,
    CatchUpEnd,
    Disconnected,
    Event,
    GapBegin,
    GapEnd,
    Reconnected,
    Resource,
    Restarted,
    SnapshotBegin,
    SnapshotEnd,
    WatchItem,
)
from .objects import DeleteReason, EventType, Object
from .options import Encoding, OnExpired, OnLag, Target, WatchOptions
from .reasons import ErrorReason
from .v1alpha1 import watch_pb2 as api

#: A stream lives between this many seconds and twice as many, then the watch resumes on another
#: one. A proxy in between may keep a connection open that leads nowhere, and answer its PINGs.
STREAM_SECONDS_MIN = 300.0
#: The server ends a stream at its timeout. If it is this late, the client ends it.
TIMEOUT_GRACE_SECONDS = 2.0
#: Clocks of two machines differ by this much over the life of a stream.
_CLOCK_SECONDS = 0.1
#: The reasons of a stream that the server asks to continue on a new connection, at once.
_MOVED = (ErrorReason.REBALANCED, ErrorReason.CONNECTION_AGE)
#: A stream that is moved sooner than this after it was opened has failed: otherwise a server that
#: moves every stream would be asked in a tight loop.
_MOVED_AFTER_SECONDS = 5.0
#: A stream that ends sooner, without a message, counts as failed.
_SHORT_STREAM_SECONDS = 1.0

_TYPES = {
    api.EVENT_TYPE_ADDED: EventType.ADDED,
    api.EVENT_TYPE_MODIFIED: EventType.MODIFIED,
    api.EVENT_TYPE_DELETED: EventType.DELETED,
}
_REASONS = {
    api.DELETE_REASON_OBJECT_DELETED: DeleteReason.OBJECT_DELETED,
    api.DELETE_REASON_LEFT_SELECTOR: DeleteReason.LEFT_SELECTOR,
    api.DELETE_REASON_FINAL_STATE_UNKNOWN: DeleteReason.FINAL_STATE_UNKNOWN,
}


class WatchState:
    """The state of one watch."""

    def __init__(
        self,
        target: Target,
        options: WatchOptions,
        address: str = "kubefan",
        generator: Optional[random.Random] = None,
    ) -> None:
        self._target = target.message()
        self._options = options
        self._address = address
        self._random = generator or random.Random()
        self._backoff = Backoff(options.backoff, self._random)
        #: The last version to resume from. Empty until the first snapshot is complete.
        self.resume_version = options.resource_version
        #: The cluster of that version.
        self.cluster = options.cluster
        #: Whether the watch has ended, by its timeout or an error.
        self.ended = False
        self._next_cluster: Optional[str] = None
        self._deadline: Optional[float] = None
        self._wake_at: Optional[float] = None
        self._broken = False
        self._opened_at: Optional[float] = None
        self._was_open = False
        self._received = False
        self._stream_deadline: Optional[float] = None
        self._deltas: Optional[DeltaBase] = None
        if options.encoding == Encoding.ZSTD_DELTA:
            self._deltas = DeltaBase(options.delta_base_bytes_max)
        #: Whether the delta base is the state at exactly `resume_version`, and not on the way to a
        #: later one.
        self._deltas_current = False

    @property
    def is_open(self) -> bool:
        """Whether the call has been answered."""
        return self._opened_at is not None

    def delay(self, now: float) -> float:
        """Seconds to wait before the next call."""
        self._begin(now)
        if self._wake_at is None:
            return 0.0
        wake = self._wake_at if self._deadline is None else min(self._wake_at, self._deadline)
        return max(0.0, wake - now)

    def request(self, now: float) -> Optional[api.WatchRequest]:
        """The request of the next call, for the rest of the watch. None if its timeout has passed.

        `call_seconds` has the limit of the call.
        """
        self._begin(now)
        self._opened_at = None
        self._received = False
        if self._deadline is not None and now >= self._deadline:
            self.ended = True
            return None
        limit = now + STREAM_SECONDS_MIN * (1 + self._random.random())
        self._stream_deadline = limit if self._deadline is None else min(limit, self._deadline)
        options, deltas = self._options, self._deltas
        if deltas is not None and not self._deltas_current:
            # It has parts of a span that broke off, which no later message need undo.
            deltas.clear()
        encoding, canonical = api.ENCODING_JSON, False
        if options.encoding == Encoding.ZSTD:
            encoding = api.ENCODING_ZSTD
        elif options.encoding == Encoding.ZSTD_DELTA:
            # If deltas had to be given up, this asks for the same bytes that they produced.
            encoding = api.ENCODING_ZSTD if deltas is None else api.ENCODING_ZSTD_DELTA
            canonical = deltas is None
        version, is_complete = sent(self.resume_version)
        request = api.WatchRequest(
            target=self._target,
            resource_version=version,
            cluster=self.cluster,
            timeout_seconds=math.ceil(self._stream_deadline - now),
            encoding=encoding,
            state_kept=deltas is not None and deltas.complete,
            on_lag=api.ON_LAG_CONFLATE if options.on_lag == OnLag.CONFLATE else api.ON_LAG_EXPIRE,
            on_expired=api.ON_EXPIRED_RESTART
            if options.on_expired == OnExpired.RESTART
            else api.ON_EXPIRED_FAIL,
        )
        if is_complete is not None:
            request.version_is_complete = is_complete
        if options.bookmark_interval is not None:
            nanos = round(options.bookmark_interval * 1e9)
            request.bookmark_interval.CopyFrom(
                Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
            )
        if options.projection.leaves_out() or options.only_changes or canonical:
            request.projection.CopyFrom(options.projection.message(options.only_changes, canonical))
        return request

    def call_seconds(self, now: float) -> float:
        """The limit of the call in seconds, a little later than the server's own."""
        deadline = now if self._stream_deadline is None else self._stream_deadline
        return max(0.0, math.ceil(deadline - now)) + TIMEOUT_GRACE_SECONDS

    def opened(self, now: float) -> list[WatchItem]:
        """The call has been answered."""
        self._opened_at = now
        self._next_cluster = None
        if not self._broken:
            return []
        self._broken = False
        return [Reconnected(since=self.resume_version)]

    def accept(self, response: api.WatchResponse, now: float) -> list[WatchItem]:
        """Applies a message and returns its items.

        If the last one is `Disconnected`, the message cannot be decoded, and the call must be
        cancelled: the next one gets the message again, with whole objects.
        """
        items = self.opened(now) if self._opened_at is None else []
        self._received = self._was_open = True
        version = received(response.resume_version, response.version_is_complete)
        try:
            items += self._items(response, version)
        except DeltaError as error:
            items.append(self._undecodable(error, now))
            return items
        self._deltas_current = bool(version)
        if version:
            self.resume_version = version
            if self._next_cluster is not None:
                self.cluster, self._next_cluster = self._next_cluster, None
        return items

    def finished(self, now: float) -> list[WatchItem]:
        """The stream has ended without an error."""
        if self._deadline is not None and now >= self._deadline - _CLOCK_SECONDS:
            self.ended = True
            return []
        lived = 0.0 if self._opened_at is None else now - self._opened_at
        if self._received or lived >= _SHORT_STREAM_SECONDS:
            # Its time was over.
            self._wake_at = None
            return []
        return self.failed(
            Unreachable(f"cannot reach kubefan at {self._address}: the stream ended at once"), now
        )

    def moved_to(self, version: str, cluster: Optional[str] = None) -> None:
        """The apiserver has brought everything up to this version."""
        self.resume_version = version
        self.cluster = self.cluster if cluster is None else cluster
        self._deltas_current = False

    def pause(self, now: float) -> float:
        """Seconds until another attempt at the apiserver."""
        return self._backoff.next_delay(now)

    def soon(self, now: float) -> None:
        """Asks kubefan within two first delays. All watches of a client learn of its return."""
        wake_at = now + 2 * self._options.backoff.initial * self._random.random()
        if self._wake_at is not None:
            self._wake_at = min(self._wake_at, wake_at)

    def is_over(self, now: float) -> bool:
        """Whether the timeout of the watch has passed. Then it has ended."""
        self.ended = self.ended or (self._deadline is not None and now >= self._deadline)
        return self.ended

    def seconds_left(self, now: float) -> Optional[float]:
        """The seconds until the timeout of the watch; None without one."""
        self._begin(now)
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def failed(
        self,
        error: KubefanError,
        now: float,
        token_may_change: bool = False,
        is_certain: bool = True,
    ) -> list[WatchItem]:
        """The call has failed. Raises the error if a retry cannot fix it.

        Without `is_certain` another server may be asked, so only a version that has expired is
        raised.
        """
        is_own_limit = error.reason in ("", ErrorReason.DEADLINE_EXCEEDED)
        if error.code.name == "DEADLINE_EXCEEDED" and is_own_limit:
            # The call's own limit, which the server has missed.
            self._received = True
            return self.finished(now)
        lived = 0.0 if self._opened_at is None else now - self._opened_at
        if error.reason in _MOVED and lived >= _MOVED_AFTER_SECONDS:
            # Nothing was lost, and nothing has failed.
            self._wake_at = None
            return []
        # The headers of a refusal may arrive before its status and look like an answer, so only a
        # message, or an end that an accepted token has, shows that the token was accepted.
        self._was_open = self._was_open or error.reason == ErrorReason.REAUTHENTICATE
        restart = isinstance(error, Expired) and self._options.on_expired == OnExpired.RESTART
        # The file may get another token. A token that was never accepted is a mistake, though.
        may_login = isinstance(error, Unauthenticated) and self._was_open and token_may_change
        is_final = is_certain or isinstance(error, Expired)
        if is_final and not restart and not may_login and not error.is_retryable:
            self.ended = True
            raise error
        # A restart is delayed too: otherwise, with a history that is too short, clients would read
        # snapshots in a tight loop.
        retry_in = self._backoff.next_delay(now, error.retry_after)
        self._wake_at = now + retry_in
        self._broken = True
        if restart:
            self.resume_version = self.cluster = ""
            self._deltas_current = False
            return [Restarted(error, retry_in)]
        return [Disconnected(error, retry_in)]

    def _begin(self, now: float) -> None:
        if self._deadline is None and self._options.timeout is not None:
            self._deadline = now + self._options.timeout

    def _undecodable(self, error: DeltaError, now: float) -> WatchItem:
        if isinstance(error, OverLimitError):
            self._deltas = None
        self._deltas_current = False
        self._broken = True
        retry_in = self._backoff.next_delay(now)
        self._wake_at = now + retry_in
        text = f"cannot decode a message from kubefan at {self._address}: {error}"
        return Disconnected(Undecodable(text), retry_in)

    def _items(self, response: api.WatchResponse, version: str) -> list[WatchItem]:
        kind = response.WhichOneof("message")
        if kind == "event":
            event = self._event(response.event, version)
            return [] if event is None else [event]
        if kind == "snapshot_chunk":
            events = (
                self._event(event, "") for event in decode_chunk(response.snapshot_chunk.zstd)
            )
            return [event for event in events if event is not None]
        if kind == "snapshot_begin":
            begin = response.snapshot_begin
            if self._deltas is not None:
                self._deltas.clear()
            self._next_cluster = begin.cluster
            resource = resource_of(begin.resource) if begin.HasField("resource") else None
            return [SnapshotBegin(begin.resource_version, begin.restarted_from, resource, version)]
        if kind == "snapshot_end":
            if self._deltas is not None:
                self._deltas.end_snapshot()
            return [SnapshotEnd(response.snapshot_end.object_count, version)]
        if kind == "gap_begin":
            return [GapBegin(response.gap_begin.resource_version, response.gap_begin.reason)]
        if kind == "gap_end":
            return [GapEnd(version)]
        if kind == "catch_up_begin":
            return [CatchUpBegin(response.catch_up_begin.resource_version)]
        if kind == "catch_up_end":
            return [CatchUpEnd(version)]
        # A bookmark, or an unknown message of a newer server. Its version counts in any case.
        return [Bookmark(version)]

    def _event(self, event: api.Event, version: str) -> Optional[Event]:
        if self._deltas is not None:
            raw = self._deltas.resolve(event)
        elif event.HasField("delta"):
            raise DeltaError("a delta arrived, but none was asked for")
        else:
            raw = event.object
        kind = _TYPES.get(event.type)
        if kind is None:
            return None
        namespace = sys.intern(event.namespace)
        made = Object(namespace, event.name, event.uid, event.resource_version, raw)
        return Event(kind, made, _REASONS.get(event.delete_reason), version)


def resource_of(resource: api.ResolvedResource) -> Resource:
    """A resource as kubefan resolved it."""
    return Resource(
        resource.group, resource.version, resource.resource, resource.kind, resource.namespaced
    )
