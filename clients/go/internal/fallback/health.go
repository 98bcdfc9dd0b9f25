package fallback

import (
	"context"
	"sync"
)

// Health asks kubefan whether it serves, once for all that want to know it at the same time. A 5xx
// may be about one read, such as one that kubefan cannot pass on while the apiserver is down.
type Health struct {
	ctx   context.Context
	probe func(context.Context) bool

	mu sync.Mutex
	// running is the question without an answer yet.
	running *question
}

type question struct {
	done      chan struct{}
	isServing bool
}

// NewHealth returns a Health that asks with probe. The context of a question ends after 3 s, or with
// this one.
func NewHealth(ctx context.Context, probe func(context.Context) bool) *Health {
	return &Health{ctx: ctx, probe: probe}
}

// IsServing returns false if kubefan does not serve, or does not answer in time. The error is that
// of the context.
func (h *Health) IsServing(ctx context.Context) (bool, error) {
	asked := h.begin()
	select {
	case <-asked.done:
		return asked.isServing, nil
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
}

func (h *Health) begin() *question {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running == nil {
		h.running = &question{done: make(chan struct{})}
		go h.run(h.running)
	}
	return h.running
}

func (h *Health) run(asked *question) {
	ctx, cancel := context.WithTimeout(h.ctx, probeMax)
	defer cancel()
	asked.isServing = h.probe(ctx)
	h.mu.Lock()
	h.running = nil
	h.mu.Unlock()
	close(asked.done)
}
