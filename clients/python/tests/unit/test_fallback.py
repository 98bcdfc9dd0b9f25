"""When reads go to the apiserver, and how often: with a time of the test's own."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Callable

import grpc
import pytest

from kubefan import (
    Budget,
    Event,
    EventType,
    Expired,
    Forbidden,
    KubefanError,
    NotCached,
    NotFound,
    Object,
    Projection,
    ProtocolError,
    Side,
    Unauthenticated,
    Unavailable,
    Undecodable,
    Unreachable,
)
from kubefan import _fallback as fallback
from kubefan._fallback import BusyRow, Gate, Machine, Monitor, Verdict, parse_budget, verdict_of
from kubefan._projection import json_bytes, names_of, project
from kubefan._watch_fallback import AtVersion

Code = grpc.StatusCode


class FakeClock:
    """A time that moves only by `advance`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self.pending: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> float:
        """The time."""
        return self._now

    def call_later(self, seconds: float, run: Callable[[], None]) -> Callable[[], None]:
        """Runs a function when the time has moved so far."""
        self._count += 1
        entry = (self._now + seconds, self._count, run)
        self.pending.append(entry)

        def cancel() -> None:
            if entry in self.pending:
                self.pending.remove(entry)

        return cancel

    def advance(self, seconds: float) -> None:
        """Runs what is due, in the order of time, also what that sets."""
        end = self._now + seconds
        while True:
            due = min((it for it in self.pending if it[0] <= end), default=None)
            if due is None:
                self._now = end
                return
            self.pending.remove(due)
            self._now = max(self._now, due[0])
            due[2]()


class Fixed(random.Random):
    """The same random number each time."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        """The number."""
        return self._value


class Steps:
    """Runs a machine."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.now = 1000.0

    def after(self, seconds: float) -> Steps:
        """Lets time pass."""
        self.now += seconds
        return self

    def fails(self) -> Steps:
        """Finds no kubefan."""
        self.machine.failed(self.now, self.machine.epoch)
        return self

    def probe(self, is_healthy: bool) -> Side:
        """Probes, and returns the side."""
        self.machine.probed(self.now, is_healthy)
        return self.machine.side


def test_one_failure_moves_reads_and_one_probe_returns_them_if_none_has_moved() -> None:
    steps = Steps().fails()
    assert steps.machine.side == Side.AWAY
    assert steps.after(1).probe(False) == Side.AWAY
    assert steps.probe(True) == Side.HEALTHY


def test_reads_that_moved_return_after_kubefan_was_healthy_for_a_while() -> None:
    steps = Steps().fails()
    steps.machine.moved()
    assert steps.probe(True) == Side.RETURNING
    assert steps.after(29).probe(False) == Side.AWAY
    assert steps.probe(True) == Side.RETURNING
    assert steps.after(29).probe(True) == Side.RETURNING
    assert steps.after(1).probe(True) == Side.HEALTHY


def test_a_kubefan_that_fails_soon_after_each_return_is_held_longer() -> None:
    steps = Steps().fails()
    assert steps.probe(True) == Side.HEALTHY
    for hold in (30, 60, 120, 240, 480, 600, 600):
        assert steps.after(1).fails().probe(True) == Side.RETURNING
        assert steps.after(hold - 1).probe(True) == Side.RETURNING
        assert steps.after(1).probe(True) == Side.HEALTHY
    assert steps.after(1200).fails().probe(True) == Side.HEALTHY


@pytest.mark.parametrize(
    ("times", "lasts"),
    [
        ([0.0], False),
        ([0.0, 9.9], False),
        ([0.0, 9.9, 10.0], True),
        ([0.0, 120.0], True),
        ([0.0, 120.1], False),
        ([0.0, 10.0, 130.1], False),
        ([0.0, 120.1, 130.1], True),
    ],
)
def test_only_a_row_of_busy_answers_lasts(times: list[float], lasts: bool) -> None:
    row = BusyRow()
    assert [row.lasts(1000 + time) for time in times][-1] == lasts


def test_an_old_failure_begins_no_outage() -> None:
    steps = Steps()
    old = steps.machine.epoch
    assert steps.fails().probe(True) == Side.HEALTHY
    steps.machine.failed(steps.now, old)
    assert steps.machine.side == Side.HEALTHY


def admitted(phase: float, starts: list[tuple[str, bool]], seconds: int) -> list[str]:
    """The order and the times of starts, with a window of a second."""
    clock = FakeClock()
    gate = Gate(clock, Budget(10, 10.0), Fixed(phase))
    begin = clock.now()
    words: list[str] = []

    def note(name: str) -> None:
        words.append(f"{name} {clock.now() - begin:g}")

    for name, has_state in starts:
        gate.enter(has_state, partial(note, name))
    clock.advance(seconds)
    return words


