"""Projections of objects that the apiserver has sent whole: kubefan makes them itself."""

from __future__ import annotations

import json
from typing import Any, Optional

from .options import Projection

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
#: The characters that the apiserver escapes in JSON.
_ESCAPES = str.maketrans(
    {char: f"\\u{ord(char):04x}" for char in ("<", ">", "&", "\u2028", "\u2029")}
)

#: The fields to keep, with the fields below them; None keeps all of them.
_Mask = dict[str, Any]


def json_bytes(value: Any) -> bytes:
    """JSON text as the apiserver writes it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # These characters are in strings only.
    return text.translate(_ESCAPES).encode("utf-8", "surrogatepass")


def identity(content: dict[str, Any]) -> tuple[str, str, str, str]:
    """The namespace, name, uid and version of an object."""
    metadata = content.get("metadata") or {}
    names = ("namespace", "name", "uid", "resourceVersion")
    namespace, name, uid, version = (str(metadata.get(it) or "") for it in names)
    return namespace, name, uid, version


def project(content: dict[str, Any], projection: Projection) -> dict[str, Any]:
    """Leaves out of an object what kubefan would leave out."""
    if not projection.leaves_out():
        return content
    metadata = content.get("metadata")
    if isinstance(metadata, dict):
        left_out = ("resourceVersion", "managedFields")
        metadata = {name: value for name, value in metadata.items() if name not in left_out}
        annotations = metadata.get("annotations")
        if projection.drop_last_applied and isinstance(annotations, dict):
            kept = {name: value for name, value in annotations.items() if name != _LAST_APPLIED}
            if kept:
                metadata["annotations"] = kept
            else:
                del metadata["annotations"]
        content = {**content, "metadata": metadata}
    if not projection.paths:
        return content
    mask: _Mask = {}
    for path in projection.paths:
        _add(mask, names_of(path))
    picked: dict[str, Any] = _pick(content, mask) or {}
    return picked


def names_of(path: str) -> list[str]:
    """Splits a path at its dots. A backslash makes a dot or a backslash part of a name."""
    names, at = [""], 0
    while at < len(path):
        char = path[at]
        if char == "\\":
            at += 1
            if path[at : at + 1] not in (".", "\\"):
                raise ValueError(f"{path!r} is no path of fields, such as 'spec.nodeName'")
            names[-1] += path[at]
        elif char == ".":
            names.append("")
        else:
            names[-1] += char
        at += 1
    if "" in names:
        raise ValueError(f"{path!r} is no path of fields, such as 'spec.nodeName'")
    return names


def _add(mask: _Mask, names: list[str]) -> None:
    first, *rest = names
    if not rest:
        mask[first] = None
    elif mask.get(first, {}) is not None:
        _add(mask.setdefault(first, {}), rest)


def _pick(value: Any, mask: Optional[_Mask]) -> Any:
    """What the mask keeps of a value; None for nothing."""
    if mask is None:
        return value
    if isinstance(value, list):
        # An object with nothing to keep stays as an empty one.
        return [_pick(item, mask) or {} for item in value if isinstance(item, dict)] or None
    if not isinstance(value, dict):
        return None
    kept = {}
    for name, item in value.items():
        if name in mask:
            below = mask[name]
            picked = _pick(item, below)
            if below is None or picked is not None:
                kept[name] = picked
    return kept or None
