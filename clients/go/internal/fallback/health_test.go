package fallback

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
)

func TestTheHealthIsAskedOnceForReadsThatFailTogether(t *testing.T) {
	asked, answer := atomic.Int32{}, make(chan struct{})
	shared := NewHealth(t.Context(), func(context.Context) bool {
		asked.Add(1)
		<-answer
		return true
	})
	first, second := shared.begin(), shared.begin()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := shared.IsServing(gone); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(answer)
	<-first.done
	if second != first || asked.Load() != 1 {
		t.Error(asked.Load(), "questions")
	}
	if isServing, err := shared.IsServing(t.Context()); !isServing || err != nil || asked.Load() != 2 {
		t.Error("an old answer counts", isServing, err)
	}
}
