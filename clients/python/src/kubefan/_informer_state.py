"""The state machine of an informer: items of a watch become changes of its store, and calls.

It has no I/O. The hazard is a store that silently differs from the server. So a version counts
only after everything at or below it is in the store, and a snapshot, a gap or a catch-up that
breaks off has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

from . import _keywords as messages
from ._backoff import Backoff
from .errors import Expired, KubefanError, Unauthenticated, Unreachable
from .handlers import Add, Deleted, Notification, Update
from .items import (
    CatchUpBegin,
    CatchUpEnd,
    Disconnected,
    Event,
    GapBegin,
    GapEnd,
    Restarted,
    SnapshotBegin,
    SnapshotEnd,
    WatchItem,
)
from .objects import DeleteReason, EventType, Object
from .options import Projection, WatchOptions
from .reasons import ErrorReason
from .store import Indexer

#: A state older than a version that is already known is refused this often. Replicas catch up
#: sooner. A cluster that was restored from a backup may not for a long time.
OLD_SNAPSHOTS_MAX = 10


def version_number(version: str) -> Optional[int]:
    """The number of a version; None if it has none.

    A place inside it, which a version to resume from may have (`218.1`, `218.end`), does not count.
    """
    whole = version.partition(".")[0]
    return int(whole) if whole.isdecimal() else None


class InformerState:
    """The store, and how far it is."""

    def __init__(self, resource: str, keywords: dict[str, Any]) -> None:
        projection = keywords.get("projection")
        if isinstance(projection, Projection) and projection.leaves_out():
            keywords.setdefault("only_changes", True)
        for name in ("resource_version", "cluster", "timeout"):
            if keywords.get(name) not in (None, ""):
                raise TypeError(f"an informer has no {name}: it starts with the present state")
        self.target, self._options = messages.watch_options(resource, keywords)
        self.indexer = Indexer()
        #: Everything at or below this version is in the store.
        self.resource_version = ""
        #: Whether the first state is complete.
        self.synced = False
        self._version = ""
        self._cluster = ""
        self._backoff = Backoff(self._options.backoff)
        self._snapshot: Optional[dict[str, Object]] = None
        self._snapshot_cluster = ""
        self._unit: Optional[list[Event]] = None
        self._expired = 0
        self._refused = 0

    def options(self) -> WatchOptions:
        """The options of the next watch."""
        return replace(self._options, resource_version=self._version, cluster=self._cluster)

    def failed(self, error: KubefanError, version: str, now: float) -> float:
        """A watch has ended with an error, at `version`. The delay before the next, in seconds."""
        self._snapshot = self._unit = None
        if isinstance(error, Expired):
            self._note_expired(error, version)
        if isinstance(error, Expired) or not (
            error.is_retryable or isinstance(error, Unauthenticated)
        ):
            # An error that no retry of the same request can fix leads to a new state.
            self._version = self._cluster = ""
        return self._backoff.next_delay(now, error.retry_after)

    def accept(self, item: WatchItem, cluster: str) -> list[Notification]:
        """Applies an item of a watch of this cluster.

        Raises `Unreachable` for a state that would go back in time.
        """
        calls: list[Notification] = []
        if isinstance(item, Event):
            if self._snapshot is not None:
                self._collect(item.object, self._snapshot)
                return calls
            if self._unit is not None:
                self._unit.append(item)
                return calls
            calls = self._apply([item])
        elif isinstance(item, SnapshotBegin):
            self._check(item.resource_version)
            self._snapshot, self._unit = {}, None
        elif isinstance(item, SnapshotEnd):
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is not None:
                calls = self._replace(snapshot)
        elif isinstance(item, (GapBegin, CatchUpBegin)):
            self._unit = []
        elif isinstance(item, (GapEnd, CatchUpEnd)):
            unit, self._unit = self._unit, None
            calls = self._apply(unit or [])
        elif isinstance(item, (Disconnected, Restarted)):
            self._snapshot = self._unit = None
            if isinstance(item, Restarted):
                self._note_expired(item.error, self._version)
        if item.resume_version:
            self._version = self.resource_version = item.resume_version
            self._cluster = cluster
        return calls

    def _collect(self, made: Object, snapshot: dict[str, Object]) -> None:
        # An object that has not changed stays the same one, and takes no memory twice.
        old = self.indexer.get(made.key)
        snapshot[made.key] = old if old is not None and old == made else made

    def _replace(self, snapshot: dict[str, Object]) -> list[Notification]:
        changes: list[tuple[str, Optional[Object]]] = []
        calls: list[Notification] = []
        for old in self.indexer.list():
            if old.key not in snapshot:
                changes.append((old.key, None))
                calls.append(Deleted(old, final_state_unknown=True))
        for key, made in snapshot.items():
            known = self.indexer.get(key)
            if known is made:
                continue
            changes.append((key, made))
            calls.append(Add(made, not self.synced) if known is None else Update(known, made))
        self.indexer._write(changes)
        self.synced = True
        return calls

    def _apply(self, events: list[Event]) -> list[Notification]:
        changes: dict[str, Optional[Object]] = {}
        calls: list[Notification] = []
        for event in events:
            made = event.object
            key = made.key
            old = changes[key] if key in changes else self.indexer.get(key)
            if event.type != EventType.DELETED:
                if old is None:
                    calls.append(Add(made, False))
                elif old != made:
                    calls.append(Update(old, made))
                changes[key] = made
                continue
            changes[key] = None
            if event.delete_reason != DeleteReason.FINAL_STATE_UNKNOWN:
                calls.append(Deleted(made))
            elif old is not None:
                calls.append(Deleted(old, final_state_unknown=True))
            # Else it was never known here: nothing was deleted for the handlers.
        self.indexer._write(changes.items())
        return calls

    def _note_expired(self, error: KubefanError, version: str) -> None:
        """Remembers the version, unless another history has replaced its own."""
        number = version_number(version) if error.reason == ErrorReason.TOO_OLD else None
        self._expired, self._refused = number or 0, 0

    def _check(self, version: str) -> None:
        """Refuses a state that a replica behind the others sends."""
        number = version_number(version)
        is_old = number is not None and number < self._expired
        if not is_old or self._refused >= OLD_SNAPSHOTS_MAX:
            self._expired = self._refused = 0
            return
        self._refused += 1
        raise Unreachable(f"this replica is at version {version}, behind version {self._expired}")
