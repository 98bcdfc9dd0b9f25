"""Messages of a server, for recorded sequences."""

from __future__ import annotations

import json

from kubefan.v1alpha1 import watch_pb2 as api

KINDS = {
    "ADDED": api.EVENT_TYPE_ADDED,
    "MODIFIED": api.EVENT_TYPE_MODIFIED,
    "DELETED": api.EVENT_TYPE_DELETED,
}


def raw(name: str, value: str = "") -> bytes:
    """The JSON text of an object."""
    return json.dumps({"metadata": {"name": name}, "value": value}).encode()


def made(
    kind: str, name: str, version: str, value: str = "", uid: str = "", unknown: bool = False
) -> api.Event:
    """An event."""
    reason = api.DELETE_REASON_UNSPECIFIED
    if kind == "DELETED":
        reason = api.DELETE_REASON_OBJECT_DELETED
        if unknown:
            reason = api.DELETE_REASON_FINAL_STATE_UNKNOWN
    return api.Event(
        type=KINDS[kind],
        namespace="default",
        name=name,
        uid=uid or f"uid-of-{name}",
        resource_version=version,
        delete_reason=reason,
        object=raw(name, value or version),
    )


def event(
    kind: str, name: str, version: str, resume: str = "", uid: str = "", unknown: bool = False
) -> api.WatchResponse:
    """A message with an event."""
    return api.WatchResponse(
        resume_version=resume, event=made(kind, name, version, uid=uid, unknown=unknown)
    )


def begin(version: str, restarted_from: str = "", cluster: str = "c1") -> api.WatchResponse:
    """A snapshot starts."""
    return api.WatchResponse(
        snapshot_begin=api.SnapshotBegin(
            resource_version=version, restarted_from=restarted_from, cluster=cluster
        )
    )


def end(version: str, count: int = 0) -> api.WatchResponse:
    """A snapshot is complete."""
    return api.WatchResponse(
        resume_version=version, snapshot_end=api.SnapshotEnd(object_count=count)
    )


def gap_begin(version: str) -> api.WatchResponse:
    """A gap starts."""
    return api.WatchResponse(gap_begin=api.GapBegin(resource_version=version, reason="expired"))


def gap_end(version: str) -> api.WatchResponse:
    """A gap is complete."""
    return api.WatchResponse(resume_version=version, gap_end=api.GapEnd())


def catch_up_begin(version: str) -> api.WatchResponse:
    """A catch-up starts."""
    return api.WatchResponse(catch_up_begin=api.CatchUpBegin(resource_version=version))


def catch_up_end(version: str) -> api.WatchResponse:
    """A catch-up is complete."""
    return api.WatchResponse(resume_version=version, catch_up_end=api.CatchUpEnd())


def bookmark(version: str) -> api.WatchResponse:
    """A bookmark."""
    return api.WatchResponse(resume_version=version, bookmark=api.Bookmark())