def test_those_without_a_state_go_first_and_all_are_spaced() -> None:
    starts = [("later 1", True), ("first 1", False), ("later 2", True), ("first 2", False)]
    expected = ["first 1 0.5", "first 2 1.5", "later 1 2.5", "later 2 3.5"]
    assert admitted(0.5, starts, 10) == expected
    assert admitted(0.25, [("later", True)], 3) == ["later 1.25"]


def test_reads_without_a_state_go_first_for_two_windows_and_then_take_turns() -> None:
    starts = [("later 1", True), ("later 2", True)]
    starts += [(f"first {number}", False) for number in range(1, 6)]
    # The window is a second, so each watch waits for two of them, and then for one turn.
    expected = ["first 1", "first 2", "later 1", "first 3", "later 2", "first 4", "first 5"]
    assert [word.rpartition(" ")[0] for word in admitted(0.5, starts, 10)] == expected


def test_a_start_that_left_is_not_admitted() -> None:
    clock, words = FakeClock(), list[str]()
    gate = Gate(clock, Budget(10, 10.0), Fixed(0.5))
    gate.leave(gate.enter(False, lambda: words.append("left")))
    assert clock.pending == []
    gate.enter(False, lambda: words.append("other"))
    clock.advance(10)
    assert words == ["other"]


def test_a_kubefan_that_has_just_started_does_not_shrink_the_fleet() -> None:
    clock, starts = FakeClock(), list[float]()
    gate = Gate(clock, Budget(1, 1.0), Fixed(0.5))
    gate.set_budget(Budget(3000, 50.0))
    clock.advance(3600)
    gate.set_budget(Budget(7, 50.0))
    gate.enter(False, lambda: starts.append(clock.now() - 4600))
    clock.advance(30)
    assert starts == [30], "half a window of 3,000 clients"
    clock.advance(570)
    gate.set_budget(Budget(7, 50.0))
    gate.enter(False, lambda: starts.append(clock.now() - 5200))
    clock.advance(1)
    assert starts[1] < 1, "only smaller ones were told for ten minutes"


def test_a_fleet_stays_within_the_rate() -> None:
    clock, generator = FakeClock(), random.Random(1)
    counts = [0] * 81
    for client in range(2000):
        has_state = client % 2 == 0

        def count(has_state: bool = has_state) -> None:
            second = int(clock.now() - 1000)
            assert has_state == (second >= 40)
            counts[second] += 1

        Gate(clock, Budget(2000, 50.0), random.Random(generator.random())).enter(has_state, count)
    clock.advance(81)
    # A thousand starts in each window of 40 s are 25 in a second on average.
    assert sum(counts) == 2000
    assert max(counts) <= 50


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("clients=3000, rate=50", 60),
        ("rate=0.5,clients=10;x=1, new=1", 20),
        ("clients=1000000, rate=0.001", 600),
        ("clients=0, rate=50", None),
        ("clients=3000", None),
        ("clients=3000, rate=1e9", None),
        ("clients=3000, rate=-1", None),
        ("clients=3000, rate=inf", None),
        ("", None),
    ],
)
def test_a_budget_is_read_as_a_whole_or_not_at_all(text: str, window: Any) -> None:
    budget = parse_budget([("other", "x"), (fallback.BUDGET_KEY, text)])
    assert (budget and budget.window) == window


def test_a_kubefan_that_is_away_is_probed_until_it_returns() -> None:
    clock, sides, probes = FakeClock(), list[str](), list[float]()
    is_serving = False

    def probe(done: Callable[[bool], None]) -> None:
        probes.append(clock.now())
        done(is_serving)

    monitor = Monitor(clock, probe, lambda side, _: sides.append(side.value), Fixed(0.5))
    clock.advance(3600)
    assert probes == []
    left: list[float] = []

    def lose(machine: Machine, now: float) -> None:
        machine.failed(now, 0)
        machine.moved()

    monitor.note("gone", lose)
    monitor.await_return(lambda: left.append(clock.now()))
    clock.advance(20)
    assert len(probes) == 4
    is_serving = True
    clock.advance(35)
    assert sides == ["away", "returning", "healthy"]
    clock.advance(3600)
    assert len(left) == 1
    assert clock.pending == []


def test_a_watch_stays_at_the_apiserver_if_kubefan_is_away_again() -> None:
    clock, left = FakeClock(), list[bool]()
    monitor = Monitor(clock, lambda done: done(False), lambda *_: None, Fixed(0.5))
    monitor.await_return(lambda: left.append(True))
    clock.advance(10)
    monitor.note("gone", lambda machine, now: machine.failed(now, 0))
    clock.advance(3600)
    assert left == []


