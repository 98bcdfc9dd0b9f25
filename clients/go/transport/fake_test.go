package transport

import (
	"slices"
	"sync"
	"time"
)

// fakeClock is a time that moves only by advance.
type fakeClock struct {
	mu      sync.Mutex
	now     time.Time
	pending []*fakeTimer
	// armed is told of each new timer, as far as there is room.
	armed chan time.Duration
	// quick is the longest time of timers that need no advance. Zero: all need one.
	quick time.Duration
}

type fakeTimer struct {
	at  time.Time
	run func()
}

func newFakeClock() *fakeClock {
	return &fakeClock{now: time.Unix(1_000_000, 0), armed: make(chan time.Duration, 1000)}
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) AfterFunc(after time.Duration, run func()) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	made := &fakeTimer{at: c.now.Add(after), run: run}
	if c.quick > 0 && after <= c.quick {
		if made.at.After(c.now) {
			c.now = made.at
		}
		go run()
		return func() {}
	}
	c.pending = append(c.pending, made)
	select {
	case c.armed <- after:
	default:
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pending = slices.DeleteFunc(c.pending, func(other *fakeTimer) bool { return other == made })
	}
}

// advance runs what is due, in the order of time, also what that sets.
func (c *fakeClock) advance(by time.Duration) {
	c.mu.Lock()
	end := c.now.Add(by)
	c.mu.Unlock()
	for {
		c.mu.Lock()
		due := (*fakeTimer)(nil)
		for _, pending := range c.pending {
			if !pending.at.After(end) && (due == nil || pending.at.Before(due.at)) {
				due = pending
			}
		}
		if due == nil {
			c.now = end
			c.mu.Unlock()
			return
		}
		c.pending = slices.DeleteFunc(c.pending, func(other *fakeTimer) bool { return other == due })
		if due.at.After(c.now) {
			c.now = due.at
		}
		c.mu.Unlock()
		due.run()
	}
}

// count returns the number of timers.
func (c *fakeClock) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending)
}
