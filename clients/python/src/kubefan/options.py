"""Options of watches and lists: the same options, by the same names, as the Rust package."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Optional, TypeVar, Union

from .v1alpha1 import watch_pb2 as api

#: Memory limit of the copies that `Encoding.ZSTD_DELTA` needs, in bytes.
DELTA_BASE_BYTES_MAX = 1 << 30


class Encoding(enum.Enum):
    """Encoding of objects on the wire. Events always carry whole objects."""

    #: Every object as JSON.
    JSON = "json"
    #: Snapshots in compressed chunks, events as JSON.
    ZSTD = "zstd"
    #: Snapshots in compressed chunks, events as deltas to the previous state. The watch keeps a
    #: copy of each object. Experimental.
    ZSTD_DELTA = "zstd-delta"


class OnLag(enum.Enum):
    """Reaction if the stream has fallen behind the events that the server retains."""

    #: Treat it as an expired version.
    EXPIRE = "expire"
    #: Continue with a catch-up, which has each changed object once.
    CONFLATE = "conflate"


class OnExpired(enum.Enum):
    """Reaction if history cannot resume from the version."""

    #: End with `Expired`.
    FAIL = "fail"
    #: Start over with a snapshot.
    RESTART = "restart"


class Fallback(enum.Enum):
    """Reaction while kubefan cannot be reached."""

    #: Read from the apiserver, within the budget, if the client has one
    #: (`ClientOptions(apiserver=…)`). Otherwise wait.
    PACED = "paced"
    #: Wait until it is back. The apiserver gets no request.
    NEVER = "never"


#: What an option with fixed values takes: a value of the enum, or its string.
AnyEncoding = Union[Encoding, Literal["json", "zstd", "zstd-delta"]]
AnyOnLag = Union[OnLag, Literal["expire", "conflate"]]
AnyOnExpired = Union[OnExpired, Literal["fail", "restart"]]
AnyFallback = Union[Fallback, Literal["paced", "never"]]

_Value = TypeVar("_Value", bound=enum.Enum)


def value_of(kind: type[_Value], option: str, given: Any) -> _Value:
    """The value of an enum that `given` is or names. Raises ValueError for anything else.

    A string that no one checked would compare unequal to every value, and so mean the opposite.
    """
    if isinstance(given, kind):
        return given
    for value in kind:
        if isinstance(given, str) and given == value.value:
            return value
    *others, last = (repr(value.value) for value in kind)
    allowed = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(
        f"{option}={given!r} is not possible; give {allowed}, or a value of kubefan.{kind.__name__}"
    )


def check_at_least(option: str, given: Any, least: float) -> None:
    """Raises ValueError for a number below `least`, and for anything but a finite number."""
    if not (isinstance(given, Real) and least <= float(given) < math.inf):
        raise ValueError(f"{option}={given!r} is not possible; give a number of at least {least:g}")


def check_seconds(option: str, given: Any) -> None:
    """Raises ValueError for a time that is over before it begins."""
    if not (isinstance(given, Real) and 0 < float(given) < math.inf):
        raise ValueError(f"{option}={given!r} is not possible; give a number of seconds above 0")


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
        if isinstance(self.paths, str):
            raise ValueError(f"paths={self.paths!r} is one string; give a tuple of paths")
        paths = tuple(self.paths)
        if not all(isinstance(path, str) for path in paths):
            raise ValueError(f"paths={paths!r} has something else than strings")
        if "" in paths:
            raise ValueError(f"paths={paths!r}: a path is empty")
        if paths and self.metadata_only:
            raise ValueError("a projection has either paths or metadata_only")
        # A list is no harm, but nothing that could be hashed or stays as it is.
        object.__setattr__(self, "paths", paths)

    @staticmethod
    def fields(*paths: str) -> Projection:
        """Only the fields at these paths. Raises ValueError without a path."""
        if not paths:
            raise ValueError(
                "Projection.fields() needs at least one path, such as 'spec.nodeName'; "
                "Projection() leaves nothing out"
            )
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


def check_projection(given: Any) -> None:
    """Raises ValueError for anything but a `Projection`, such as a list of paths."""
    if not isinstance(given, Projection):
        raise ValueError(
            f"projection={given!r} is not possible; give Projection.fields(PATH, ...), "
            "Projection.metadata() or another Projection"
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

    def __post_init__(self) -> None:
        # Without a first delay above 0 there would be none at all, and so a tight loop.
        check_seconds("initial", self.initial)
        check_at_least("max", self.max, self.initial)
        check_at_least("factor", self.factor, 1)
        check_at_least("jitter", self.jitter, 0)
        check_at_least("reset_after", self.reset_after, 0)


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

    Those with fixed values take a value of their enum or its string, such as `"zstd"`. Raises
    ValueError for other values, and for options that contradict each other.

    Attributes:
        resource_version: Resume after this version: the `resume_version` of a watch of the same
            target, or the version of a list. Empty starts with a snapshot.
        cluster: The cluster of that version, from the same place; empty if unknown.
        timeout: The watch ends after this many seconds, more than 0. None for no limit.
        bookmark_interval: Seconds of silence before a bookmark; at least 1. None means 60.
        projection: The parts of each object to send.
        only_changes: Do not send changes that leave the projected bytes as they were. Requires a
            projection that leaves something out, or deltas.
        encoding: Encoding of objects on the wire.
        on_lag: Reaction if the stream falls behind.
        on_expired: Reaction if history cannot resume from the version.
        fallback: Reaction while kubefan cannot be reached.
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
    fallback: Fallback = Fallback.PACED
    delta_base_bytes_max: int = DELTA_BASE_BYTES_MAX
    backoff: BackoffOptions = BackoffOptions()

    def __post_init__(self) -> None:
        for option, value in (
            ("encoding", value_of(Encoding, "encoding", self.encoding)),
            ("on_lag", value_of(OnLag, "on_lag", self.on_lag)),
            ("on_expired", value_of(OnExpired, "on_expired", self.on_expired)),
            ("fallback", value_of(Fallback, "fallback", self.fallback)),
        ):
            object.__setattr__(self, option, value)
        check_projection(self.projection)
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        if self.bookmark_interval is not None:
            check_at_least("bookmark_interval", self.bookmark_interval, 1)
        check_at_least("delta_base_bytes_max", self.delta_base_bytes_max, 0)
        is_canonical = self.projection.leaves_out() or self.encoding == Encoding.ZSTD_DELTA
        if self.only_changes and not is_canonical:
            raise ValueError(
                "only_changes needs a projection that leaves something out, such as "
                "Projection(drop_managed_fields=True), or the encoding 'zstd-delta'"
            )
