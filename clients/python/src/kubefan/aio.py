"""The client for asyncio: the same names as in `kubefan`, with `await` and `async for`."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Callable, Optional, TypeVar

import grpc
import grpc.aio

from . import _keywords as messages
from ._aio_watch import WatchItems, WatchStream
from ._context import AsyncContextManager
from ._endpoint import ClientOptions, Endpoint, endpoint
from ._in_cluster import in_cluster_options
from ._keywords import ObjectList, Statuses
from ._token import Metadata, metadata_of
from .aio_informer import Informer
from .errors import KubefanError, ProtocolError, Unauthenticated, Unreachable, from_call
from .objects import Object
from .options import check_seconds
from .v1alpha1 import watch_pb2 as api

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._in_cluster import ClientKeywords
    from ._keywords import GetKeywords, ListKeywords, WatchKeywords

__all__ = ["Client", "WatchItems", "WatchStream"]

_T = TypeVar("_T")


class Client(AsyncContextManager):
    """A client of one kubefan, for one event loop. All its calls share one connection."""

    def __init__(self, address: str, options: Optional[ClientOptions] = None) -> None:
        """Makes a client that connects with its first call. As `kubefan.Client`."""
        self._options = options or ClientOptions()
        self._endpoint = endpoint(address, self._options)
        self.address = address
        self._channel = _channel(self._endpoint)

    @classmethod
    async def connect(cls, address: str, options: Optional[ClientOptions] = None) -> Self:
        """Connects now. Raises `Unreachable` or `ProtocolError` if kubefan is not there."""
        client = cls(address, options)
        try:
            await client._call(client._ask_resources, client._options.connect_timeout)
        except (Unreachable, ProtocolError):
            await client.close()
            raise
        except KubefanError:
            pass  # It is there. Not every caller may list its caches.
        return client

    @classmethod
    def in_cluster(cls, address: str = "", **options: Unpack[ClientKeywords]) -> Self:
        """A client for a pod: kubefan's Service, with the token of the pod's service account."""
        return cls(*in_cluster_options(address, dict(options)))

    async def list(self, resource: str, **keywords: Unpack[ListKeywords]) -> ObjectList:
        """Lists objects, at one version and in key order. As `kubefan.Client.list`."""
        request, limit = messages.list_request(resource, dict(keywords))

        async def ask(metadata: Metadata, seconds: float) -> ObjectList:
            reader = messages.ListReader()
            call = self._channel.unary_stream(
                messages.LIST,
                request_serializer=api.ListRequest.SerializeToString,
                response_deserializer=api.ListResponse.FromString,
            )
            async for chunk in call(request, metadata=metadata, timeout=seconds):
                reader.accept(chunk)
            found = reader.result()
            if found is None:
                raise ProtocolError(
                    f"{self.address} does not speak kubefan's protocol: "
                    "a list without a resource version"
                )
            return found

        return await self._call(ask, limit)

    async def get(
        self, resource: str, name: str, namespace: str = "", **keywords: Unpack[GetKeywords]
    ) -> Object:
        """Gets one object. Raises `NotFound`.

        Keywords: `group`, `version`, and as for `list` `resource_version`, `projection`, `timeout`.
        """
        request, limit = messages.get_request(resource, name, namespace, dict(keywords))

        async def ask(metadata: Metadata, seconds: float) -> Object:
            call = self._channel.unary_unary(
                messages.GET,
                request_serializer=api.GetRequest.SerializeToString,
                response_deserializer=api.GetResponse.FromString,
            )
            response: api.GetResponse = await call(request, metadata=metadata, timeout=seconds)
            return messages.object_of(response.object)

        return await self._call(ask, limit)

    async def list_resources(self, timeout: float = messages.CALL_SECONDS_MAX) -> Statuses:
        """The state of each cache, ordered by name. `timeout` as for `list`."""
        check_seconds("timeout", timeout)
        return await self._call(self._ask_resources, timeout)

    def watch(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchStream:
        """Watches objects. As `kubefan.Client.watch`, for `async for`."""
        return WatchStream(self.watch_items(resource, **keywords))

    def watch_items(self, resource: str, **keywords: Unpack[WatchKeywords]) -> WatchItems:
        """As `watch`, with everything that the server and the connection say."""
        target, options = messages.watch_options(resource, dict(keywords))
        return WatchItems(self._channel, self._endpoint, target, options)

    def informer(self, resource: str, **keywords: Unpack[WatchKeywords]) -> Informer:
        """An informer: a store that is kept equal to the server's state, and handlers."""
        return Informer(self._channel, self._endpoint, resource, dict(keywords))

    async def close(self) -> None:
        """Closes the connection, and ends all its calls."""
        await self._channel.close()

    async def _exit(self) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    async def _ask_resources(self, metadata: Metadata, seconds: float) -> Statuses:
        call = self._channel.unary_unary(
            messages.LIST_RESOURCES,
            request_serializer=api.ListResourcesRequest.SerializeToString,
            response_deserializer=api.ListResourcesResponse.FromString,
        )
        response: api.ListResourcesResponse = await call(
            api.ListResourcesRequest(), metadata=metadata, timeout=seconds
        )
        return messages.statuses_of(response)

    async def _call(self, ask: Callable[[Metadata, float], Awaitable[_T]], seconds: float) -> _T:
        """Asks with the token; once more if kubefan refuses it and the file has another."""
        end = time.monotonic() + seconds
        for attempt in (1, 2):
            sent = self._endpoint.authorization()
            try:
                return await ask(metadata_of(sent), max(0.0, end - time.monotonic()))
            except grpc.RpcError as failed:
                error = from_call(failed, self.address, seconds)
                refused = isinstance(error, Unauthenticated)
                if not refused or attempt == 2 or not self._endpoint.token.replacement(sent):
                    raise error from None
        raise AssertionError("unreachable")


def _channel(made: Endpoint) -> grpc.aio.Channel:
    if made.credentials is None:
        return grpc.aio.insecure_channel(made.target, options=made.settings)
    return grpc.aio.secure_channel(made.target, made.credentials, options=made.settings)
