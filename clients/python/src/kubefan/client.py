"""The client for ordinary programs: calls and iterators that block."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

import grpc

from . import _keywords as messages
from ._changes import Changes
from ._connection import Connection
from ._endpoint import ClientOptions, Endpoint, endpoint
from ._in_cluster import in_cluster_options
from ._keywords import ObjectList, Statuses
from ._watch_state import WatchState
from .errors import KubefanError, ProtocolError, Unauthenticated, Unreachable, from_call, from_rpc
from .items import Disconnected, Event, WatchItem
from .objects import Object
from .options import Target, WatchOptions, check_seconds
from .reasons import ErrorReason
from .v1alpha1 import watch_pb2 as api

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._in_cluster import ClientKeywords
    from ._keywords import GetKeywords, ListKeywords, WatchKeywords
    from .informer import Informer

_T = TypeVar("_T")


class Client:
    """A client of one kubefan. Threads may share it, and all its calls share one connection.

    It connects with the first call, and again whenever the connection broke. Use it as a context
    manager, or call `close`.
    """

    def __init__(self, address: str, options: Optional[ClientOptions] = None) -> None:
        """Makes a client that connects with its first call: a watch waits for the server.

        `address` is `host:port`, `https://host:port`, `dns:host:port` or `unix:/path`. Raises
        `InvalidAddress`.
        """
        self._options = options or ClientOptions()
        self._endpoint = endpoint(address, self._options)
        self.address = address
        self._connection = Connection(_channel(self._endpoint))
        self._channel = self._connection.channel

    @classmethod
    def connect(cls, address: str, options: Optional[ClientOptions] = None) -> Self:
        """Connects now. Raises `Unreachable` or `ProtocolError` if kubefan is not there."""
        client = cls(address, options)
        try:
            client._call(client._ask_resources, client._options.connect_timeout)
        except (Unreachable, ProtocolError):
            client.close()
            raise
        except KubefanError:
            pass  # It is there. Not every caller may list its caches.
        return client

    @classmethod
    def in_cluster(cls, address: str = "", **options: Unpack[ClientKeywords]) -> Self:
        """A client for a pod: kubefan's Service, with the token of the pod's service account.

        `options` are those of `ClientOptions`. docs/attach.md shows how a pod gets kubefan's CA.
        """
        return cls(*in_cluster_options(address, dict(options)))

    def list(self, resource: str, **keywords: Unpack[ListKeywords]) -> ObjectList:
        """Lists objects, at one version and in key order.

        Keywords: those of `Target`, `resource_version` (the state is not older), `projection`, and
        `timeout`: after this many seconds without the complete answer, 300 by default, it raises
        `Unreachable` with the code `DEADLINE_EXCEEDED`.
        """
        request, limit = messages.list_request(resource, dict(keywords))

        def ask(metadata: Metadata, seconds: float) -> ObjectList:
            reader = messages.ListReader()
            call = self._channel.unary_stream(
                messages.LIST,
                request_serializer=api.ListRequest.SerializeToString,
                response_deserializer=api.ListResponse.FromString,
            )
            for chunk in call(request, metadata=metadata, timeout=seconds):
                reader.accept(chunk)
            found = reader.result()
            if found is None:
                raise ProtocolError(
                    f"{self.address} does not speak kubefan's protocol: "
                    "a list without a resource version"
                )
            return found

        return self._call(ask, limit)

    def get(
        self, resource: str, name: str, namespace: str = "", **keywords: Unpack[GetKeywords]
    ) -> Object:
        """Gets one object. Raises `NotFound`.

        Keywords: `group`, `version`, and as for `list` `resource_version`, `projection`, `timeout`.
        """
        request, limit = messages.get_request(resource, name, namespace, dict(keywords))

        def ask(metadata: Metadata, seconds: float) -> Object:
            call = self._channel.unary_unary(
                messages.GET,
                request_serializer=api.GetRequest.SerializeToString,
                response_deserializer=api.GetResponse.FromString,
            )
            response: api.GetResponse = call(request, metadata=metadata, timeout=seconds)
            return messages.object_of(response.object)

        return self._call(ask, limit)

    def list_resources(self, timeout: float = messages.CALL_SECONDS_MAX) -> Statuses:
        """The state of each cache, ordered by name. `timeout` as for `list`."""
        check_seconds("timeout", timeout)
        return self._call(self._ask_resources, timeout)

    def watch(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchStream:
        """Watches objects: first those that exist, as ADDED, then every change.

        The stream resumes by itself after a break. If it has to start over, it only has the
        changes, with DELETED events for objects that are gone. Keywords: those of `Target` and
        `WatchOptions`. With a `resource_version`, `on_expired` is `OnExpired.FAIL` by default.
        """
        return WatchStream(self.watch_items(resource, **keywords))

    def watch_items(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchItems:
        """Like `watch`, with everything that the server and the connection report.

        Snapshots, gaps and catch-ups have marks; the caller applies them as units.
        """
        target, options = messages.watch_options(resource, dict(keywords))
        return WatchItems(self, target, options)

    def informer(self, resource: str, **keywords: Unpack[WatchKeywords]) -> Informer:
        """An informer: a store that is kept equal to the server's state, and handlers.

        Keywords as for `watch`; with a projection, `only_changes` is true by default.
        """
        from .informer import Informer

        return Informer(self, resource, dict(keywords))

    def close(self) -> None:
        """Closes the connection, and ends all its calls. Takes up to 0.4 s during an outage."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    def _ask_resources(self, metadata: Metadata, seconds: float) -> Statuses:
        call = self._channel.unary_unary(
            messages.LIST_RESOURCES,
            request_serializer=api.ListResourcesRequest.SerializeToString,
            response_deserializer=api.ListResourcesResponse.FromString,
        )
        response: api.ListResourcesResponse = call(
            api.ListResourcesRequest(), metadata=metadata, timeout=seconds
        )
        return messages.statuses_of(response)

    def _call(self, ask: Callable[[Metadata, float], _T], seconds: float) -> _T:
        """Asks with the token; once more if kubefan refuses it and the file has another."""
        end = time.monotonic() + seconds
        for attempt in (1, 2):
            sent = self._authorization()
            try:
                return ask(metadata_of(sent), max(0.0, end - time.monotonic()))
            except grpc.RpcError as failed:
                error = from_call(failed, self.address, seconds)
                refused = isinstance(error, Unauthenticated)
                if not refused or attempt == 2 or not self._endpoint.token.replacement(sent):
                    raise error from None
        raise AssertionError("unreachable")

    def _authorization(self) -> Optional[str]:
        try:
            return self._endpoint.token.header()
        except (OSError, ValueError) as error:
            raise Unreachable(f"cannot reach kubefan at {self.address}: {error}") from None


