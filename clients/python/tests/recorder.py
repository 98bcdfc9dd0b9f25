"""Reads with the sync or the asyncio client in the background, and keeps what arrives."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Callable, Optional, TypeVar

from kubefan import Client, ClientOptions, Deleted, Object, Stopped, aio

#: The limit of each wait, in seconds. It is only reached by a test that fails.
WAIT_SECONDS_MAX = 60.0

KINDS = ("sync", "asyncio")
_T = TypeVar("_T")


class Recorder:
    """Reads a watch, or runs an informer, until it is closed.

    Attributes:
        seen: The items or events of a watch, or the calls of an informer's handler as text.
        errors: The error that ended a watch, or those that an informer reported.
        store: The store of an informer.
    """

    def __init__(
        self,
        kind: str,
        address: str,
        method: str,
        resource: str,
        options: Optional[ClientOptions] = None,
        on_call: Optional[Callable[[str], None]] = None,
        **keywords: Any,
    ) -> None:
        self.seen: list[Any] = []
        self.errors: list[Exception] = []
        self.ended = False
        self.stream: Any = None
        self.store: Any = None
        self._arguments = (address, options, method, resource, keywords)
        self._on_call = on_call
        self._changed = threading.Condition()
        self._close: Callable[[], None] = lambda: None
        target = self._read if kind == "sync" else lambda: asyncio.run(self._read_async())
        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    @property
    def resume_version(self) -> str:
        """The version that the stream has reached."""
        return str(getattr(self.stream, "resume_version", ""))

    @property
    def cluster(self) -> str:
        """The cluster of the stream."""
        return str(getattr(self.stream, "cluster", ""))

    def until(self, condition: Callable[[list[Any]], _T], what: str) -> _T:
        """Waits until a condition on the seen events is true, and returns its value."""
        with self._changed:
            self._changed.wait_for(lambda: condition(self.seen) or self.ended, WAIT_SECONDS_MAX)
            value = condition(self.seen)
            assert value, f"{what}: {self.seen[-20:]} {self.errors[-3:]}"
            return value

    def until_ended(self) -> None:
        """Waits until the watch has ended by itself."""
        self._thread.join(WAIT_SECONDS_MAX)
        assert self.ended, f"the watch has not ended: {self.seen[-20:]}"

    def close(self) -> None:
        """Ends it."""
        self._close()
        self._thread.join(WAIT_SECONDS_MAX)
        assert not self._thread.is_alive()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, item: Any) -> None:
        """Keeps an item."""
        with self._changed:
            self.seen.append(item)
            self._changed.notify_all()

    def _note_error(self, error: Exception) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def _note_end(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _call(self, text: str) -> None:
        if self._on_call is not None:
            self._on_call(text)
        self.note(text)

    def _on_add(self, made: Object, is_in_initial_list: bool) -> None:
        self._call(f"add {made.name}" + (" initial" if is_in_initial_list else ""))

    def _on_update(self, old: Object, new: Object) -> None:
        self._call(f"update {new.name}")

    def _on_delete(self, deleted: Deleted) -> None:
        unknown = " unknown" if deleted.final_state_unknown else ""
        self._call(f"delete {deleted.object.name}{unknown}")

    def _read(self) -> None:
        address, options, method, resource, keywords = self._arguments
        try:
            with Client(address, options) as client:
                self.stream = stream = getattr(client, method)(resource, **keywords)
                if method != "informer":
                    self._close = stream.close
                    for item in stream:
                        self.note(item)
                    return
                self.store = stream.indexer
                stream.on_error(self._note_error)
                stream.add_event_handler(self._on_add, self._on_update, self._on_delete)
                stopped = threading.Event()
                self._close = stopped.set
                with stream:
                    stopped.wait()
        except Exception as error:
            self._note_error(error)
        finally:
            self._note_end()

    async def _read_async(self) -> None:
        address, options, method, resource, keywords = self._arguments
        loop = asyncio.get_running_loop()
        try:
            async with aio.Client(address, options) as client:
                self.stream = stream = getattr(client, method)(resource, **keywords)
                if method != "informer":
                    self._close = lambda: _threadsafe(loop, stream.close)
                    async for item in stream:
                        self.note(item)
                    return
                self.store = stream.indexer
                stream.on_error(self._note_error)
                stream.add_event_handler(self._on_add, self._on_update, self._on_delete)
                stopped = asyncio.Event()
                self._close = lambda: _threadsafe(loop, stopped.set)
                async with stream:
                    await stopped.wait()
        except Stopped:
            pass
        except Exception as error:
            self._note_error(error)
        finally:
            self._note_end()


def _threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
