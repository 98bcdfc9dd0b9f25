// Package fallback decides when a client reads from the apiserver instead of kubefan, and how
// often. docs/clients-fallback.md is its contract.
package fallback

import "time"

// Clock is the time, so that tests can have their own.
type Clock interface {
	Now() time.Time
	// AfterFunc runs a function after a time, in a goroutine of its own, unless stop comes first.
	AfterFunc(after time.Duration, run func()) (stop func())
}

// RealClock is the system's time.
type RealClock struct{}

// Now returns the present time.
func (RealClock) Now() time.Time { return time.Now() }

// AfterFunc runs a function after a time.
func (RealClock) AfterFunc(after time.Duration, run func()) func() {
	timer := time.AfterFunc(after, run)
	return func() { timer.Stop() }
}
