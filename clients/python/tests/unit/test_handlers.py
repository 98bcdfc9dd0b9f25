"""The calls that wait for a handler."""

from __future__ import annotations

from typing import Optional

from kubefan import Deleted, Object
from kubefan.handlers import INITIAL_LIST_END, Add, BacklogQueue, Call, Notification, Update


def made(name: str, version: int) -> Object:
    return Object("ns", name, "u", str(version), b"{}")


def shown(call: Optional[Call]) -> str:
    if isinstance(call, Add):
        return f"add {call.object.resource_version}"
    if isinstance(call, Update):
        return f"update {call.old.resource_version}→{call.new.resource_version}"
    if isinstance(call, Deleted):
        return f"delete {call.object.resource_version}"
    return "end"


def drained(queue: BacklogQueue) -> list[str]:
    calls = []
    while len(queue):
        calls.append(shown(queue.pop()))
    assert queue.pop() is None
    return calls


def changes(name: str) -> list[Notification]:
    states = [made(name, version) for version in range(5)]
    return [
        Add(states[0], True),
        Update(states[0], states[1]),
        Update(states[1], states[2]),
        Deleted(states[2]),
        Add(states[3], False),
        Update(states[3], states[4]),
    ]


def test_below_the_limit_every_call_waits_in_order() -> None:
    queue = BacklogQueue(10)
    for call in changes("a"):
        queue.push(call)
    assert drained(queue) == [
        "add 0",
        "update 0→1",
        "update 1→2",
        "delete 2",
        "add 3",
        "update 3→4",
    ]


def test_above_the_limit_changes_of_one_object_are_one_call() -> None:
    queue = BacklogQueue(1)
    for call in changes("a")[1:]:
        queue.push(call)
    assert drained(queue) == ["delete 2", "add 4"], "a deletion and a new object stay two calls"


def test_an_object_that_came_and_went_is_never_heard_of() -> None:
    queue = BacklogQueue(1)
    queue.push(Add(made("other", 1), False))
    for _ in range(1000):
        queue.push(Add(made("a", 1), False))
        queue.push(Deleted(made("a", 2)))
    assert len(queue._cells) < 10, "cancelled calls take no memory"
    assert drained(queue) == ["add 1"]


def test_the_end_of_the_initial_list_keeps_its_place() -> None:
    queue = BacklogQueue(1)
    queue.push(Add(made("a", 1), True))
    queue.push(INITIAL_LIST_END)
    queue.push(Add(made("b", 2), False))
    assert drained(queue) == ["add 1", "end", "add 2"]
