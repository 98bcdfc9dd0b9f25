package fallback

import (
	"testing"
	"time"
)

// steps runs a machine, and checks its side after each step.
type steps struct {
	*testing.T
	machine Machine
	now     time.Time
}

func newSteps(t *testing.T) *steps {
	return &steps{T: t, now: time.Unix(1000, 0)}
}

func (s *steps) after(d time.Duration) *steps { s.now = s.now.Add(d); return s }
func (s *steps) fails() *steps                { s.machine.Failed(s.now, s.machine.epoch); return s }
func (s *steps) moves() *steps                { s.machine.Moved(); return s }
func (s *steps) probe(ok bool) *steps         { s.machine.Probed(s.now, ok); return s }

func (s *steps) is(want Side) *steps {
	s.Helper()
	if s.machine.side != want {
		s.Fatalf("%v, not %v: %+v", s.machine.side, want, s.machine)
	}
	return s
}

func TestOneFailureMovesReadsAndOneProbeReturnsThemIfNoneHasMoved(t *testing.T) {
	s := newSteps(t).is(Healthy).fails().is(Away)
	s.after(time.Second).probe(false).is(Away).probe(true).is(Healthy)
}

func TestReadsThatMovedReturnAfterKubefanWasHealthyForAWhile(t *testing.T) {
	s := newSteps(t).fails().moves().probe(true).is(Returning)
	s.after(HoldMin - 1).probe(true).is(Returning)
	s.after(1).probe(true).is(Healthy)
}

func TestAFailedProbeBeginsTheHoldAnew(t *testing.T) {
	s := newSteps(t).fails().moves().probe(true).is(Returning)
	s.after(HoldMin - 1).probe(false).is(Away)
	s.after(time.Second).probe(true).is(Returning).after(HoldMin - 1).probe(true).is(Returning).after(1).probe(true).is(Healthy)
}

func TestAKubefanThatFailsSoonAfterEachReturnIsHeldLonger(t *testing.T) {
	s := newSteps(t).fails().probe(true).is(Healthy)
	for _, hold := range []time.Duration{HoldMin, 2 * HoldMin, 4 * HoldMin, 8 * HoldMin, 16 * HoldMin, HoldMax, HoldMax} {
		s.after(time.Second).fails().probe(true).is(Returning)
		s.after(hold - 1).probe(true).is(Returning).after(1).probe(true).is(Healthy)
	}
	s.after(2 * HoldMax).fails().probe(true).is(Healthy)
}

func TestAnOldFailureBeginsNoOutage(t *testing.T) {
	s := newSteps(t)
	old := s.machine.epoch
	s.fails().probe(true).is(Healthy)
	s.machine.Failed(s.now, old)
	s.is(Healthy)
}

func TestAProbeOfAHealthyKubefanChangesNothing(t *testing.T) {
	newSteps(t).probe(false).is(Healthy).probe(true).is(Healthy).moves().fails().probe(true).is(Healthy)
}
