"""A bearer token: fixed, or in a file that is replaced before the token expires.

The hazard is a token in a log. So no error and no `repr` shows one.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Callable, Optional

#: The time after which a token file is read again.
READ_INTERVAL_SECONDS = 10.0

Metadata = Optional[tuple[tuple[str, str], ...]]


def metadata_of(authorization: Optional[str]) -> Metadata:
    """The metadata of a call with this token."""
    return None if authorization is None else (("authorization", authorization),)


class Token:
    """The source of the `authorization` of each call. Threads may share it."""

    def __init__(
        self,
        token: Optional[str] = None,
        token_file: Optional[str] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = Path(token_file) if token_file is not None else None
        self._header = None if token is None or token_file is not None else _header(token)
        self._read_at: Optional[float] = None
        self._clock = clock
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Token(file)" if self.may_change else "Token(fixed)"

    @property
    def is_set(self) -> bool:
        """Whether calls are authorized at all."""
        return self._file is not None or self._header is not None

    @property
    def may_change(self) -> bool:
        """Whether another token may take the place of this one."""
        return self._file is not None

    def header(self) -> Optional[str]:
        """The value for the next call. None without a token.

        If the file can no longer be read, the last token stays in use. Raises OSError or ValueError
        if there is none.
        """
        with self._lock:
            if self._file is None:
                return self._header
            now = self._clock()
            if self._read_at is not None and now - self._read_at < READ_INTERVAL_SECONDS:
                return self._header
            try:
                self._header = _read(self._file)
            except (OSError, ValueError):
                if self._header is None:
                    raise
            self._read_at = now
            return self._header

    def replacement(self, refused: Optional[str]) -> bool:
        """Reads the file again after the server refused a token. Whether it has another one."""
        if self._file is None:
            return False
        with self._lock:
            try:
                header = _read(self._file)
            except (OSError, ValueError):
                return False
            self._header, self._read_at = header, self._clock()
            return header != refused

    def expire(self, sent: Optional[str]) -> None:
        """Reads the file again for the next call, unless another call has done so already."""
        with self._lock:
            if self._header == sent:
                self._read_at = None


def _read(file: Path) -> str:
    try:
        return _header(file.read_text())
    except ValueError as error:  # Also a text that is not UTF-8, which the error would quote.
        problem = "it is not a text" if isinstance(error, UnicodeError) else str(error)
        raise ValueError(f"token file {file}: {problem}") from None


def _header(token: str) -> str:
    token = token.strip()
    if not token:
        raise ValueError("the token is empty")
    if not token.isascii() or not token.isprintable():
        raise ValueError("the token has characters that a header cannot contain")
    return f"Bearer {token}"
