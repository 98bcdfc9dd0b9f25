// Package fakeclock is a time for tests that moves only when the test says so.
package fakeclock

import (
	"slices"
	"sync"
	"time"
)

// Clock is a time that moves only by Advance.
type Clock struct {
	// Quick is the longest time of timers that need no Advance. Below 0, the default: all need one.
	Quick time.Duration
	// Armed is told of each timer that needs one.
	Armed chan time.Duration

	mu      sync.Mutex
	now     time.Time
	pending []*timer
}

type timer struct {
	at  time.Time
	run func()
}

// New returns a clock.
func New() *Clock {
	return &Clock{now: time.Unix(1_000_000, 0), Armed: make(chan time.Duration, 10_000), Quick: -1}
}

// Now returns the time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc runs a function when the time has moved so far.
func (c *Clock) AfterFunc(after time.Duration, run func()) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if after <= c.Quick {
		c.now = c.now.Add(max(after, 0))
		go run()
		return func() {}
	}
	made := &timer{at: c.now.Add(after), run: run}
	c.Armed <- after
	c.pending = append(c.pending, made)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pending = slices.DeleteFunc(c.pending, func(other *timer) bool { return other == made })
	}
}

// Advance runs what is due, in the order of time, also what that sets.
func (c *Clock) Advance(by time.Duration) {
	c.mu.Lock()
	end := c.now.Add(by)
	c.mu.Unlock()
	for {
		due := c.next(end)
		if due == nil {
			return
		}
		due.run()
	}
}

func (c *Clock) next(end time.Time) *timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	due := (*timer)(nil)
	for _, pending := range c.pending {
		if !pending.at.After(end) && (due == nil || pending.at.Before(due.at)) {
			due = pending
		}
	}
	if due == nil {
		c.now = end
		return nil
	}
	c.pending = slices.DeleteFunc(c.pending, func(other *timer) bool { return other == due })
	if due.at.After(c.now) {
		c.now = due.at
	}
	return due
}

// Timers returns the number of timers.
func (c *Clock) Timers() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending)
}
