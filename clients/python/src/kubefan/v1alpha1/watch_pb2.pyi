from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnLag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_LAG_UNSPECIFIED: _ClassVar[OnLag]
    ON_LAG_EXPIRE: _ClassVar[OnLag]
    ON_LAG_CONFLATE: _ClassVar[OnLag]

class OnExpired(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_EXPIRED_UNSPECIFIED: _ClassVar[OnExpired]
    ON_EXPIRED_FAIL: _ClassVar[OnExpired]
    ON_EXPIRED_RESTART: _ClassVar[OnExpired]

class ProjectionType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROJECTION_TYPE_UNSPECIFIED: _ClassVar[ProjectionType]
    PROJECTION_TYPE_FULL: _ClassVar[ProjectionType]
    PROJECTION_TYPE_METADATA: _ClassVar[ProjectionType]
    PROJECTION_TYPE_FIELD_MASK: _ClassVar[ProjectionType]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_JSON: _ClassVar[Encoding]
    ENCODING_ZSTD: _ClassVar[Encoding]
    ENCODING_ZSTD_DELTA: _ClassVar[Encoding]
    ENCODING_PROTOBUF: _ClassVar[Encoding]

class EventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_TYPE_UNSPECIFIED: _ClassVar[EventType]
    EVENT_TYPE_ADDED: _ClassVar[EventType]
    EVENT_TYPE_MODIFIED: _ClassVar[EventType]
    EVENT_TYPE_DELETED: _ClassVar[EventType]

class DeleteReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELETE_REASON_UNSPECIFIED: _ClassVar[DeleteReason]
    DELETE_REASON_OBJECT_DELETED: _ClassVar[DeleteReason]
    DELETE_REASON_LEFT_SELECTOR: _ClassVar[DeleteReason]
    DELETE_REASON_FINAL_STATE_UNKNOWN: _ClassVar[DeleteReason]

class ResourceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESOURCE_STATE_UNSPECIFIED: _ClassVar[ResourceState]
    RESOURCE_STATE_SYNCING: _ClassVar[ResourceState]
    RESOURCE_STATE_SYNCED: _ClassVar[ResourceState]
    RESOURCE_STATE_STALE: _ClassVar[ResourceState]
    RESOURCE_STATE_NOT_FOUND: _ClassVar[ResourceState]
    RESOURCE_STATE_FORBIDDEN: _ClassVar[ResourceState]
ON_LAG_UNSPECIFIED: OnLag
ON_LAG_EXPIRE: OnLag
ON_LAG_CONFLATE: OnLag
ON_EXPIRED_UNSPECIFIED: OnExpired
ON_EXPIRED_FAIL: OnExpired
ON_EXPIRED_RESTART: OnExpired
PROJECTION_TYPE_UNSPECIFIED: ProjectionType
PROJECTION_TYPE_FULL: ProjectionType
PROJECTION_TYPE_METADATA: ProjectionType
PROJECTION_TYPE_FIELD_MASK: ProjectionType
ENCODING_UNSPECIFIED: Encoding
ENCODING_JSON: Encoding
ENCODING_ZSTD: Encoding
ENCODING_ZSTD_DELTA: Encoding
ENCODING_PROTOBUF: Encoding
EVENT_TYPE_UNSPECIFIED: EventType
EVENT_TYPE_ADDED: EventType
EVENT_TYPE_MODIFIED: EventType
EVENT_TYPE_DELETED: EventType
DELETE_REASON_UNSPECIFIED: DeleteReason
DELETE_REASON_OBJECT_DELETED: DeleteReason
DELETE_REASON_LEFT_SELECTOR: DeleteReason
DELETE_REASON_FINAL_STATE_UNKNOWN: DeleteReason
RESOURCE_STATE_UNSPECIFIED: ResourceState
RESOURCE_STATE_SYNCING: ResourceState
RESOURCE_STATE_SYNCED: ResourceState
RESOURCE_STATE_STALE: ResourceState
RESOURCE_STATE_NOT_FOUND: ResourceState
RESOURCE_STATE_FORBIDDEN: ResourceState

class Target(_message.Message):
    __slots__ = ("group", "version", "resource", "namespace", "name", "label_selector", "field_selector")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    FIELD_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    group: str
    version: str
    resource: str
    namespace: str
    name: str
    label_selector: str
    field_selector: str
    def __init__(self, group: _Optional[str] = ..., version: _Optional[str] = ..., resource: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., label_selector: _Optional[str] = ..., field_selector: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("target", "resource_version", "timeout_seconds", "bookmark_interval", "projection", "encoding", "state_kept", "on_lag", "on_expired", "cluster", "version_is_complete")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    STATE_KEPT_FIELD_NUMBER: _ClassVar[int]
    ON_LAG_FIELD_NUMBER: _ClassVar[int]
    ON_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    target: Target
    resource_version: str
    timeout_seconds: int
    bookmark_interval: _duration_pb2.Duration
    projection: Projection
    encoding: Encoding
    state_kept: bool
    on_lag: OnLag
    on_expired: OnExpired
    cluster: str
    version_is_complete: bool
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., resource_version: _Optional[str] = ..., timeout_seconds: _Optional[int] = ..., bookmark_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., projection: _Optional[_Union[Projection, _Mapping]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., state_kept: bool = ..., on_lag: _Optional[_Union[OnLag, str]] = ..., on_expired: _Optional[_Union[OnExpired, str]] = ..., cluster: _Optional[str] = ..., version_is_complete: bool = ...) -> None: ...

class Projection(_message.Message):
    __slots__ = ("type", "paths", "drop_managed_fields", "drop_last_applied", "only_changes")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    DROP_MANAGED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_APPLIED_FIELD_NUMBER: _ClassVar[int]
    ONLY_CHANGES_FIELD_NUMBER: _ClassVar[int]
    type: ProjectionType
    paths: _containers.RepeatedScalarFieldContainer[str]
    drop_managed_fields: bool
    drop_last_applied: bool
    only_changes: bool
    def __init__(self, type: _Optional[_Union[ProjectionType, str]] = ..., paths: _Optional[_Iterable[str]] = ..., drop_managed_fields: bool = ..., drop_last_applied: bool = ..., only_changes: bool = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("resume_version", "version_is_complete", "snapshot_begin", "event", "snapshot_end", "gap_begin", "gap_end", "bookmark", "snapshot_chunk", "catch_up_begin", "catch_up_end")
    RESUME_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    GAP_BEGIN_FIELD_NUMBER: _ClassVar[int]
    GAP_END_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_BEGIN_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_END_FIELD_NUMBER: _ClassVar[int]
    resume_version: str
    version_is_complete: bool
    snapshot_begin: SnapshotBegin
    event: Event
    snapshot_end: SnapshotEnd
    gap_begin: GapBegin
    gap_end: GapEnd
    bookmark: Bookmark
    snapshot_chunk: SnapshotChunk
    catch_up_begin: CatchUpBegin
    catch_up_end: CatchUpEnd
    def __init__(self, resume_version: _Optional[str] = ..., version_is_complete: bool = ..., snapshot_begin: _Optional[_Union[SnapshotBegin, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., gap_begin: _Optional[_Union[GapBegin, _Mapping]] = ..., gap_end: _Optional[_Union[GapEnd, _Mapping]] = ..., bookmark: _Optional[_Union[Bookmark, _Mapping]] = ..., snapshot_chunk: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., catch_up_begin: _Optional[_Union[CatchUpBegin, _Mapping]] = ..., catch_up_end: _Optional[_Union[CatchUpEnd, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("type", "namespace", "name", "uid", "resource_version", "delete_reason", "object", "delta")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DELETE_REASON_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    type: EventType
    namespace: str
    name: str
    uid: str
    resource_version: str
    delete_reason: DeleteReason
    object: bytes
    delta: ObjectDelta
    def __init__(self, type: _Optional[_Union[EventType, str]] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., resource_version: _Optional[str] = ..., delete_reason: _Optional[_Union[DeleteReason, str]] = ..., object: _Optional[bytes] = ..., delta: _Optional[_Union[ObjectDelta, _Mapping]] = ...) -> None: ...

class ObjectDelta(_message.Message):
    __slots__ = ("base_resource_version", "base_crc32", "zstd")
    BASE_RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_CRC32_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    base_resource_version: str
    base_crc32: int
    zstd: bytes
    def __init__(self, base_resource_version: _Optional[str] = ..., base_crc32: _Optional[int] = ..., zstd: _Optional[bytes] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("zstd",)
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    zstd: bytes
    def __init__(self, zstd: _Optional[bytes] = ...) -> None: ...

class SnapshotBegin(_message.Message):
    __slots__ = ("resource_version", "resource", "restarted_from", "cluster")
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_FROM_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    resource_version: str
    resource: ResolvedResource
    restarted_from: str
    cluster: str
    def __init__(self, resource_version: _Optional[str] = ..., resource: _Optional[_Union[ResolvedResource, _Mapping]] = ..., restarted_from: _Optional[str] = ..., cluster: _Optional[str] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("object_count",)
    OBJECT_COUNT_FIELD_NUMBER: _ClassVar[int]
    object_count: int
    def __init__(self, object_count: _Optional[int] = ...) -> None: ...

class GapBegin(_message.Message):
    __slots__ = ("resource_version", "reason")
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    resource_version: str
    reason: str
    def __init__(self, resource_version: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GapEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CatchUpBegin(_message.Message):
    __slots__ = ("resource_version",)
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    resource_version: str
    def __init__(self, resource_version: _Optional[str] = ...) -> None: ...

class CatchUpEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bookmark(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResolvedResource(_message.Message):
    __slots__ = ("group", "version", "resource", "kind", "namespaced")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACED_FIELD_NUMBER: _ClassVar[int]
    group: str
    version: str
    resource: str
    kind: str
    namespaced: bool
    def __init__(self, group: _Optional[str] = ..., version: _Optional[str] = ..., resource: _Optional[str] = ..., kind: _Optional[str] = ..., namespaced: bool = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("target", "resource_version", "projection", "encoding")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    target: Target
    resource_version: str
    projection: Projection
    encoding: Encoding
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., resource_version: _Optional[str] = ..., projection: _Optional[_Union[Projection, _Mapping]] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("resource_version", "objects", "resource", "cluster", "version_is_complete")
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    resource_version: str
    objects: _containers.RepeatedCompositeFieldContainer[Object]
    resource: ResolvedResource
    cluster: str
    version_is_complete: bool
    def __init__(self, resource_version: _Optional[str] = ..., objects: _Optional[_Iterable[_Union[Object, _Mapping]]] = ..., resource: _Optional[_Union[ResolvedResource, _Mapping]] = ..., cluster: _Optional[str] = ..., version_is_complete: bool = ...) -> None: ...

class Object(_message.Message):
    __slots__ = ("namespace", "name", "uid", "resource_version", "object")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    resource_version: str
    object: bytes
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., resource_version: _Optional[str] = ..., object: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("target", "resource_version", "projection", "encoding")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    target: Target
    resource_version: str
    projection: Projection
    encoding: Encoding
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., resource_version: _Optional[str] = ..., projection: _Optional[_Union[Projection, _Mapping]] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("object", "resource_version", "resource", "cluster")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    object: Object
    resource_version: str
    resource: ResolvedResource
    cluster: str
    def __init__(self, object: _Optional[_Union[Object, _Mapping]] = ..., resource_version: _Optional[str] = ..., resource: _Optional[_Union[ResolvedResource, _Mapping]] = ..., cluster: _Optional[str] = ...) -> None: ...

class GetFreshnessRequest(_message.Message):
    __slots__ = ("target", "prove")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROVE_FIELD_NUMBER: _ClassVar[int]
    target: Target
    prove: bool
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., prove: bool = ...) -> None: ...

class GetFreshnessResponse(_message.Message):
    __slots__ = ("resource_version", "age", "cluster", "version_is_complete")
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    resource_version: str
    age: _duration_pb2.Duration
    cluster: str
    version_is_complete: bool
    def __init__(self, resource_version: _Optional[str] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., cluster: _Optional[str] = ..., version_is_complete: bool = ...) -> None: ...

class ListResourcesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResourcesResponse(_message.Message):
    __slots__ = ("resources",)
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[ResourceStatus]
    def __init__(self, resources: _Optional[_Iterable[_Union[ResourceStatus, _Mapping]]] = ...) -> None: ...

class ResourceStatus(_message.Message):
    __slots__ = ("name", "resource", "namespace", "state", "message", "resource_version", "oldest_resource_version", "object_count", "object_bytes", "synced_since", "subscribers", "on_demand")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_RESOURCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECT_COUNT_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SYNCED_SINCE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    name: str
    resource: ResolvedResource
    namespace: str
    state: ResourceState
    message: str
    resource_version: str
    oldest_resource_version: str
    object_count: int
    object_bytes: int
    synced_since: _timestamp_pb2.Timestamp
    subscribers: int
    on_demand: bool
    def __init__(self, name: _Optional[str] = ..., resource: _Optional[_Union[ResolvedResource, _Mapping]] = ..., namespace: _Optional[str] = ..., state: _Optional[_Union[ResourceState, str]] = ..., message: _Optional[str] = ..., resource_version: _Optional[str] = ..., oldest_resource_version: _Optional[str] = ..., object_count: _Optional[int] = ..., object_bytes: _Optional[int] = ..., synced_since: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., subscribers: _Optional[int] = ..., on_demand: bool = ...) -> None: ...
