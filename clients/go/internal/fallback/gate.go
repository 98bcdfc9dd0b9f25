package fallback

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Gate spaces the reads that a client starts at the apiserver while kubefan is away.
//
// The hazard is a fleet whose clients all turn to the apiserver at once: it would make one outage
// into two. So each client has one start in each window, and the first window begins at a random
// moment. All clients together then stay within the rate of the budget, without knowing of each
// other. A read whose caller has a state waits for one window more, so that those without a state
// go first, in the whole fleet and in each client. One that they have overtaken for two windows
// takes turns with them: a program that reads again and again would otherwise keep its watches from
// resuming.
type Gate struct {
	clock  Clock
	random func() float64

	mu     sync.Mutex
	budget Budget
	known  KnownClients
	// next is the next start.
	next time.Time
	// laterFrom is the first start for a caller with a state.
	laterFrom time.Time
	// first and later are those that wait: without and with a state.
	first, later []*start
	// wasLater: the last start was one with a state.
	wasLater bool
	// timer is set while some wait.
	timer *timer
}

// start is a read that waits for its moment.
type start struct {
	admitted chan struct{}
	// overtakenUntil is the time until which reads of callers without a state go first.
	overtakenUntil time.Time
}

// timer runs once, unless it is replaced.
type timer struct {
	at   time.Time
	stop func()
}

// NewGate returns a gate with this budget. The random numbers are in [0, 1).
func NewGate(clock Clock, random func() float64, budget Budget) *Gate {
	return &Gate{clock: clock, random: random, budget: budget}
}

// SetBudget takes the budget that kubefan tells. Starts that wait keep their moment.
func (g *Gate) SetBudget(budget Budget) {
	g.mu.Lock()
	defer g.mu.Unlock()
	budget.Clients = g.known.Note(budget.Clients, g.clock.Now())
	g.budget = budget
}

// Wait waits for the moment of a start. It returns false if changed comes first, and an error if
// the context ends first.
func (g *Gate) Wait(ctx context.Context, hasState bool, changed <-chan struct{}) (bool, error) {
	made := g.enter(hasState)
	select {
	case <-made.admitted:
		return true, nil
	case <-changed:
		g.leave(made)
		return false, nil
	case <-ctx.Done():
		g.leave(made)
		return false, context.Cause(ctx)
	}
}

func (g *Gate) enter(hasState bool) *start {
	g.mu.Lock()
	defer g.mu.Unlock()
	now, window := g.clock.Now(), g.budget.Window()
	made := &start{admitted: make(chan struct{}), overtakenUntil: now.Add(2 * window)}
	if g.isIdle() && !now.Before(g.next) {
		g.next = now.Add(time.Duration(g.random() * float64(window)))
		g.laterFrom = g.next.Add(window)
	}
	if hasState {
		g.later = append(g.later, made)
	} else {
		g.first = append(g.first, made)
	}
	g.arm()
	return made
}

func (g *Gate) leave(gone *start) {
	g.mu.Lock()
	defer g.mu.Unlock()
	isGone := func(other *start) bool { return other == gone }
	g.first, g.later = slices.DeleteFunc(g.first, isGone), slices.DeleteFunc(g.later, isGone)
	g.arm()
}

func (g *Gate) isIdle() bool { return len(g.first)+len(g.later) == 0 }

// arm sets the timer to the next start.
func (g *Gate) arm() {
	at := g.next
	if len(g.first) == 0 && at.Before(g.laterFrom) {
		at = g.laterFrom
	}
	if g.timer != nil && !g.isIdle() && g.timer.at.Equal(at) {
		return
	}
	if g.timer != nil {
		g.timer.stop()
		g.timer = nil
	}
	if g.isIdle() {
		return
	}
	made := &timer{at: at}
	made.stop = g.clock.AfterFunc(at.Sub(g.clock.Now()), func() { g.admit(made) })
	g.timer = made
}

// admit lets the first start pass.
func (g *Gate) admit(due *timer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer != due {
		return
	}
	g.timer = nil
	now := g.clock.Now()
	close(g.take(now).admitted)
	// Not from due.at: a start that came late would be followed by the next one at once.
	g.next = now.Add(g.budget.Window())
	g.arm()
}

// take removes the start that is next.
func (g *Gate) take(now time.Time) *start {
	isOverdue := len(g.later) > 0 && !now.Before(g.laterFrom) && !now.Before(g.later[0].overtakenUntil) && !g.wasLater
	g.wasLater = isOverdue || len(g.first) == 0
	from := &g.first
	if g.wasLater {
		from = &g.later
	}
	passing := (*from)[0]
	*from = (*from)[1:]
	return passing
}
