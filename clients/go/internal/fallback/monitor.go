package fallback

import (
	"context"
	"sync"
	"time"
)

const (
	// ProbeEvery is the time between two probes of a kubefan that is away, a quarter more or less.
	ProbeEvery = 5 * time.Second
	// probeMax bounds a question about kubefan's health.
	probeMax = 3 * time.Second
	// returnMin and returnMax are the time after a return in which watches leave the apiserver.
	returnMin = 2 * time.Second
	returnMax = time.Minute
)

// Settings are what a Monitor needs of its client.
type Settings struct {
	Clock  Clock
	Random func() float64
	// Probe asks kubefan for its health.
	Probe func(context.Context) bool
	// OnSide is called for each change of the side, one call at a time.
	OnSide func(side Side, reason string)
}

// Monitor has the state of kubefan, and probes it while it is away. Between two probes there is a
// timer and no goroutine.
type Monitor struct {
	settings Settings
	health   *Health
	ctx      context.Context
	cancel   context.CancelFunc

	mu      sync.Mutex
	machine Machine
	// changed is closed when reads go to another server.
	changed   chan struct{}
	stopProbe func()
}

// NewMonitor returns a monitor that takes kubefan for healthy.
func NewMonitor(settings Settings) *Monitor {
	ctx, cancel := context.WithCancel(context.Background())
	health := NewHealth(ctx, settings.Probe)
	return &Monitor{settings: settings, health: health, ctx: ctx, cancel: cancel, changed: make(chan struct{})}
}

// View is the state of kubefan as a read finds it.
type View struct {
	IsHealthy bool
	// Epoch is the number of the outage, for Note.
	Epoch uint64
	// Changed is closed when reads go to another server.
	Changed <-chan struct{}
}

// Look returns the state for a read.
func (m *Monitor) Look() View {
	m.mu.Lock()
	defer m.mu.Unlock()
	return View{IsHealthy: m.machine.side == Healthy, Epoch: m.machine.epoch, Changed: m.changed}
}

// Side returns where reads go.
func (m *Monitor) Side() Side {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.side
}

// Note lets the machine take a step, and makes a change known.
func (m *Monitor) Note(reason string, step func(machine *Machine, now time.Time)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx.Err() != nil {
		// The end of the client's own connection says nothing about kubefan.
		return
	}
	before := m.machine.side
	step(&m.machine, m.settings.Clock.Now())
	after := m.machine.side
	m.arm()
	if (before == Healthy) != (after == Healthy) {
		close(m.changed)
		m.changed = make(chan struct{})
	}
	if before != after && m.settings.OnSide != nil {
		m.settings.OnSide(after, reason)
	}
}

// Closed is the context that Close ends.
func (m *Monitor) Closed() context.Context { return m.ctx }

// Close ends the probes and all changes of the side.
func (m *Monitor) Close() {
	m.cancel()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopProbe != nil {
		m.stopProbe()
	}
}

// arm sets the timer of the next probe, unless there is one or none is needed.
func (m *Monitor) arm() {
	if m.machine.side == Healthy || m.stopProbe != nil || m.ctx.Err() != nil {
		return
	}
	after := time.Duration((0.75 + m.settings.Random()/2) * float64(ProbeEvery))
	m.stopProbe = m.settings.Clock.AfterFunc(after, m.probe)
}

// IsServing asks kubefan for its health. It returns false if kubefan does not serve, or does not
// answer in time. The error is that of the context.
func (m *Monitor) IsServing(ctx context.Context) (bool, error) { return m.health.IsServing(ctx) }

func (m *Monitor) probe() {
	isHealthy, _ := m.IsServing(m.ctx)
	reason := "kubefan's health is not SERVING"
	if isHealthy {
		reason = "kubefan's health is SERVING"
	}
	m.Note(reason, func(machine *Machine, now time.Time) {
		m.stopProbe = nil
		machine.Probed(now, isHealthy)
	})
}

// AwaitReturn calls back once at the moment at which a watch leaves the apiserver: a random one
// after a return of kubefan, if kubefan is healthy then. The context ends the wait.
func (m *Monitor) AwaitReturn(ctx context.Context, leave func()) {
	for {
		view := m.Look()
		if !view.IsHealthy {
			select {
			case <-view.Changed:
				continue
			case <-ctx.Done():
				return
			}
		}
		due := make(chan struct{})
		spread := time.Duration(m.settings.Random() * float64(returnMax-returnMin))
		stop := m.settings.Clock.AfterFunc(returnMin+spread, func() { close(due) })
		select {
		case <-due:
			if m.Look().IsHealthy {
				leave()
				return
			}
		case <-view.Changed:
			stop()
		case <-ctx.Done():
			stop()
			return
		}
	}
}
