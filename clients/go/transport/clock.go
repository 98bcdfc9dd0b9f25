package transport

import "time"

// clock is the time, so that tests can have their own.
type clock interface {
	Now() time.Time
	// AfterFunc runs a function after a time, in a goroutine of its own, unless stop comes first.
	AfterFunc(after time.Duration, run func()) (stop func())
}

// realClock is the system's time.
type realClock struct{}

func (realClock) Now() time.Time { return time.Now() }

func (realClock) AfterFunc(after time.Duration, run func()) func() {
	timer := time.AfterFunc(after, run)
	return func() { timer.Stop() }
}
