"""Context managers whose `with` block ends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from typing_extensions import Self


class ContextManager(ABC):
    """Ends with its `with` block."""

    @abstractmethod
    def _exit(self) -> None:
        """Ends this object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._exit()


class AsyncContextManager(ABC):
    """Ends with its `async with` block."""

    @abstractmethod
    async def _exit(self) -> None:
        """Ends this object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        await self._exit()
