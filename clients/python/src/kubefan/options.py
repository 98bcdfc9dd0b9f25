"""What a watch or a list asks for: the same options, by the same names, as the Rust package."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional

from .v1alpha1 import watch_pb2 as api

#: Memory limit of the copies that `Encoding.ZSTD_DELTA` needs, in bytes.
DELTA_BASE_BYTES_MAX = 1 << 30


class Encoding(enum.Enum):
    """How objects are encoded on the wire. Events always carry whole objects."""

    #: Every object as JSON.
    JSON = "json"
    #: Snapshots in compressed chunks, events as JSON.
    ZSTD = "zstd"
    #: Snapshots in compressed chunks, events as deltas to the previous state. The watch keeps a
    #: copy of each object. Experimental.
    ZSTD_DELTA = "zstd-delta"


class OnLag(enum.Enum):
    """What to do if the stream has fallen behind the events that the server retains."""

    #: Treat it as an expired version.
    EXPIRE = "expire"
    #: Continue with a catch-up, which has each changed object once.
    CONFLATE = "conflate"


class OnExpired(enum.Enum):
    """What to do if history cannot resume from the version."""

    #: End with `Expired`.
    FAIL = "fail"
    #: Start over with a snapshot.
    RESTART = "restart"


class Fallback(enum.Enum):
    """What to do while kubefan cannot be reached."""

    #: Wait until it is back. The apiserver gets no request: all clients of a fleet at the apiserver
    #: at once are the load that kubefan prevents.
    NEVER = "never"


@dataclass(frozen=True)
class Projection:
    r"""The parts of each object that are sent.

    Every projection that leaves something out also leaves out `metadata.managedFields` and
    `metadata.resourceVersion`. The version is beside the object, as `Object.resource_version`.

    Attributes:
        paths: Only these fields, such as `spec.nodeName`; at most 64. A path through a list applies
            to each object in it. A backslash escapes a dot in a name:
            `metadata.annotations.example\.com/name`.
        metadata_only: Only the metadata, as a PartialObjectMetadata.
        drop_managed_fields: Leave out `metadata.managedFields`.
        drop_last_applied: Leave out the annotation that `kubectl apply` writes.
    """

    paths: tuple[str, ...] = ()
    metadata_only: bool = False
    drop_managed_fields: bool = False
    drop_last_applied: bool = False

    def __post_init__(self) -> None:
        if self.paths and self.metadata_only:
            raise ValueError("a projection has either paths or metadata_only")

    @staticmethod
    def fields(*paths: str) -> Projection:
        """Only the fields at these paths."""
        return Projection(paths=paths)

    @staticmethod
    def metadata() -> Projection:
        """Only the metadata."""
        return Projection(metadata_only=True)

    def leaves_out(self) -> bool:
        """Whether anything is left out."""
        return self != Projection()

    def message(self, only_changes: bool = False, canonical: bool = False) -> api.Projection:
        """The projection as a protobuf message."""
        kind = api.PROJECTION_TYPE_FULL
        if self.paths:
            kind = api.PROJECTION_TYPE_FIELD_MASK
        elif self.metadata_only:
            kind = api.PROJECTION_TYPE_METADATA
        return api.Projection(
            type=kind,
            paths=self.paths,
            drop_managed_fields=self.drop_managed_fields or canonical,
            drop_last_applied=self.drop_last_applied,
            only_changes=only_changes,
        )


@dataclass(frozen=True)
class BackoffOptions:
    """The delays before retries, in seconds. The defaults are those of client-go's reflector.

    Attributes:
        initial: The first delay, before jitter.
        max: The longest delay, before jitter.
        factor: The factor between two delays.
        jitter: The largest jitter, as a fraction: with 1.0 a delay of 30 s becomes 30 to 60 s.
        reset_after: After this time without a failure the first delay applies again.
    """

    initial: float = 0.8
    max: float = 30.0
    factor: float = 2.0
    jitter: float = 1.0
    reset_after: float = 120.0


@dataclass(frozen=True)
class Target:
    """The objects of a list or watch, like the path and the query of a Kubernetes list request.

    Attributes:
        resource: Plural name, such as `pods`, or any name that kubectl takes: `po`,
            `deployments.apps`.
        namespace: Empty for all namespaces.
        name: Empty for all names.
        label_selector: Such as `app=web,tier!=db`.
        field_selector: Such as `spec.nodeName=n1`.
        group: API group; empty if `resource` has it.
        version: API version; empty for the one that kubefan caches.
    """

    resource: str
    namespace: str = ""
    name: str = ""
    label_selector: str = ""
    field_selector: str = ""
    group: str = ""
    version: str = ""

    def message(self) -> api.Target:
        """The target as a protobuf message."""
        return api.Target(
            group=self.group,
            version=self.version,
            resource=self.resource,
            namespace=self.namespace,
            name=self.name,
            label_selector=self.label_selector,
            field_selector=self.field_selector,
        )


@dataclass(frozen=True)
class WatchOptions:
    """Options of a watch.

    Attributes:
        resource_version: Resume after this version: the `resume_version` of a watch of the same
            target, or the version of a list. Empty starts with a snapshot.
        cluster: The cluster of that version, from the same place; empty if unknown.
        timeout: The watch ends after this many seconds. None for no limit.
        bookmark_interval: Seconds of silence before a bookmark; at least 1. None means 60.
        projection: The parts of each object to send.
        only_changes: Do not send changes that leave the projected bytes as they were. Requires a
            projection that leaves something out, or deltas.
        encoding: How objects are encoded on the wire.
        on_lag: What to do if the stream falls behind.
        on_expired: What to do if history cannot resume from the version.
        fallback: What to do while kubefan cannot be reached.
        delta_base_bytes_max: Memory limit of the copies that deltas need. Above it the watch
            continues without deltas.
        backoff: The delays before retries.
    """

    resource_version: str = ""
    cluster: str = ""
    timeout: Optional[float] = None
    bookmark_interval: Optional[float] = None
    projection: Projection = Projection()
    only_changes: bool = False
    encoding: Encoding = Encoding.JSON
    on_lag: OnLag = OnLag.CONFLATE
    on_expired: OnExpired = OnExpired.RESTART
    fallback: Fallback = Fallback.NEVER
    delta_base_bytes_max: int = DELTA_BASE_BYTES_MAX
    backoff: BackoffOptions = BackoffOptions()