def failed(
    kind: type[KubefanError], code: grpc.StatusCode, reason: str = "", delay: Any = None
) -> Any:
    """An error."""
    return kind("", code=code, reason=reason, retry_after=delay)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, Verdict.ANSWERED),
        (failed(Unreachable, Code.UNAVAILABLE), Verdict.AWAY),
        (failed(Unavailable, Code.UNAVAILABLE), Verdict.AWAY),
        (failed(KubefanError, Code.INTERNAL), Verdict.AWAY),
        (failed(Unavailable, Code.UNAVAILABLE, "", 1.0), Verdict.BUSY),
        (failed(Unavailable, Code.UNAVAILABLE, "NOT_SYNCED", 1.0), Verdict.BUSY),
        (failed(Forbidden, Code.PERMISSION_DENIED, "UPSTREAM_FORBIDDEN"), Verdict.REFUSED),
        (failed(NotCached, Code.FAILED_PRECONDITION, "NOT_CACHED"), Verdict.REFUSED),
        (failed(Unavailable, Code.UNAVAILABLE, "PASSTHROUGH", 1.0), Verdict.REFUSED),
        (failed(Expired, Code.OUT_OF_RANGE, "RESOURCE_VERSION_TOO_OLD"), Verdict.ANSWERED),
        (failed(Forbidden, Code.PERMISSION_DENIED, "FORBIDDEN"), Verdict.ANSWERED),
        (failed(Unauthenticated, Code.UNAUTHENTICATED, "UNAUTHENTICATED"), Verdict.ANSWERED),
        (failed(NotFound, Code.NOT_FOUND, "RESOURCE_NOT_FOUND"), Verdict.ANSWERED),
        (failed(Unavailable, Code.UNAVAILABLE, "DRAINING", 1.0), Verdict.ANSWERED),
        (failed(Undecodable, Code.UNKNOWN), Verdict.ANSWERED),
        (failed(ProtocolError, Code.INTERNAL), Verdict.ANSWERED),
    ],
)
def test_only_some_errors_are_about_kubefan(error: Any, verdict: Verdict) -> None:
    assert verdict_of(error) == verdict


def test_a_version_is_mapped_to_the_apiserver() -> None:
    at = AtVersion()
    seen = [Event(EventType.ADDED, Object("n", name, "", "12", b"")) for name in "xyx"]
    assert [at.accepts(event) for event in seen] == [True, True, True]
    at.moved = True
    assert [at.accepts(event) for event in seen] == [False, False, False]
    # A place in a version proves that there is more of it.
    versions = {
        "": "",
        "12.end": "12",
        "12": "11",
        "12.1": "11",
        "9": "9",
        "9.1": "8",
        "9.end": "9",
    }
    assert {text: at.from_version(text) for text in versions} == versions


POD: dict[str, Any] = {
    "metadata": {
        "name": "web",
        "resourceVersion": "7",
        "labels": {"app": "web"},
        "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": "{}",
            "example.com/on": "<yes>",
        },
        "managedFields": [{}],
    },
    "spec": {
        "nodeName": "n1",
        "containers": [{"name": "a", "image": "i:1"}, {"name": "b"}],
        "volumes": [],
    },
    "status": {"phase": "Running"},
}


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (
            ("status.phase", "spec.containers.image", "metadata.labels", "spec.nodeName"),
            '{"metadata":{"labels":{"app":"web"}},"spec":{"nodeName":"n1",'
            '"containers":[{"image":"i:1"},{}]},"status":{"phase":"Running"}}',
        ),
        (
            (r"metadata.annotations.example\.com/on",),
            '{"metadata":{"annotations":{"example.com/on":"\\u003cyes\\u003e"}}}',
        ),
        (("metadata.annotations.example", "spec.volumes.name", "kind.x"), "{}"),
        (("spec.nodeName", "spec.nodeName.x"), '{"spec":{"nodeName":"n1"}}'),
    ],
)
def test_a_projection_leaves_out_what_kubefan_would(paths: tuple[str, ...], text: str) -> None:
    assert json_bytes(project(POD, Projection(paths=paths))).decode() == text


def test_a_projection_is_canonical() -> None:
    assert project(POD, Projection()) is POD
    kept = project(POD, Projection(drop_last_applied=True))["metadata"]
    assert sorted(kept) == ["annotations", "labels", "name"]
    assert kept["annotations"] == {"example.com/on": "<yes>"}
    for path in ("a..b", "", "a.", r"a\b"):
        with pytest.raises(ValueError, match="path"):
            names_of(path)
