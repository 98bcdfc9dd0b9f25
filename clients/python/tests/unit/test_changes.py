"""The events of `Client.watch` stand for themselves."""

from __future__ import annotations

import random

from kubefan import Event, Target, Unreachable, WatchOptions
from kubefan._changes import Changes
from kubefan._watch_state import WatchState
from kubefan.v1alpha1 import watch_pb2 as api

from .messages import begin, bookmark, catch_up_begin, catch_up_end, end, event, gap_begin, gap_end


class Reader:
    """Reads messages as the client does, and keeps what a caller would see."""

    def __init__(self) -> None:
        self.machine = WatchState(Target("pods"), WatchOptions(), "h:1", random.Random(1))
        self.machine.request(0.0)
        self.machine.opened(0.0)
        self.changes = Changes()

    def read(self, *messages: api.WatchResponse) -> list[str]:
        events: list[Event] = []
        for message in messages:
            for item in self.machine.accept(message, 0.0):
                events += self.changes.accept(item)
        return [shown(made) for made in events]

    def broken(self) -> None:
        for item in self.machine.failed(Unreachable("gone"), 0.0):
            assert self.changes.accept(item) == []


def shown(made: Event) -> str:
    version = f" resume {made.resume_version}" if made.resume_version else ""
    return f"{made.type} {made.object.name} {made.object.resource_version}{version}"


FIRST = (begin("5"), event("ADDED", "a", "1"), event("ADDED", "b", "2"), end("5", 2))


def test_the_first_state_arrives_as_additions() -> None:
    assert Reader().read(*FIRST) == ["ADDED a 1", "ADDED b 2"]


def test_a_restart_reports_only_what_differs_with_real_deletions() -> None:
    reader = Reader()
    reader.read(*FIRST)
    seen = reader.read(
        begin("20", restarted_from="5"),
        event("ADDED", "b", "9"),
        event("ADDED", "c", "12"),
        end("20", 2),
    )
    assert seen == ["MODIFIED b 9", "ADDED c 12", "DELETED a 1 resume 20"]
    assert reader.read(begin("20", "5"), event("ADDED", "b", "9"), end("20")) == [
        "DELETED c 12 resume 20"
    ]


def test_a_new_object_of_the_same_name_is_a_deletion_and_an_addition() -> None:
    reader = Reader()
    reader.read(*FIRST)
    seen = reader.read(
        begin("20", "5"), event("ADDED", "a", "9", uid="other"), event("ADDED", "b", "2"), end("20")
    )
    assert seen == ["DELETED a 1", "ADDED a 9"]


def test_a_first_state_that_breaks_off_repeats_nothing() -> None:
    reader = Reader()
    assert reader.read(begin("5"), event("ADDED", "a", "1")) == ["ADDED a 1"]
    reader.broken()
    assert reader.read(
        begin("8"), event("ADDED", "a", "1"), event("ADDED", "b", "7"), end("8")
    ) == ["ADDED b 7"]


def test_the_events_of_a_unit_come_at_its_end_or_not_at_all() -> None:
    reader = Reader()
    reader.read(*FIRST)
    assert reader.read(gap_begin("5"), event("ADDED", "ghost", "6")) == []
    reader.broken()
    assert reader.read(catch_up_begin("5"), event("DELETED", "a", "1", unknown=True)) == []
    assert reader.read(event("ADDED", "c", "8"), catch_up_end("9")) == [
        "DELETED a 1",
        "ADDED c 8 resume 9",
    ]
    assert reader.read(gap_begin("9"), gap_end("10"), bookmark("11")) == []


def test_a_restart_inside_a_unit_drops_the_unit() -> None:
    reader = Reader()
    reader.read(*FIRST)
    assert (
        reader.read(
            gap_begin("5"),
            event("ADDED", "ghost", "6"),
            begin("20", "5"),
            event("ADDED", "a", "1"),
            event("ADDED", "b", "2"),
            end("20"),
        )
        == []
    )
