package transport

import (
	"testing"
	"time"
)

// steps runs a machine, and says its side after each step.
type steps struct {
	*testing.T
	machine machine
	now     time.Time
}

func newSteps(t *testing.T) *steps {
	return &steps{T: t, now: time.Unix(1000, 0)}
}

func (s *steps) after(d time.Duration) *steps { s.now = s.now.Add(d); return s }
func (s *steps) fails() *steps                { s.machine.failed(s.now, s.machine.epoch); return s }
func (s *steps) moves() *steps                { s.machine.moved(); return s }
func (s *steps) probe(ok bool) *steps         { s.machine.probed(s.now, ok); return s }

func (s *steps) is(want side) *steps {
	s.Helper()
	if s.machine.side != want {
		s.Fatalf("%v, not %v: %+v", s.machine.side, want, s.machine)
	}
	return s
}

func TestOneFailureMovesReadsAndOneProbeReturnsThemIfNoneHasMoved(t *testing.T) {
	s := newSteps(t).is(healthy).fails().is(away)
	s.after(time.Second).probe(false).is(away).probe(true).is(healthy)
}

func TestReadsThatMovedReturnAfterKubefanWasHealthyForAWhile(t *testing.T) {
	s := newSteps(t).fails().moves().probe(true).is(returning)
	s.after(holdMin - 1).probe(true).is(returning)
	s.after(1).probe(true).is(healthy)
}

func TestAFailedProbeBeginsTheHoldAnew(t *testing.T) {
	s := newSteps(t).fails().moves().probe(true).is(returning)
	s.after(holdMin - 1).probe(false).is(away)
	s.after(time.Second).probe(true).is(returning).after(holdMin - 1).probe(true).is(returning).after(1).probe(true).is(healthy)
}

func TestAKubefanThatFailsSoonAfterEachReturnIsHeldLonger(t *testing.T) {
	s := newSteps(t).fails().probe(true).is(healthy)
	for _, hold := range []time.Duration{holdMin, 2 * holdMin, 4 * holdMin, 8 * holdMin, 16 * holdMin, holdMax, holdMax} {
		s.after(time.Second).fails().probe(true).is(returning)
		s.after(hold - 1).probe(true).is(returning).after(1).probe(true).is(healthy)
	}
	s.after(2 * holdMax).fails().probe(true).is(healthy)
}

func TestAnOldFailureBeginsNoOutage(t *testing.T) {
	s := newSteps(t)
	old := s.machine.epoch
	s.fails().probe(true).is(healthy)
	s.machine.failed(s.now, old)
	s.is(healthy)
}

func TestAProbeOfAHealthyKubefanChangesNothing(t *testing.T) {
	newSteps(t).probe(false).is(healthy).probe(true).is(healthy).moves().fails().probe(true).is(healthy)
}
