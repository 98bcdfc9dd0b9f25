"""An informer of the asyncio client, with the methods that the runner calls on one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Callable, Optional, TypeVar

from kubefan import ClientOptions, Deleted, Object, aio
from kubefan.aio_informer import Informer

_T = TypeVar("_T")


class AsyncioInformer:
    """Runs on an event loop of its own, in a thread.

    Attributes:
        indexer: The store.
    """

    def __init__(
        self, address: str, options: ClientOptions, resource: str, keywords: dict[str, Any]
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> tuple[aio.Client, Informer]:
            client = await aio.Client.connect(address, options)
            return client, client.informer(resource, **keywords)

        self._client, self._informer = self._run(make())
        self.indexer = self._informer.indexer

    def on_error(self, observer: Callable[[Exception], None]) -> None:
        """As `kubefan.Informer`."""
        self._informer.on_error(observer)

    def add_event_handler(
        self,
        on_add: Callable[[Object, bool], None],
        on_update: Callable[[Object, Object], None],
        on_delete: Callable[[Deleted], None],
    ) -> None:
        """As `kubefan.Informer`, without a registration."""

        async def add() -> None:
            self._informer.add_event_handler(on_add, on_update, on_delete)

        self._run(add())

    def start(self) -> None:
        """As `kubefan.Informer`."""

        async def start() -> None:
            self._informer.start()

        self._run(start())

    def wait_until(self, resource_version: str, timeout: Optional[float] = None) -> bool:
        """As `kubefan.Informer`."""
        return self._run(self._informer.wait_until(resource_version, timeout))

    def stop(self) -> None:
        """Ends the informer, its client and its loop."""
        self._run(self._informer.stop())
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
