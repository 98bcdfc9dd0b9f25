"""Turns the items of a watch into events that stand for themselves.

A snapshot that replaces an earlier state becomes the difference to it: objects that are gone are
DELETED, unchanged ones are left out. The events of a gap or a catch-up are a unit: they are held
back until it is complete, and dropped if the stream breaks before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Optional

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


class Changes:
    """The state of a watch's reader: the uid and version of each object."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}
        #: The keys of the snapshot that is arriving.
        self._seen: Optional[set[str]] = None
        self._unit: Optional[list[Event]] = None

    def accept(self, item: WatchItem) -> list[Event]:
        """The events that an item makes known. The last one has the item's `resume_version`."""
        if isinstance(item, Event):
            if self._seen is not None:
                return self._in_snapshot(item, self._seen)
            if self._unit is not None:
                self._unit.append(item)
                return []
            return self._apply(item)
        if isinstance(item, SnapshotBegin):
            self._seen, self._unit = set(), None
        elif isinstance(item, SnapshotEnd) and self._seen is not None:
            seen, self._seen = self._seen, None
            gone = [key for key in self._known if key not in seen]
            return _versioned((self._deleted(key) for key in gone), item.resume_version)
        elif isinstance(item, (GapBegin, CatchUpBegin)):
            self._unit = []
        elif isinstance(item, (GapEnd, CatchUpEnd)):
            unit, self._unit = self._unit or [], None
            events = [made for event in unit for made in self._apply(event)]
            return _versioned(events, item.resume_version)
        elif isinstance(item, (Disconnected, Restarted)):
            self._seen = self._unit = None
        return []

    def _apply(self, event: Event) -> list[Event]:
        key = event.object.key
        if event.type == EventType.DELETED:
            self._known.pop(key, None)
        else:
            self._known[key] = (event.object.uid, event.object.resource_version)
        return [event]

    def _in_snapshot(self, event: Event, seen: set[str]) -> list[Event]:
        made = event.object
        seen.add(made.key)
        known = self._known.get(made.key)
        events = []
        if known is not None:
            if known == (made.uid, made.resource_version):
                return []
            if known[0] == made.uid:
                event = replace(event, type=EventType.MODIFIED)
            else:
                events.append(self._deleted(made.key))
        self._known[made.key] = (made.uid, made.resource_version)
        events.append(event)
        return events

    def _deleted(self, key: str) -> Event:
        uid, version = self._known.pop(key)
        namespace, _, name = key.rpartition("/")
        return Event(
            EventType.DELETED,
            metadata_only(namespace, name, uid, version),
            DeleteReason.FINAL_STATE_UNKNOWN,
        )


def metadata_only(namespace: str, name: str, uid: str, version: str) -> Object:
    """Returns an object with nothing but its identity."""
    metadata = {"name": name, "uid": uid, "resourceVersion": version}
    if namespace:
        metadata["namespace"] = namespace
    # Without spaces, as kubefan and the other clients write it.
    text = json.dumps({"metadata": metadata}, separators=(",", ":"))
    return Object(namespace, name, uid, version, text.encode())


def _versioned(events: Iterable[Event], version: str) -> list[Event]:
    made = list(events)
    if made:
        made[-1] = replace(made[-1], resume_version=version)
    return made
