"""Every test vector of the contract decodes as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubefan._delta import DeltaError, WrongBaseError, decode_chunk, decode_delta
from kubefan.v1alpha1 import watch_pb2 as api

DIRECTORY = Path(__file__).parents[4] / "proto/kubefan/v1alpha1/testdata"
INDEX = json.loads((DIRECTORY / "index.json").read_text())


def read(name: str) -> bytes:
    return (DIRECTORY / name).read_bytes()


@pytest.mark.parametrize("case", INDEX["deltas"], ids=lambda case: str(case["name"]))
def test_a_delta_makes_the_object_or_is_refused(case: dict[str, Any]) -> None:
    delta = api.ObjectDelta.FromString(read(case["delta"]))
    if not case["error"]:
        assert decode_delta(read(case["held"]), delta) == read(case["object"])
        return
    with pytest.raises(DeltaError) as raised:
        decode_delta(read(case["held"]), delta)
    assert isinstance(raised.value, WrongBaseError) == (case["error"] == "wrong_base")


@pytest.mark.parametrize("case", INDEX["chunks"], ids=lambda case: str(case["name"]))
def test_a_chunk_makes_its_events_or_is_refused(case: dict[str, Any]) -> None:
    if case["error"]:
        with pytest.raises(DeltaError):
            list(decode_chunk(read(case["chunk"])))
        return
    events = list(decode_chunk(read(case["chunk"])))
    names = ("namespace", "name", "resource_version")
    assert [
        {**{name: getattr(event, name) for name in names}, "object": event.object.decode()}
        for event in events
    ] == case["events"]
