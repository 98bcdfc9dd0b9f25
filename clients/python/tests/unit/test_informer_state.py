"""The state machine of an informer, with recorded sequences of messages."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest

from kubefan import Expired, Forbidden, Projection, Unreachable
from kubefan._informer_state import OLD_SNAPSHOTS_MAX, InformerState
from kubefan._watch_state import WatchState
from kubefan.handlers import Add, Deleted, Notification
from kubefan.v1alpha1 import watch_pb2 as api

from .messages import begin, catch_up_begin, catch_up_end, end, event, gap_begin, gap_end

FIRST = (begin("5"), event("ADDED", "a", "1"), event("ADDED", "b", "2"), end("5", 2))


class Rig:
    """An informer's state, fed by messages."""

    def __init__(self, **keywords: Any) -> None:
        self.state = InformerState("pods", keywords)
        self.reconnect()

    def reconnect(self) -> None:
        self.machine = WatchState(self.state.target, self.state.options(), "h:1", random.Random(1))
        self.machine.request(0.0)
        self.machine.opened(0.0)

    def read(self, *messages: api.WatchResponse) -> list[str]:
        calls: list[Notification] = []
        for message in messages:
            for item in self.machine.accept(message, 0.0):
                calls += self.state.accept(item, self.machine.cluster)
        return [shown(call) for call in calls]

    def broken(self) -> None:
        for item in self.machine.failed(Unreachable("gone"), 0.0):
            self.state.accept(item, self.machine.cluster)

    def stored(self) -> list[str]:
        return sorted(f"{made.name} {made.resource_version}" for made in self.state.indexer)


def shown(call: Notification) -> str:
    if isinstance(call, Add):
        return f"add {call.object.name}" + (" initial" if call.is_in_initial_list else "")
    if isinstance(call, Deleted):
        return f"delete {call.object.name}" + (" unknown" if call.final_state_unknown else "")
    return f"update {call.new.name} {call.old.resource_version}→{call.new.resource_version}"


def test_the_first_state_counts_when_it_is_complete() -> None:
    rig = Rig()
    assert rig.read(*FIRST[:3]) == []
    assert (rig.state.synced, rig.stored(), rig.state.resource_version) == (False, [], "")
    assert rig.read(FIRST[3]) == ["add a initial", "add b initial"]
    assert (rig.state.synced, rig.stored()) == (True, ["a 1", "b 2"])
    assert rig.state.options().resource_version == "5"
    assert rig.state.options().cluster == "c1"


def test_events_change_the_store_and_call_handlers() -> None:
    rig = Rig()
    rig.read(*FIRST)
    assert rig.read(
        event("MODIFIED", "a", "6", "6"),
        event("ADDED", "c", "7", "7"),
        event("DELETED", "b", "8", "8"),
    ) == ["update a 1→6", "add c", "delete b"]
    assert (rig.stored(), rig.state.resource_version) == (["a 6", "c 7"], "8")


def test_a_missed_deletion_has_the_last_known_object() -> None:
    rig = Rig()
    rig.read(*FIRST)
    seen = rig.read(begin("20", "5"), event("ADDED", "b", "9"), event("ADDED", "c", "8"), end("20"))
    assert seen == ["delete a unknown", "update b 2→9", "add c"]
    assert rig.stored() == ["b 9", "c 8"]


def test_a_unit_takes_effect_at_its_end_or_not_at_all() -> None:
    rig = Rig()
    rig.read(*FIRST)
    assert rig.read(gap_begin("5"), event("ADDED", "ghost", "6")) == []
    rig.broken()
    assert rig.stored() == ["a 1", "b 2"]
    assert rig.read(
        catch_up_begin("5"),
        event("DELETED", "a", "1", unknown=True),
        event("ADDED", "a", "8", uid="new"),
        event("DELETED", "never-known", "3", unknown=True),
        catch_up_end("9"),
    ) == ["delete a unknown", "add a"]
    assert rig.stored() == ["a 8", "b 2"]
    assert rig.read(gap_begin("9"), gap_end("12")) == []
    assert rig.state.resource_version == "12"


def test_a_snapshot_that_breaks_off_has_no_effect() -> None:
    rig = Rig()
    rig.read(*FIRST)
    assert rig.read(begin("20", "5"), event("ADDED", "z", "19")) == []
    rig.broken()
    assert rig.stored() == ["a 1", "b 2"]


def test_an_unchanged_object_stays_the_same_one_and_calls_nothing() -> None:
    rig = Rig()
    rig.read(*FIRST)
    before = rig.state.indexer.get("default/a")
    again = (begin("20", "5"), event("ADDED", "a", "1"), event("ADDED", "b", "2"), end("20"))
    assert rig.read(*again) == []
    assert rig.state.indexer.get("default/a") is before


def too_old() -> Expired:
    return Expired("too old", code=grpc.StatusCode.OUT_OF_RANGE, reason="RESOURCE_VERSION_TOO_OLD")


def test_after_an_expired_version_a_replica_behind_it_is_refused_for_a_while() -> None:
    rig = Rig()
    rig.read(*FIRST)
    rig.state.failed(too_old(), "5", 0.0)
    assert rig.state.options().resource_version == ""
    for _ in range(OLD_SNAPSHOTS_MAX):
        rig.reconnect()
        with pytest.raises(Unreachable, match="behind version 5"):
            rig.read(begin("4"))
    rig.reconnect()
    assert rig.read(begin("4"), end("4")) == ["delete a unknown", "delete b unknown"]


def test_a_break_keeps_the_version_and_a_refusal_leads_to_a_new_state() -> None:
    rig = Rig()
    rig.read(*FIRST)
    assert rig.state.failed(Unreachable("gone"), "5", 0.0) >= 0.8
    assert rig.state.options().resource_version == "5"
    denied = Forbidden("no", code=grpc.StatusCode.PERMISSION_DENIED)
    rig.state.failed(denied, "5", 0.0)
    assert rig.state.options().resource_version == ""


def test_with_a_projection_only_changes_are_sent() -> None:
    assert Rig(projection=Projection.metadata()).state.options().only_changes
    assert not Rig().state.options().only_changes
    with pytest.raises(TypeError, match="resource_version"):
        Rig(resource_version="5")
