"""Decodes snapshot chunks and deltas, and keeps the bytes that the next deltas apply to.

The hazard is a base that differs from the server's: it would produce wrong bytes. So each delta has
a checksum of its base, and after any mismatch the whole base is discarded.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any, Optional

import zstandard
from google.protobuf import proto  # type: ignore[attr-defined]  # The stubs lack it.
from google.protobuf.message import DecodeError

from .v1alpha1 import watch_pb2 as api

#: The largest content of a snapshot chunk, in bytes.
CHUNK_BYTES_MAX = 64 << 20
#: The largest object that a delta may produce, in bytes.
OBJECT_BYTES_MAX = 64 << 20
#: Approximate memory of an entry besides the object's bytes and its key, in bytes.
_ENTRY_BYTES = 200


class DeltaError(Exception):
    """A message cannot be decoded."""


class WrongBaseError(DeltaError):
    """A delta does not apply to the bytes that the client has."""


class OverLimitError(DeltaError):
    """The base was dropped because of its memory limit, so no delta can be applied."""


def _decompress(frame: bytes, bytes_max: int, **options: Any) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= bytes_max:
            raise DeltaError(f"a compressed frame of {size} bytes; the limit is {bytes_max}")
        decompressor = zstandard.ZstdDecompressor(**options)
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a broken compressed frame: {error}") from None


def decode_chunk(chunk: bytes) -> Iterator[api.Event]:
    """The events of a `SnapshotChunk`. Raises `DeltaError`."""
    content = io.BytesIO(_decompress(chunk, CHUNK_BYTES_MAX))
    try:
        while True:
            event = proto.parse_length_prefixed(api.Event, content)
            if event is None:
                return
            yield event
    except DecodeError as error:
        raise DeltaError(f"a broken event in a chunk: {error}") from None


def decode_delta(held: bytes, delta: api.ObjectDelta) -> bytes:
    """Applies a delta to the previous bytes of the object. Raises `DeltaError`."""
    if zlib.crc32(held) != delta.base_crc32:
        raise WrongBaseError("a delta does not fit the previous state of its object")
    base = zstandard.ZstdCompressionDict(held, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return _decompress(delta.zstd, OBJECT_BYTES_MAX, dict_data=base)


class DeltaBase:
    """The bytes of every object of a watch, up to a limit in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._objects: dict[tuple[str, str], bytes] = {}
        self._bytes = 0
        self._over_limit = False
        #: Whether every object of the watch is here.
        self.complete = False

    def clear(self) -> None:
        """Discards all objects, as at the start of a snapshot."""
        self.__init__(self._bytes_max)  # type: ignore[misc]

    def end_snapshot(self) -> None:
        """Every object has been received: the base is complete, unless it exceeded the limit."""
        self.complete = not self._over_limit

    def resolve(self, event: api.Event) -> bytes:
        """The whole object of an event, which becomes the next base. Raises `DeltaError`."""
        key = (event.namespace, event.name)
        raw = event.object
        if event.HasField("delta"):
            if self._over_limit:
                raise OverLimitError(
                    f"the objects exceed {self._bytes_max} bytes, the limit of "
                    "delta_base_bytes_max; continuing without deltas"
                )
            held = self._objects.get(key)
            if held is None:
                raise WrongBaseError("a delta arrived for an object without a previous state")
            raw = decode_delta(held, event.delta)
        self._store(key, None if event.type == api.EVENT_TYPE_DELETED else raw)
        return raw

    def _store(self, key: tuple[str, str], raw: Optional[bytes]) -> None:
        entry_bytes = len(key[0]) + len(key[1]) + _ENTRY_BYTES
        before = self._objects.pop(key, None)
        if before is not None:
            self._bytes -= len(before) + entry_bytes
        if raw is None or self._over_limit:
            return
        self._bytes += len(raw) + entry_bytes
        self._objects[key] = raw
        if self._bytes > self._bytes_max:
            self.clear()
            self._over_limit = True
