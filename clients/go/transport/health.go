package transport

import (
	"context"
	"sync"
)

// health asks kubefan whether it serves, once for all that want to know it at the same time. A 5xx
// may be about one read, such as one that kubefan cannot pass on while the apiserver is down.
type health struct {
	probe func(context.Context) bool

	mu sync.Mutex
	// running is the question without an answer yet.
	running *healthCheck
}

type healthCheck struct {
	done      chan struct{}
	isServing bool
}

// isServing returns false if kubefan does not serve, or does not answer within probeMax. The error
// is that of the context.
func (h *health) isServing(ctx context.Context) (bool, error) {
	asked := h.begin()
	select {
	case <-asked.done:
		return asked.isServing, nil
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
}

func (h *health) begin() *healthCheck {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running == nil {
		h.running = &healthCheck{done: make(chan struct{})}
		go h.run(h.running)
	}
	return h.running
}

func (h *health) run(asked *healthCheck) {
	ctx, cancel := context.WithTimeout(context.Background(), probeMax)
	defer cancel()
	asked.isServing = h.probe(ctx)
	h.mu.Lock()
	h.running = nil
	h.mu.Unlock()
	close(asked.done)
}
