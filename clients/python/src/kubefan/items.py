"""The items of a watch. `Client.watch` has only events; `Client.watch_items` has all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from .errors import KubefanError
from .objects import DeleteReason, EventType, Object


@dataclass(frozen=True)
class Resource:
    """A resource as kubefan resolved it."""

    group: str
    version: str
    resource: str
    kind: str
    namespaced: bool


@dataclass(frozen=True)
class Event:
    """One change, relative to the selector of the watch.

    Attributes:
        type: ADDED, MODIFIED or DELETED. An object that starts to match is ADDED, one that no
            longer matches is DELETED.
        object: The object after the change. For DELETED its last state, as far as it is known.
        delete_reason: Set for DELETED.
        resume_version: The version to resume from after this event; empty inside a snapshot, a gap
            or a catch-up. `resource_version` of an object is no version to resume from. Send it
            back as it is: it need not be a number, and `218.end` is after all events of 218.
    """

    type: EventType
    object: Object
    delete_reason: Optional[DeleteReason] = None
    resume_version: str = ""


@dataclass(frozen=True)
class SnapshotBegin:
    """A snapshot starts. The events up to `SnapshotEnd` replace everything that was known.

    Attributes:
        resource_version: The version of the state.
        restarted_from: The version that history could not resume from, if that is why.
        resource: The resource, if the server has named it.
        resume_version: Always empty.
    """

    resource_version: str
    restarted_from: str = ""
    resource: Optional[Resource] = None
    resume_version: str = ""


@dataclass(frozen=True)
class SnapshotEnd:
    """The snapshot is complete."""

    object_count: int
    resume_version: str = ""


@dataclass(frozen=True)
class GapBegin:
    """kubefan had to list again. The events up to `GapEnd` lead over the gap, and form a unit.

    Attributes:
        resource_version: Up to this version the stream was exact.
        reason: Why kubefan listed again, such as `expired`.
        resume_version: Always empty.
    """

    resource_version: str
    reason: str = ""
    resume_version: str = ""


@dataclass(frozen=True)
class GapEnd:
    """The gap is complete."""

    resume_version: str = ""


@dataclass(frozen=True)
class CatchUpBegin:
    """The stream had fallen behind. The events up to `CatchUpEnd` form a unit.

    Attributes:
        resource_version: Up to this version the stream was exact.
        resume_version: Always empty.
    """

    resource_version: str
    resume_version: str = ""


@dataclass(frozen=True)
class CatchUpEnd:
    """The catch-up is complete."""

    resume_version: str = ""


@dataclass(frozen=True)
class Bookmark:
    """Only the version to resume from has moved."""

    resume_version: str = ""


@dataclass(frozen=True)
class Disconnected:
    """The connection broke; the watch retries by itself.

    The events of an open snapshot, gap or catch-up do not count.

    Attributes:
        error: Why it broke.
        retry_in: Seconds until the next attempt.
        resume_version: Always empty.
    """

    error: KubefanError
    retry_in: float
    resume_version: str = ""


@dataclass(frozen=True)
class Reconnected:
    """The connection is back, and the watch continues after the version `since`."""

    since: str
    resume_version: str = ""


@dataclass(frozen=True)
class Restarted:
    """History cannot resume from the version, so a snapshot follows."""

    error: KubefanError
    retry_in: float
    resume_version: str = ""


WatchItem = Union[
    SnapshotBegin,
    Event,
    SnapshotEnd,
    GapBegin,
    GapEnd,
    CatchUpBegin,
    CatchUpEnd,
    Bookmark,
    Disconnected,
    Reconnected,
    Restarted,
]
