package transport

import (
	"context"
	"slices"
	"sync"
	"time"

	"kubefan.dev/clients/go/internal/fallback"
)

// gate spaces the reads that a program starts at the apiserver while kubefan is away.
//
// The hazard is a fleet whose clients all turn to the apiserver at once: it would make one outage
// into two. So each client has one start in each window, and the first window begins at a random
// moment. All clients together then stay within the rate of the budget, without knowing of each
// other. A read whose caller has a state waits for one window more, so that those without a state
// go first, in the whole fleet and in each client.
//
// A program of a small fleet may have many reads and short windows. It may start those of its next
// windows at once, but all clients together only those of burstMax. Then it pauses for as many
// windows.
type gate struct {
	clock  fallback.Clock
	random func() float64

	mu     sync.Mutex
	budget Budget
	known  fallback.KnownClients
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

// burstMax limits how far the starts of all clients may be ahead of the rate.
const burstMax = 10 * time.Second

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

func newGate(clock fallback.Clock, random func() float64, budget Budget) *gate {
	return &gate{clock: clock, random: random, budget: budget.withDefaults()}
}

// setBudget takes the budget that kubefan tells. A moment that was chosen before comes no later
// than the new window allows.
func (g *gate) setBudget(budget Budget) {
	g.mu.Lock()
	defer g.mu.Unlock()
	budget.Clients = g.known.Note(budget.Clients, g.clock.Now())
	if budget == g.budget {
		return
	}
	g.budget = budget
	g.next = earlier(g.next, g.clock.Now().Add(budget.window()))
	g.laterFrom = earlier(g.laterFrom, g.next.Add(budget.window()))
	g.arm()
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// wait waits for the moment of a start. It returns false if changed comes first, and an error if
// the context ends first.
func (g *gate) wait(ctx context.Context, hasState bool, changed <-chan struct{}) (bool, error) {
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

func (g *gate) enter(hasState bool) *start {
	g.mu.Lock()
	defer g.mu.Unlock()
	now, window := g.clock.Now(), g.budget.window()
	if g.isIdle() && !now.Before(g.next) {
		g.next = now.Add(time.Duration(g.random() * float64(window)))
		g.laterFrom = g.next.Add(window)
	}
	made := &start{admitted: make(chan struct{}), overtakenUntil: now.Add(2 * window)}
	if hasState {
		g.later = append(g.later, made)
	} else {
		g.first = append(g.first, made)
	}
	g.arm()
	return made
}

func (g *gate) leave(gone *start) {
	g.mu.Lock()
	defer g.mu.Unlock()
	isGone := func(other *start) bool { return other == gone }
	g.first, g.later = slices.DeleteFunc(g.first, isGone), slices.DeleteFunc(g.later, isGone)
	g.arm()
}

func (g *gate) isIdle() bool { return len(g.first)+len(g.later) == 0 }

// arm sets the timer to the next start.
func (g *gate) arm() {
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

// admit lets the starts pass whose moment has come.
func (g *gate) admit(due *timer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer != due {
		return
	}
	g.timer = nil
	now, window := g.clock.Now(), g.budget.window()
	most := max(1, int(burstMax/window))
	admitted := 0
	for ; admitted < most; admitted++ {
		passing := g.take(now)
		if passing == nil {
			break
		}
		close(passing.admitted)
	}
	// Not from due.at: a start that came late would be followed by the next one at once.
	g.next = now.Add(time.Duration(admitted) * window)
	g.arm()
}

// take removes the start that is next, or returns nil if none may pass now. Callers without a state
// go first, and alternate with one that they have overtaken for two windows.
func (g *gate) take(now time.Time) *start {
	mayPass := len(g.later) > 0 && !now.Before(g.laterFrom)
	isOverdue := mayPass && !now.Before(g.later[0].overtakenUntil) && !g.wasLater
	from := &g.first
	g.wasLater = mayPass && (isOverdue || len(g.first) == 0)
	if g.wasLater {
		from = &g.later
	}
	if len(*from) == 0 {
		return nil
	}
	passing := (*from)[0]
	*from = (*from)[1:]
	return passing
}
