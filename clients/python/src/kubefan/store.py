"""The store of an informer, with its indexes. Threads may read it while the informer writes.

A batch of changes takes effect at once: readers see all of it or nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Callable, Optional

from .objects import Object

Objects = list[Object]
Texts = list[str]
IndexFunction = Callable[[Object], Iterable[str]]


class Indexer:
    """Objects by key, by namespace, and by indexes of the program's own.

    The objects are read-only. Each call takes a short lock; the lists that are returned never
    change afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._indexes: dict[str, _Index] = {}
        self._observer: Callable[[Exception], None] = lambda error: None
        self.add_index("namespace", lambda made: (made.namespace,))

    def get(self, key: str) -> Optional[Object]:
        """The object with this key, `namespace/name`; None if there is none."""
        with self._lock:
            return self._objects.get(key)

    def list(self) -> Objects:
        """All objects, in no particular order."""
        with self._lock:
            return list(self._objects.values())

    def keys(self) -> Texts:
        """The keys of all objects."""
        with self._lock:
            return list(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._objects

    def __iter__(self) -> Iterator[Object]:
        return iter(self.list())

    def by_namespace(self, namespace: str) -> Objects:
        """The objects of a namespace."""
        return self.by_index("namespace", namespace)

    def add_index(self, name: str, values: IndexFunction) -> None:
        """Adds an index: `values` returns the values under which an object is found, or none.

        The index has the objects that are stored already. Raises ValueError if the name is taken.
        If `values` raises an error, the object is not in the index, and the observers of the
        informer get the error.
        """
        with self._lock:
            if name in self._indexes:
                raise ValueError(f"there is an index {name!r} already")
            index = self._indexes[name] = _Index(values)
            for key, made in self._objects.items():
                self._index(index, key, made)

    def add_label_index(self, label: str) -> None:
        """Adds an index of the values of a label. Read it with `by_label`."""

        def values(made: Object) -> tuple[str, ...]:
            value = made.labels.get(label)
            return () if value is None else (value,)

        self.add_index(f"label:{label}", values)

    def by_index(self, name: str, value: str) -> Objects:
        """The objects with this value in an index. Raises KeyError for an unknown index."""
        with self._lock:
            keys = self._indexes[name].keys.get(value, ())
            return [self._objects[key] for key in keys]

    def by_label(self, label: str, value: str) -> Objects:
        """The objects with this value of a label. Raises KeyError without `add_label_index`."""
        return self.by_index(f"label:{label}", value)

    def index_values(self, name: str) -> Texts:
        """The values of an index that have objects. Raises KeyError for an unknown index."""
        with self._lock:
            return list(self._indexes[name].keys)

    def _write(self, changes: Iterable[tuple[str, Optional[Object]]]) -> None:
        """Stores or, with None, removes objects, all at once."""
        with self._lock:
            for key, made in changes:
                for index in self._indexes.values():
                    index.remove(key)
                    if made is not None:
                        self._index(index, key, made)
                if made is None:
                    self._objects.pop(key, None)
                else:
                    self._objects[key] = made

    def _index(self, index: _Index, key: str, made: Object) -> None:
        try:
            values = tuple(index.function(made))
        except Exception as error:
            self._observer(error)
            return
        index.insert(key, values)


class _Index:
    def __init__(self, function: IndexFunction) -> None:
        self.function = function
        #: The keys by value, in order of arrival.
        self.keys: dict[str, dict[str, None]] = {}
        self._values: dict[str, tuple[str, ...]] = {}

    def insert(self, key: str, values: tuple[str, ...]) -> None:
        if values:
            self._values[key] = values
        for value in values:
            self.keys.setdefault(value, {})[key] = None

    def remove(self, key: str) -> None:
        for value in self._values.pop(key, ()):
            keys = self.keys.get(value, {})
            keys.pop(key, None)
            if not keys:
                self.keys.pop(value, None)
