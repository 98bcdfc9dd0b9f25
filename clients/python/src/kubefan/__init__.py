"""Watch Kubernetes objects through kubefan: watches that resume by themselves, and informers.

`Client` is for ordinary programs, `kubefan.aio.Client` for asyncio.
"""

from ._endpoint import ClientOptions
from ._fallback import Budget, Side
from ._keywords import ObjectList, ResourceStatus
from ._version import __version__
from .apiserver import Apiserver
from .client import Client, WatchItems, WatchStream
from .errors import (
    Expired,
    Forbidden,
    InvalidAddress,
    InvalidArgument,
    KubefanError,
    LimitReached,
    NotCached,
    NotFound,
    ProtocolError,
    Stopped,
    Unauthenticated,
    Unavailable,
    Undecodable,
    Unreachable,
)
from .handlers import Deleted
from .informer import Informer, Registration
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
from .options import (
    BackoffOptions,
    Encoding,
    Fallback,
    OnExpired,
    OnLag,
    Projection,
    Target,
    WatchOptions,
)
from .reasons import ErrorMetadata, ErrorReason, GapReason
from .store import Indexer

__all__ = [
    "Apiserver",
    "BackoffOptions",
    "Bookmark",
    "Budget",
    "CatchUpBegin",
    "CatchUpEnd",
    "Client",
    "ClientOptions",
    "DeleteReason",
    "Deleted",
    "Disconnected",
    "Encoding",
    "ErrorMetadata",
    "ErrorReason",
    "Event",
    "EventType",
    "Expired",
    "Fallback",
    "Forbidden",
    "GapBegin",
    "GapEnd",
    "GapReason",
    "Indexer",
    "Informer",
    "InvalidAddress",
    "InvalidArgument",
    "KubefanError",
    "LimitReached",
    "NotCached",
    "NotFound",
    "Object",
    "ObjectList",
    "OnExpired",
    "OnLag",
    "Projection",
    "ProtocolError",
    "Reconnected",
    "Registration",
    "Resource",
    "ResourceStatus",
    "Restarted",
    "Side",
    "SnapshotBegin",
    "SnapshotEnd",
    "Stopped",
    "Target",
    "Unauthenticated",
    "Unavailable",
    "Undecodable",
    "Unreachable",
    "WatchItem",
    "WatchItems",
    "WatchOptions",
    "WatchStream",
    "__version__",
]
