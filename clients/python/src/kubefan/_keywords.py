"""The keyword arguments that the sync and the asyncio client share, and their messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Optional, TypedDict

from ._resume_version import received, sent
from ._watch_state import resource_of
from .items import Resource
from .objects import Object
from .options import (
    AnyEncoding,
    AnyFallback,
    AnyOnExpired,
    AnyOnLag,
    BackoffOptions,
    OnExpired,
    Projection,
    Target,
    WatchOptions,
    check_projection,
    check_seconds,
)
from .v1alpha1 import watch_pb2 as api

WATCH = "/kubefan.v1alpha1.WatchService/Watch"
LIST = "/kubefan.v1alpha1.WatchService/List"
GET = "/kubefan.v1alpha1.WatchService/Get"
LIST_RESOURCES = "/kubefan.v1alpha1.WatchService/ListResources"

#: The limit of a call that lists or gets, in seconds, if the caller sets none.
CALL_SECONDS_MAX = 300.0


class TargetKeywords(TypedDict, total=False):
    """The objects: the fields of `Target`."""

    namespace: str
    name: str
    label_selector: str
    field_selector: str
    group: str
    version: str


class _ReadKeywords(TypedDict, total=False):
    resource_version: str
    projection: Projection


class ListKeywords(TargetKeywords, _ReadKeywords, total=False):
    """The objects, and the options of the list."""

    timeout: float


class GetKeywords(_ReadKeywords, total=False):
    """The group and version of an object, and the options of the read."""

    group: str
    version: str
    timeout: float


class WatchKeywords(TargetKeywords, _ReadKeywords, total=False):
    """The objects, and the options of the watch: the fields of `Target` and of `WatchOptions`."""

    cluster: str
    timeout: Optional[float]
    bookmark_interval: Optional[float]
    only_changes: bool
    encoding: AnyEncoding
    on_lag: AnyOnLag
    on_expired: AnyOnExpired
    fallback: AnyFallback
    delta_base_bytes_max: int
    backoff: BackoffOptions


_TARGET = {made.name for made in fields(Target)}


def split(resource: str, keywords: dict[str, Any]) -> tuple[Target, dict[str, Any]]:
    """The target, and the keywords that are not of it."""
    target = {name: value for name, value in keywords.items() if name in _TARGET}
    rest = {name: value for name, value in keywords.items() if name not in _TARGET}
    return Target(resource, **target), rest


def watch_options(resource: str, keywords: dict[str, Any]) -> tuple[Target, WatchOptions]:
    """The target and the options of a watch. A version that the caller gave expires by default.

    Only the caller knows its objects at that version, so only it can tell which of them are gone.
    """
    target, rest = split(resource, keywords)
    if rest.get("resource_version"):
        rest.setdefault("on_expired", OnExpired.FAIL)
    return target, WatchOptions(**rest)


def list_request(resource: str, keywords: dict[str, Any]) -> tuple[api.ListRequest, float]:
    """The request of a list, and its limit in seconds."""
    target, rest = split(resource, keywords)
    seconds = _seconds_max(rest)
    version, _ = sent(rest.pop("resource_version", ""))
    request = api.ListRequest(target=target.message(), resource_version=version)
    _project(request, rest)
    return request, seconds


def get_request(
    resource: str, name: str, namespace: str, keywords: dict[str, Any]
) -> tuple[api.GetRequest, float]:
    """The request of one object, and its limit in seconds."""
    target, rest = split(resource, {**keywords, "name": name, "namespace": namespace})
    seconds = _seconds_max(rest)
    version, _ = sent(rest.pop("resource_version", ""))
    request = api.GetRequest(target=target.message(), resource_version=version)
    _project(request, rest)
    return request, seconds


def read_options(resource: str, keywords: dict[str, Any]) -> tuple[Target, Projection]:
    """The target and the projection of a list or a get."""
    target, rest = split(resource, keywords)
    return target, rest.get("projection", Projection())


def list_of_apiserver(version: str, resource: Resource, objects: list[Object]) -> ObjectList:
    """A list of the apiserver, which has all events of its version."""
    return ObjectList(received(version, True), objects, "", resource)


def _seconds_max(rest: dict[str, Any]) -> float:
    seconds: float = rest.pop("timeout", CALL_SECONDS_MAX)
    check_seconds("timeout", seconds)
    return seconds


def _project(request: Any, rest: dict[str, Any]) -> None:
    projection: Projection = rest.pop("projection", Projection())
    check_projection(projection)
    if rest:
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(rest))}")
    if projection.leaves_out():
        request.projection.CopyFrom(projection.message())


@dataclass(frozen=True)
class ObjectList:
    """A complete list, at one version.

    Attributes:
        resource_version: The version. A watch may start from it. See `Event.resume_version`.
        objects: The objects in key order: namespace, then name.
        cluster: The cluster of the version, for `watch(cluster=…)`; empty if it is unknown.
        resource: The resource as kubefan resolved it.
    """

    resource_version: str = ""
    objects: list[Object] = field(default_factory=list)
    cluster: str = ""
    resource: Optional[Resource] = None

    def __iter__(self) -> Iterator[Object]:
        return iter(self.objects)

    def __len__(self) -> int:
        return len(self.objects)


class ListReader:
    """Puts a list together from its chunks."""

    def __init__(self) -> None:
        self._objects: list[Object] = []
        self._version = ""
        self._cluster = ""
        self._resource: Optional[Resource] = None

    def accept(self, chunk: api.ListResponse) -> None:
        """Adds a chunk. Only the first one has the resource and the cluster."""
        if not self._version:
            self._cluster = chunk.cluster
        self._version = received(chunk.resource_version, chunk.version_is_complete)
        if chunk.HasField("resource"):
            self._resource = resource_of(chunk.resource)
        self._objects += [object_of(made) for made in chunk.objects]

    def result(self) -> Optional[ObjectList]:
        """The list; None if the server sent no version."""
        if not self._version:
            return None
        return ObjectList(self._version, self._objects, self._cluster, self._resource)


@dataclass(frozen=True)
class ResourceStatus:
    """The state of one cache.

    Attributes:
        name: The name by which it was requested, such as `pods`.
        state: `SYNCING`, `SYNCED`, `STALE`, `NOT_FOUND` or `FORBIDDEN`.
        namespace: The namespace of this cache; empty for the whole cluster.
        message: Why it does not serve, or the last upstream error.
        resource_version: The version of the cache.
        oldest_resource_version: The oldest version that a watch can resume from.
        object_count: The number of objects.
        object_bytes: Their size as JSON.
        subscribers: The streams that watch it now.
        on_demand: Whether a client's request started the cache.
        resource: The full name; None while it is not known.
    """

    name: str
    state: str
    namespace: str
    message: str
    resource_version: str
    oldest_resource_version: str
    object_count: int
    object_bytes: int
    subscribers: int
    on_demand: bool
    resource: Optional[Resource]


#: The state of each cache, ordered by name.
Statuses = list[ResourceStatus]


def statuses_of(response: api.ListResourcesResponse) -> Statuses:
    """The states of the caches, ordered by name."""
    return [
        ResourceStatus(
            name=status.name,
            state=api.ResourceState.Name(status.state).replace("RESOURCE_STATE_", ""),
            namespace=status.namespace,
            message=status.message,
            resource_version=status.resource_version,
            oldest_resource_version=status.oldest_resource_version,
            object_count=status.object_count,
            object_bytes=status.object_bytes,
            subscribers=status.subscribers,
            on_demand=status.on_demand,
            resource=resource_of(status.resource) if status.HasField("resource") else None,
        )
        for status in response.resources
    ]


def object_of(made: api.Object) -> Object:
    """An object of a list or a get."""
    return Object(made.namespace, made.name, made.uid, made.resource_version, made.object)
