package fallback

import "time"

const (
	// HoldMin is for how long kubefan must be healthy before reads return to it.
	HoldMin = 30 * time.Second
	// HoldMax limits the hold of a kubefan that fails soon after each return.
	HoldMax = 10 * time.Minute
)

// Side says where reads go.
type Side int

const (
	// Healthy: reads go to kubefan.
	Healthy Side = iota
	// Away: reads go to the apiserver. kubefan is probed.
	Away
	// Returning: reads go to the apiserver, and kubefan has answered each probe for a while.
	Returning
)

func (s Side) String() string {
	switch s {
	case Healthy:
		return "healthy"
	case Away:
		return "away"
	default:
		return "returning"
	}
}

// Machine decides where reads go. It has no clock and does nothing by itself.
type Machine struct {
	side Side
	// epoch counts the outages and connections, so that an old failure does not begin a new outage.
	epoch uint64
	// returnedAt is the time of the last return.
	returnedAt time.Time
	// healthySince is the time of the first probe in a row that was answered.
	healthySince time.Time
	// hold is for how long probes must be answered in this outage. Zero: one is enough, as nothing
	// has moved and kubefan has not failed soon after a return.
	hold time.Duration
}

// Side returns where reads go.
func (m *Machine) Side() Side { return m.side }

// Epoch returns the number of the outage.
func (m *Machine) Epoch() uint64 { return m.epoch }

// Failed notes that a request which was sent in this epoch found no kubefan.
func (m *Machine) Failed(now time.Time, epoch uint64) {
	if m.side != Healthy || epoch != m.epoch {
		return
	}
	isRelapse := !m.returnedAt.IsZero() && now.Sub(m.returnedAt) < max(2*m.hold, 2*HoldMin)
	switch {
	case !isRelapse:
		m.hold = 0
	case m.hold == 0:
		m.hold = HoldMin
	default:
		m.hold = min(2*m.hold, HoldMax)
	}
	m.side = Away
	m.epoch++
}

// Redialed notes a new connection on which kubefan answers. Failures of the old one count no more.
func (m *Machine) Redialed() { m.epoch++ }

// Moved notes that the apiserver has answered a read. From then on kubefan must be healthy for a
// while: a watch that moved should not move again soon.
func (m *Machine) Moved() {
	if m.side != Healthy {
		m.hold = max(m.hold, HoldMin)
	}
}

// Probed notes the outcome of a probe.
func (m *Machine) Probed(now time.Time, isHealthy bool) {
	if m.side == Healthy {
		return
	}
	if !isHealthy {
		m.side = Away
		return
	}
	if m.side == Away {
		m.side, m.healthySince = Returning, now
	}
	if now.Sub(m.healthySince) >= m.hold {
		m.side, m.returnedAt = Healthy, now
	}
}
