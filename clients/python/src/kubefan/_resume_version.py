"""Versions to resume from, as texts.

On the wire a version and whether all events of it were sent are two fields. The client keeps both
as one text.
"""

from __future__ import annotations

from typing import Optional

#: The place after all events of a version.
_END = ".end"


def received(version: str, is_complete: bool) -> str:
    """The text of a version that was received."""
    return version + _END if is_complete and version else version


def sent(text: str) -> tuple[str, Optional[bool]]:
    """A version as it is sent, and whether all events of it were received; None without one."""
    if not text:
        return "", None
    if text.endswith(_END):
        return text[: -len(_END)], True
    return text, False
