package transport

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

// second is a budget whose window is a second.
var second = Budget{Clients: 10, StartsPerSecond: 10}

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
	gate, clock := gateAt(0.5, second)
	starts := map[string]*start{
		"later 1": gate.enter(true), "first 1": gate.enter(false), "later 2": gate.enter(true), "first 2": gate.enter(false),
	}
	got := order(clock, starts, 10*time.Second, 100*time.Millisecond)
	want := []string{"first 1 500ms", "first 2 1.5s", "later 1 2.5s", "later 2 3.5s"}
	if !slices.Equal(got, want) {
		t.Error(got)
	}
}

func TestACallerWithAStateLeavesTheFirstWindowToTheOthers(t *testing.T) {
	gate, clock := gateAt(0.25, second)
	starts := map[string]*start{"later": gate.enter(true)}
	if got := order(clock, starts, 3*time.Second, 250*time.Millisecond); !slices.Equal(got, []string{"later 1.25s"}) {
		t.Error(got)
	}
}

func TestOneWithoutAStateOvertakes(t *testing.T) {
	gate, clock := gateAt(0, second)
	later := gate.enter(true)
	clock.advance(900 * time.Millisecond)
	first := gate.enter(false)
	clock.advance(0)
	if isAdmitted(later) || !isAdmitted(first) {
		t.Error("the first window was unused, so the first one has waited long enough")
	}
	clock.advance(900 * time.Millisecond)
	if isAdmitted(later) {
		t.Error("two starts in one window")
	}
	clock.advance(time.Second)
	if !isAdmitted(later) {
		t.Error("it waits for nothing")
	}
}

func TestAPauseBeginsANewWindowAtARandomMoment(t *testing.T) {
	gate, clock := gateAt(0.5, second)
	first := gate.enter(false)
	clock.advance(time.Second)
	soon := gate.enter(false)
	clock.advance(499 * time.Millisecond)
	if !isAdmitted(first) || isAdmitted(soon) {
		t.Error("the second start is in the window of the first")
	}
	clock.advance(time.Minute)
	last := gate.enter(false)
	clock.advance(499 * time.Millisecond)
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
	gate.setBudget(Budget{Clients: 100, StartsPerSecond: 10})
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
