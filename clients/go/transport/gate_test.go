package transport

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	// single is a budget whose window is ten seconds, so that a burst has one start.
	single = Budget{Clients: 100, StartsPerSecond: 10}
	// second is a budget whose window is a second, and whose bursts have ten starts.
	second = Budget{Clients: 10, StartsPerSecond: 10}
)

func gateAt(phase float64, budget Budget) (*gate, *fakeClock) {
	time := newFakeClock()
	return newGate(time, func() float64 { return phase }, budget), time
}

func isAdmitted(waiting *start) bool {
	select {
	case <-waiting.admitted:
		return true
	default:
		return false
	}
}

// order advances the clock and says when each start was admitted.
func order(clock *fakeClock, starts map[string]*start, until, step time.Duration) (words []string) {
	for at := time.Duration(0); at <= until; at += step {
		for _, name := range slices.Sorted(maps.Keys(starts)) {
			if isAdmitted(starts[name]) {
				words = append(words, fmt.Sprint(name, " ", at))
				delete(starts, name)
			}
		}
		clock.advance(step)
	}
	return words
}

func TestThoseWithoutAStateGoFirstAndAllAreSpaced(t *testing.T) {
	gate, clock := gateAt(0.5, single)
	starts := map[string]*start{
		"first 1": gate.enter(false), "first 2": gate.enter(false), "later 1": gate.enter(true), "later 2": gate.enter(true),
	}
	got := order(clock, starts, 2*time.Minute, time.Second)
	want := []string{"first 1 5s", "first 2 15s", "later 1 25s", "later 2 35s"}
	if !slices.Equal(got, want) {
		t.Error(got)
	}
}

func TestACallerWithAStateLeavesTheFirstWindowToTheOthers(t *testing.T) {
	gate, clock := gateAt(0.25, single)
	starts := map[string]*start{"later": gate.enter(true)}
	if got := order(clock, starts, time.Minute, 2500*time.Millisecond); !slices.Equal(got, []string{"later 12.5s"}) {
		t.Error(got)
	}
}

func TestOneWithoutAStateOvertakes(t *testing.T) {
	gate, clock := gateAt(0, single)
	later := gate.enter(true)
	clock.advance(9 * time.Second)
	first := gate.enter(false)
	clock.advance(0)
	if isAdmitted(later) || !isAdmitted(first) {
		t.Error("the first window was unused, so the first one has waited long enough")
	}
	clock.advance(9 * time.Second)
	if isAdmitted(later) {
		t.Error("two starts in one window")
	}
	clock.advance(10 * time.Second)
	if !isAdmitted(later) {
		t.Error("it waits for nothing")
	}
}

func TestOneWithAStateIsNotOvertakenForEver(t *testing.T) {
	gate, clock := gateAt(0, single)
	later := []*start{gate.enter(true), gate.enter(true)}
	firsts := []*start{}
	for range 8 {
		firsts = append(firsts, gate.enter(false), gate.enter(false))
		clock.advance(10 * time.Second)
	}
	if !isAdmitted(later[0]) || !isAdmitted(later[1]) {
		t.Error("a watch starves")
	}
	if passed := len(firsts) - len(slices.DeleteFunc(firsts, isAdmitted)); passed < 5 {
		t.Error("those without a state do not go on:", passed)
	}
}

func TestASmallFleetStartsManyReadsAtOnceAndThenPauses(t *testing.T) {
	gate, clock := gateAt(0.5, second)
	starts := map[string]*start{}
	for number := range 25 {
		starts[fmt.Sprintf("%02d", number)] = gate.enter(true)
	}
	began := map[string]int{}
	for _, line := range order(clock, starts, time.Minute, 500*time.Millisecond) {
		_, at, _ := strings.Cut(line, " ")
		began[at]++
	}
	if want := map[string]int{"1.5s": 10, "11.5s": 10, "21.5s": 5}; !maps.Equal(began, want) {
		t.Error(began)
	}
}

func TestAPauseBeginsANewWindowAtARandomMoment(t *testing.T) {
	gate, clock := gateAt(0.5, single)
	first := gate.enter(false)
	clock.advance(10 * time.Second)
	soon := gate.enter(false)
	clock.advance(4999 * time.Millisecond)
	if !isAdmitted(first) || isAdmitted(soon) {
		t.Error("the second start is in the window of the first")
	}
	clock.advance(time.Minute)
	last := gate.enter(false)
	clock.advance(4999 * time.Millisecond)
	if !isAdmitted(soon) || isAdmitted(last) {
		t.Error("after a pause all clients would start together")
	}
	clock.advance(time.Millisecond)
	if !isAdmitted(last) {
		t.Error("it waits for nothing")
	}
}

func TestAStartThatLeavesTakesNoPlace(t *testing.T) {
	gate, clock := gateAt(0.5, second)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	cancel(gone)
	if _, err := gate.wait(ctx, false, nil); !errors.Is(err, gone) {
		t.Error(err)
	}
	changed := make(chan struct{})
	close(changed)
	if admitted, err := gate.wait(t.Context(), true, changed); admitted || err != nil {
		t.Error(admitted, err)
	}
	last := gate.enter(false)
	clock.advance(500 * time.Millisecond)
	if !isAdmitted(last) || len(clock.pending) != 0 {
		t.Error("the others left something")
	}
}

func TestANewBudgetCountsFromTheNextStart(t *testing.T) {
	gate, clock := gateAt(0.5, second)
	gate.setBudget(single)
	first := gate.enter(false)
	clock.advance(4999 * time.Millisecond)
	if isAdmitted(first) {
		t.Error("the old window")
	}
	clock.advance(time.Millisecond)
	if !isAdmitted(first) {
		t.Error("no window")
	}
}

func TestAShorterWindowShortensTheWait(t *testing.T) {
	gate, clock := gateAt(0, Budget{Clients: clientsMax, StartsPerSecond: rateMin})
	first, later := gate.enter(false), gate.enter(true)
	clock.advance(0)
	second := gate.enter(false)
	clock.advance(time.Second)
	if !isAdmitted(first) || isAdmitted(second) {
		t.Error("the long window has one start")
	}
	gate.setBudget(single)
	clock.advance(10 * time.Second)
	if !isAdmitted(second) {
		t.Error("the old window")
	}
	clock.advance(10 * time.Second)
	if !isAdmitted(later) {
		t.Error("the old second window")
	}
}

// All clients of a fleet together stay within the budget, and have started after two windows.
func TestAFleetKeepsTheRate(t *testing.T) {
	const clients = 3000
	budget := Budget{Clients: clients, StartsPerSecond: 50}
	clock := newFakeClock()
	clock.armed = make(chan time.Duration, 2*clients)
	waiting := []*start{}
	for number := range clients {
		phase := (float64(number) + 0.5) / clients
		gate := newGate(clock, func() float64 { return phase }, budget)
		waiting = append(waiting, gate.enter(number%2 == 0))
	}
	for range 120 {
		before := len(waiting)
		clock.advance(time.Second)
		waiting = slices.DeleteFunc(waiting, isAdmitted)
		if started := before - len(waiting); started > 50 {
			t.Fatal(started, "starts in a second")
		}
	}
	if len(waiting) != 0 {
		t.Error(len(waiting), "still wait")
	}
}