Metadata = Optional[tuple[tuple[str, str], ...]]


def metadata_of(authorization: Optional[str]) -> Metadata:
    """The metadata of a call with this token."""
    return None if authorization is None else (("authorization", authorization),)


def _channel(made: Endpoint) -> grpc.Channel:
    if made.credentials is None:
        return grpc.insecure_channel(made.target, options=made.settings)
    return grpc.secure_channel(made.target, made.credentials, options=made.settings)


class WatchItems(Iterator[WatchItem]):
    """A running watch. One thread reads it, any thread may `close` it.

    Attributes:
        resume_version: Every item at or below this version has been returned. Empty until the first
            snapshot is complete.
    """

    def __init__(self, client: Client, target: Target, options: WatchOptions) -> None:
        self._client = client
        self._token = client._endpoint.token
        self._state = WatchState(target, options, client.address)
        self._ready: deque[WatchItem] = deque()
        self._call: Any = None
        self._sent: Optional[str] = None
        self._closed = threading.Event()
        self.resume_version = options.resource_version
        self._method = client._channel.unary_stream(
            messages.WATCH,
            request_serializer=api.WatchRequest.SerializeToString,
            response_deserializer=api.WatchResponse.FromString,
        )

    @property
    def cluster(self) -> str:
        """The cluster of `resume_version`, for `watch(cluster=…)`; empty if it is unknown."""
        return self._state.cluster

    def __next__(self) -> WatchItem:
        """The next item. Raises StopIteration after the timeout or `close`.

        Raises an error that a retry cannot fix, such as `Forbidden`; then the watch has ended.
        """
        while not self._ready:
            if self._closed.is_set() or self._state.ended:
                self._client._connection.ignore(self._listener)
                raise StopIteration
            self._ready.extend(self._step())
        item = self._ready.popleft()
        self.resume_version = item.resume_version or self.resume_version
        return item

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        self._client._connection.ignore(self._listener)
        call = self._call
        if call is not None:
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def _step(self) -> list[WatchItem]:
        try:
            if self._call is None:
                return self._open()
            message = next(self._call)
        except StopIteration:
            self._call = None
            return self._state.finished(time.monotonic())
        except grpc.RpcError as failed:
            return self._failed(from_rpc(failed, self._client.address))
        except ValueError:
            # The channel was closed.
            self._closed.set()
            return []
        items = self._state.accept(message, time.monotonic())
        if items and isinstance(items[-1], Disconnected):
            self._call.cancel()
            self._call = None
        return items

    def _open(self) -> list[WatchItem]:
        if self._closed.wait(self._state.delay(time.monotonic())):
            return []
        now = time.monotonic()
        request = self._state.request(now)
        if request is None:
            return []
        try:
            self._sent = self._client._authorization()
        except KubefanError as error:
            return self._failed(error)
        call = self._method(
            request, metadata=metadata_of(self._sent), timeout=self._state.call_seconds(now)
        )
        self._call = call
        if self._closed.is_set():
            call.cancel()
        call.initial_metadata()
        # A call that was refused is already over, and its error comes with the next step.
        if not call.is_active():
            return []
        self._client._connection.ignore(self._listener)
        return self._state.opened(time.monotonic())

    def _failed(self, error: KubefanError) -> list[WatchItem]:
        self._call = None
        if self._closed.is_set():
            return []
        if isinstance(error, Unauthenticated):
            if not self._state.is_open and self._token.replacement(self._sent):
                return []
            self._token.expire(self._sent)
        elif error.reason == ErrorReason.REAUTHENTICATE:
            self._token.expire(self._sent)
        try:
            items = self._state.failed(error, time.monotonic(), self._token.may_change)
        except KubefanError:
            self._client._connection.ignore(self._listener)
            raise
        if isinstance(error, Unreachable):
            self._client._connection.attend(self._listener)
        else:
            self._client._connection.ignore(self._listener)
        # `close` may have come in between, when there was no listener yet.
        if self._closed.is_set():
            self._client._connection.ignore(self._listener)
        return items

    def _listener(self, _: grpc.ChannelConnectivity) -> None:
        """The state of the connection shows in the next call."""


class WatchStream(Iterator[Event]):
    """The events of a watch. One thread reads it, any thread may `close` it.

    Attributes:
        resume_version: Every event at or below this version has been returned.
    """

    def __init__(self, items: WatchItems) -> None:
        self._items = items
        self._changes = Changes()
        self._ready: deque[Event] = deque()
        self.resume_version = items.resume_version

    @property
    def cluster(self) -> str:
        """The cluster of `resume_version`, for `watch(cluster=…)`; empty if it is unknown."""
        return self._items.cluster

    def __next__(self) -> Event:
        """The next event. Raises StopIteration after the timeout or `close`, and errors."""
        while not self._ready:
            item = next(self._items)
            self._ready.extend(self._changes.accept(item))
            if not self._ready:
                self.resume_version = item.resume_version or self.resume_version
        event = self._ready.popleft()
        self.resume_version = event.resume_version or self.resume_version
        return event

    def close(self) -> None:
        """Ends the watch."""
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()
