package kubefan

import (
	"context"
	"errors"
	"testing"
	"time"

	"kubefan.dev/clients/go/internal/fakeclock"
)

func TestStreamsEndIfKubefanIsSilentAndDoesNotAnswer(t *testing.T) {
	clock := fakeclock.New()
	answers, checks, failures := true, 0, 0
	silent := &silence{
		clock: clock, failed: func() { failures++ },
		check: func(context.Context) bool { checks++; return answers },
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	done := silent.watch(cancel)
	for range 10 {
		clock.Advance(time.Second)
		silent.heard()
	}
	if checks != 0 {
		t.Error("a kubefan that sends is asked")
	}
	clock.Advance(2*silenceMax + time.Second)
	if checks != 2 || ctx.Err() != nil {
		t.Error(checks, ctx.Err())
	}
	answers = false
	clock.Advance(silenceMax)
	if failures != 1 || !errors.Is(context.Cause(ctx), errHangs) {
		t.Error(failures, context.Cause(ctx))
	}
	done()
	clock.Advance(time.Minute)
	if checks != 3 || clock.Timers() != 0 {
		t.Error("a client without streams asks:", checks, clock.Timers())
	}
}
