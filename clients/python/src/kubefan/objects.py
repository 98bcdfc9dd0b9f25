"""Objects, and the kinds of their changes.

An object keeps the JSON text that it arrived with, a tenth of the size of dicts, and decodes it
when it is read. The hazard is a store of which every object has been read once: so only the last
`DECODED_MAX` objects keep their decoded form.
"""

from __future__ import annotations

import enum
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Optional

#: Objects of this process that keep their decoded form. The others decode again when they are read.
DECODED_MAX = 256


class EventType(str, enum.Enum):
    """The kind of a change. Equal to its name: `event.type == "ADDED"`."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"

    def __str__(self) -> str:
        return self.value


class DeleteReason(str, enum.Enum):
    """The reason why an object is no longer part of a watch."""

    #: It was deleted.
    OBJECT_DELETED = "OBJECT_DELETED"
    #: It exists, but no longer matches the selector.
    LEFT_SELECTOR = "LEFT_SELECTOR"
    #: It existed before and does not exist now. Its final state was missed.
    FINAL_STATE_UNKNOWN = "FINAL_STATE_UNKNOWN"

    def __str__(self) -> str:
        return self.value


class Object(Mapping[str, Any]):
    """One Kubernetes object: a read-only mapping, like its JSON form.

    Two objects are equal if their key, uid, version and JSON text are. Do not change what is read
    from it; `to_dict` returns a copy that may be changed.

    Attributes:
        key: `namespace/name`, or the name of an object without a namespace.
        uid: `metadata.uid`.
        resource_version: The version of the object, or of the change that it came with.
        raw: The object as JSON text, exactly as it was sent.
    """

    __slots__ = ("_decoded", "key", "raw", "resource_version", "uid")

    key: str
    uid: str
    resource_version: str
    raw: bytes
    _decoded: Optional[dict[str, Any]]

    def __init__(
        self, namespace: str, name: str, uid: str, resource_version: str, raw: bytes
    ) -> None:
        self.key = f"{namespace}/{name}" if namespace else name
        self.uid = uid
        self.resource_version = resource_version
        self.raw = raw
        self._decoded = None

    @property
    def namespace(self) -> str:
        """The namespace; empty for cluster-scoped objects."""
        return sys.intern(self.key.rpartition("/")[0])

    @property
    def name(self) -> str:
        """The name."""
        return self.key.rpartition("/")[2]

    @property
    def labels(self) -> Mapping[str, str]:
        """`metadata.labels`; empty if there are none."""
        labels: Mapping[str, str] = (self.get("metadata") or {}).get("labels") or {}
        return labels

    def to_dict(self) -> dict[str, Any]:
        """A copy as a dict, which the caller may change."""
        value = json.loads(self.raw) if self.raw else {}
        return value if isinstance(value, dict) else {}

    def _value(self) -> dict[str, Any]:
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = self.to_dict()
            _last_decoded.append(self)
            while len(_last_decoded) > DECODED_MAX:
                try:
                    _last_decoded.popleft()._decoded = None
                except IndexError:  # Another thread was faster.
                    break
        return decoded

    def __getitem__(self, field: str) -> Any:
        return self._value()[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._value())

    def __len__(self) -> int:
        return len(self._value())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Object):
            return NotImplemented
        return (self.key, self.uid, self.resource_version, self.raw) == (
            other.key,
            other.uid,
            other.resource_version,
            other.raw,
        )

    def __hash__(self) -> int:
        return hash((self.key, self.uid, self.resource_version))

    def __repr__(self) -> str:
        return f"<Object {self.key} at {self.resource_version}>"


_last_decoded: deque[Object] = deque()
