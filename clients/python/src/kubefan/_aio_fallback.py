"""Threads and time for the fallback of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from typing import Any, Callable, Optional, TypeVar

from ._fallback import Cancel
from ._fallback_reads import ANSWER_SECONDS_MAX, FallbackReads, no_answer

_T = TypeVar("_T")


class LoopClock:
    """The time of an event loop. Functions run in it; any thread may call it."""

    def __init__(self) -> None:
        self._loop: Optional[asyncio.AbstractEventLoop] = None

    def bind(self) -> asyncio.AbstractEventLoop:
        """Takes the running loop. To be called before the clock is used."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def now(self) -> float:
        """The present time."""
        return time.monotonic()

    def call_later(self, seconds: float, run: Callable[[], None]) -> Cancel:
        """Runs a function after a time, unless it is cancelled before."""
        handle: Optional[asyncio.TimerHandle] = None
        is_cancelled = False

        def arm() -> None:
            nonlocal handle
            if not is_cancelled and self._loop is not None:
                handle = self._loop.call_later(max(0.0, seconds), run)

        def disarm() -> None:
            if handle is not None:
                handle.cancel()

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            self.soon(disarm)

        self.soon(arm)
        return cancel

    def soon(self, run: Callable[[], None]) -> None:
        """Runs a function in the loop, unless that has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(run)


class Worker:
    """A thread for functions that block, one at a time. It ends with the process, or by `close`."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock = clock
        self._work: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None

    def run(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Runs a function on the thread."""
        future: asyncio.Future[_T] = self._clock.bind().create_future()

        def finish(result: Optional[_T], error: Optional[BaseException]) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            try:
                result = function()
            except BaseException as error:
                failed = error
                self._clock.soon(lambda: finish(None, failed))
            else:
                self._clock.soon(lambda: finish(result, None))

        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="kubefan-apiserver", daemon=True
            )
            self._thread.start()
        return future

    def close(self) -> None:
        """Ends the thread after the function that runs."""
        if self._thread is not None:
            self._work.put(None)

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            work()


async def answer_in_time(call: Any, address: str) -> Any:
    """The metadata of a call's answer. Raises `Unreachable` if there is none in time."""
    try:
        return await asyncio.wait_for(asyncio.shield(call.initial_metadata()), ANSWER_SECONDS_MAX)
    except asyncio.TimeoutError:
        call.cancel()
        raise no_answer(address) from None


async def health_of(reads: FallbackReads) -> bool:
    """Asks kubefan for its health."""
    answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def done(is_serving: bool) -> None:
        if not answer.done():
            answer.set_result(is_serving)

    reads.monitor.ask(done)
    return await answer
