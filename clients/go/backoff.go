package kubefan

import (
	"math/rand/v2"
	"time"
)

// BackoffOptions are the delays between retries. 0 means the default, which is that of client-go's
// reflector.
type BackoffOptions struct {
	// Initial is the first delay, before jitter. Default: 800 ms.
	Initial time.Duration
	// Max is the longest delay, before jitter. Default: 30 s.
	Max time.Duration
	// Factor is the factor between two delays. Default: 2.
	Factor float64
	// Jitter is the largest jitter, as a fraction of the delay. Default: 1, so that a delay of 30 s
	// becomes 30 s to 60 s. Without it, all clients of a failed server would return at one moment: 0
	// means the default here too, and a test that needs equal delays sets a fraction such as 1e-9.
	// means the default here too, and a test that needs equal delays sets a fraction such as 1e-9.
	Jitter float64
	// ResetAfter: a failure this long after the end of the previous delay starts again with Initial.
	// Default: 2 minutes.
	ResetAfter time.Duration
}

func (o BackoffOptions) withDefaults() BackoffOptions {
	if o.Initial <= 0 {
		o.Initial = 800 * time.Millisecond
	}
	if o.Max <= 0 {
		o.Max = 30 * time.Second
	}
	if o.Factor <= 0 {
		o.Factor = 2
	}
	if o.Jitter <= 0 {
		o.Jitter = 1
	}
	if o.ResetAfter <= 0 {
		o.ResetAfter = 2 * time.Minute
	}
	return o
}

type backoff struct {
	options      BackoffOptions
	next         time.Duration
	healthySince time.Time
	random       func() float64
}

func newBackoff(options BackoffOptions) *backoff {
	options = options.withDefaults()
	return &backoff{options: options, next: options.Initial, random: rand.Float64}
}

// delay returns the delay after a failure at now. It is never shorter than retryAfter.
func (b *backoff) delay(now time.Time, retryAfter time.Duration) time.Duration {
	if b.healthySince.IsZero() || now.Sub(b.healthySince) >= b.options.ResetAfter {
		b.next = b.options.Initial
	}
	base := b.next
	b.next = min(time.Duration(b.options.Factor*float64(base)), b.options.Max)
	delay := max(base+time.Duration(b.options.Jitter*b.random()*float64(base)), retryAfter)
	b.healthySince = now.Add(delay)
	return delay
}
