package fallback

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"kubefan.dev/clients/go/internal/fakeclock"
)

func TestAKubefanThatIsAwayIsProbedUntilItReturns(t *testing.T) {
	clock := fakeclock.New()
	isServing, probes, sides := false, 0, []string{}
	monitor := NewMonitor(Settings{
		Clock: clock, Random: func() float64 { return 0.5 },
		Probe:  func(context.Context) bool { probes++; return isServing },
		OnSide: func(side Side, reason string) { sides = append(sides, fmt.Sprint(side, ": ", reason)) },
	})
	defer monitor.Close()
	clock.Advance(time.Hour)
	if probes != 0 {
		t.Error("a healthy kubefan is probed")
	}
	before := monitor.Look()
	monitor.Note("gone", func(machine *Machine, now time.Time) { machine.Failed(now, before.Epoch); machine.Moved() })
	<-before.Changed
	clock.Advance(20 * time.Second)
	if probes != 4 || monitor.Look().IsHealthy {
		t.Error(probes)
	}
	away := monitor.Look()
	isServing = true
	clock.Advance(35 * time.Second)
	<-away.Changed
	if !monitor.Look().IsHealthy || clock.Timers() != 0 {
		t.Error(clock.Timers(), "timers are left")
	}
	want := []string{
		"away: gone", "returning: kubefan's health is SERVING", "healthy: kubefan's health is SERVING",
	}
	if !slices.Equal(sides, want) {
		t.Error(sides)
	}
}

func TestAWatchLeavesTheApiserverAtARandomMomentAfterTheReturn(t *testing.T) {
	clock := fakeclock.New()
	monitor := NewMonitor(Settings{Clock: clock, Random: func() float64 { return 0.5 }})
	defer monitor.Close()
	left := make(chan time.Duration, 1)
	begin := clock.Now()
	go monitor.AwaitReturn(t.Context(), func() { left <- clock.Now().Sub(begin) })
	<-clock.Armed
	clock.Advance(time.Hour)
	if after := <-left; after < 31*time.Second {
		t.Error(after)
	}
}
