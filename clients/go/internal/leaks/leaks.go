// Package leaks checks that a test leaves no goroutine.
package leaks

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// waitAtMost is more than a goroutine needs to end on a busy machine. goleak alone waits for less
// than half a second, but a connection's readers end only when they see that the other side has.
const waitAtMost = 30 * time.Second

// Check fails the test if goroutines that it started still run after it, and after the cleanups that
// it registers later.
func Check(t testing.TB, ignored ...goleak.Option) {
	t.Helper()
	t.Cleanup(func() {
		var err error
		for end := time.Now().Add(waitAtMost); time.Now().Before(end); {
			if err = goleak.Find(ignored...); err == nil {
				return
			}
		}
		t.Error(err)
	})
}
