package transport

import (
	"sync"
	"time"

	"github.com/go-logr/logr"

	"kubefan.dev/clients/go/internal/fallback"
)

// unusedMax is for how long kubefan is probed although nothing is read. A program that has ended
// its reads is left alone.
const unusedMax = 5 * time.Minute

// monitor has the state of kubefan, and probes it while it is away. Between two probes there is a
// timer and no goroutine, because a transport does not learn when its program stops to use it.
type monitor struct {
	address  string
	fallback string
	logger   logr.Logger
	clock    fallback.Clock
	random   func() float64
	// isServing asks kubefan for its health.
	isServing func() bool
	// returned is called when reads return to kubefan.
	returned func()

	mu      sync.Mutex
	machine fallback.Machine
	// changed is closed when reads go to another server.
	changed   chan struct{}
	isProbing bool
	// users are reads that wait and watches of the apiserver; usedAt is the last sign of one.
	users  int
	usedAt time.Time
}

// view is the state of kubefan as a read finds it.
type view struct {
	isHealthy bool
	epoch     uint64
	changed   <-chan struct{}
}

// look returns the state for a read.
func (m *monitor) look() view {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.usedAt = m.clock.Now()
	m.arm()
	return view{isHealthy: m.machine.Side() == fallback.Healthy, epoch: m.machine.Epoch(), changed: m.changed}
}

// use keeps the probes going until done is called.
func (m *monitor) use() (done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.users++
	return sync.OnceFunc(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.users--
		m.usedAt = m.clock.Now()
	})
}

// note lets the machine take a step, and makes a change known.
func (m *monitor) note(reason string, step func(*fallback.Machine, time.Time)) {
	before, after := m.step(step)
	// Without the lock: a log sink or a metric may read through the same client.
	if before != after {
		State.Set(m.address, after.String())
	}
	if (before == fallback.Healthy) == (after == fallback.Healthy) {
		return
	}
	m.log(after, reason)
	if after == fallback.Healthy {
		m.returned()
	}
}

func (m *monitor) step(step func(*fallback.Machine, time.Time)) (before, after fallback.Side) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before = m.machine.Side()
	step(&m.machine, m.clock.Now())
	after = m.machine.Side()
	m.arm()
	if (before == fallback.Healthy) != (after == fallback.Healthy) {
		close(m.changed)
		m.changed = make(chan struct{})
	}
	return before, after
}

func (m *monitor) log(to fallback.Side, reason string) {
	if to == fallback.Healthy {
		m.logger.Info("Reads return to kubefan", "kubefan", m.address)
	} else {
		m.logger.Info("kubefan is away: "+m.fallback, "kubefan", m.address, "reason", reason)
	}
}

// arm sets the timer of the next probe, unless there is one or none is needed.
func (m *monitor) arm() {
	isUsed := m.users > 0 || m.clock.Now().Sub(m.usedAt) < unusedMax
	if m.machine.Side() == fallback.Healthy || m.isProbing || !isUsed {
		return
	}
	m.isProbing = true
	m.clock.AfterFunc(time.Duration((0.75+m.random()/2)*float64(fallback.ProbeEvery)), m.probeOnce)
}

func (m *monitor) probeOnce() {
	isHealthy := m.isServing()
	m.note("a probe failed", func(machine *fallback.Machine, now time.Time) {
		m.isProbing = false
		machine.Probed(now, isHealthy)
	})
}
