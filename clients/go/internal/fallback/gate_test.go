package fallback

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kubefan.dev/clients/go/internal/fakeclock"
)

// second is a budget whose window is a second.
var second = Budget{Clients: 10, StartsPerSecond: 10}

func gateAt(phase float64, budget Budget) (*Gate, *fakeclock.Clock) {
	clock := fakeclock.New()
	return NewGate(clock, func() float64 { return phase }, budget), clock
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
func order(clock *fakeclock.Clock, starts map[string]*start, until, step time.Duration) (words []string) {
	for at := time.Duration(0); at <= until; at += step {
		for _, name := range slices.Sorted(maps.Keys(starts)) {
			if isAdmitted(starts[name]) {
				words = append(words, fmt.Sprint(name, " ", at))
				delete(starts, name)
			}
		}
		clock.Advance(step)
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

func TestOneWithAStateIsNotOvertakenForEver(t *testing.T) {
	gate, clock := gateAt(0, second)
	later := []*start{gate.enter(true), gate.enter(true)}
	firsts := []*start{}
	for range 8 {
		firsts = append(firsts, gate.enter(false), gate.enter(false))
		clock.Advance(time.Second)
	}
	if !isAdmitted(later[0]) || !isAdmitted(later[1]) {
		t.Error("a watch starves")
	}
	if passed := len(firsts) - len(slices.DeleteFunc(firsts, isAdmitted)); passed < 5 {
		t.Error("those without a state do not go on:", passed)
	}
}

func TestAWaitEndsWithItsContextAndWhenKubefanReturns(t *testing.T) {
	gate, clock := gateAt(0.5, second)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if isAdmitted, err := gate.Wait(ctx, false, nil); isAdmitted || err == nil {
		t.Error(isAdmitted, err)
	}
	changed := make(chan struct{})
	close(changed)
	if isAdmitted, err := gate.Wait(t.Context(), false, changed); isAdmitted || err != nil {
		t.Error(isAdmitted, err)
	}
	if count := clock.Timers(); count != 0 {
		t.Error(count, "timers are left")
	}
}

func TestAFleetStaysWithinTheRateAndThoseWithoutAStateComeFirst(t *testing.T) {
	budget := Budget{Clients: 2000, StartsPerSecond: 50}
	clock := fakeclock.New()
	random := rand.New(rand.NewPCG(1, 2))
	waiting := map[*start]bool{}
	for client := range 2000 {
		gate := NewGate(clock, random.Float64, budget)
		hasState := client%2 == 0
		waiting[gate.enter(hasState)] = hasState
	}
	perSecond := []int{}
	for second := range 81 {
		before := len(waiting)
		maps.DeleteFunc(waiting, func(it *start, hasState bool) bool {
			if isAdmitted(it) && hasState != (second > 40) {
				t.Fatalf("a state: %v, after %d s", hasState, second)
			}
			return isAdmitted(it)
		})
		perSecond = append(perSecond, before-len(waiting))
		clock.Advance(time.Second)
	}
	// A thousand starts in each window of 40 s are 25 in a second on average.
	if len(waiting) > 0 || slices.Max(perSecond) > 50 {
		t.Error(len(waiting), "wait;", perSecond)
	}
}

func TestABudgetIsReadAsAWholeOrNotAtAll(t *testing.T) {
	for text, want := range map[string]string{
		"clients=3000, rate=50":           "1m0s",
		"rate=0.5,clients=10;x=1, new=1":  "20s",
		"clients=1000000, rate=0.001":     "10m0s",
		"clients=0, rate=50":              "",
		"clients=3000":                    "",
		"clients=3000, rate=1e9":          "",
		"clients=3000, rate=-1":           "",
		"clients=99999999999999, rate=50": "",
		"":                                "",
	} {
		got := ""
		if budget, found := ParseBudget([]string{text}); found {
			got = budget.Window().String()
		}
		if got != want {
			t.Errorf("%q: %q, not %q", text, got, want)
		}
	}
	if window := (Budget{}).Window(); window != 10*time.Second {
		t.Error(window)
	}
}

func TestAKubefanThatHasJustStartedDoesNotShrinkTheFleet(t *testing.T) {
	known, now := KnownClients{}, time.Unix(1000, 0)
	for _, told := range []struct {
		after       time.Duration
		count, want int
	}{
		{0, 3000, 3000},
		{time.Hour, 7, 3000},
		{5 * time.Minute, 3500, 3500},
		{0, 7, 3500},
		{10*time.Minute - time.Second, 8, 3500},
		{time.Second, 7, 7},
		{0, 8, 8},
	} {
		now = now.Add(told.after)
		if got := known.Note(told.count, now); got != told.want {
			t.Errorf("%d after %v: %d, not %d", told.count, told.after, got, told.want)
		}
	}
}
