package transport

import (
	"context"
	"sync"
	"time"
)

// ReadMetric counts the reads that a cache may answer, by the server that was asked ("kubefan" or
// "apiserver") and by the outcome:
//
//   - of kubefan: "answered", "uncached" (it has passed the read on), "unanswered" (504: its cache
//     has no answer), "missing" (404), "refused" (401 and 403), "busy" (429), "broken" (5xx) and
//     "unreachable"
//   - of the apiserver: the reason why it was asked, "uncached", "refused", "busy", "broken",
//     "silent" (no answer of a kubefan that serves) or "away"
type ReadMetric interface {
	Increment(ctx context.Context, server, outcome string)
}

// StateMetric has the state of the kubefan at an address: "healthy", "away" or "returning". Reads
// go to it if it is healthy.
type StateMetric interface {
	Set(address, state string)
}

// WaitMetric observes how long a read has waited for its start at the apiserver.
type WaitMetric interface {
	Observe(ctx context.Context, waited time.Duration)
}

var (
	// Reads is the metric of reads. Register sets it.
	Reads ReadMetric = noMetric{}
	// State is the metric of kubefan's state. Register sets it.
	State StateMetric = noMetric{}
	// Wait is the metric of waits. Register sets it.
	Wait WaitMetric = noMetric{}

	registered sync.Once
)

// RegisterOpts are the metrics to register. Those that are nil stay unset.
type RegisterOpts struct {
	Reads ReadMetric
	State StateMetric
	Wait  WaitMetric
}

// Register sets the metrics of all transports in this program. Only the first call counts. It must
// be made before the first Attach.
func Register(opts RegisterOpts) {
	registered.Do(func() {
		if opts.Reads != nil {
			Reads = opts.Reads
		}
		if opts.State != nil {
			State = opts.State
		}
		if opts.Wait != nil {
			Wait = opts.Wait
		}
	})
}

type noMetric struct{}

func (noMetric) Increment(context.Context, string, string) {}
func (noMetric) Set(string, string)                        {}
func (noMetric) Observe(context.Context, time.Duration)    {}
