package transport

import "time"

const (
	// holdMin is for how long kubefan must be healthy before reads return to it.
	holdMin = 30 * time.Second
	// holdMax limits the hold of a kubefan that fails soon after each return.
	holdMax = 10 * time.Minute
)

// side says where reads go.
type side int

const (
	// healthy: reads go to kubefan.
	healthy side = iota
	// away: reads go to the apiserver. kubefan is probed.
	away
	// returning: reads go to the apiserver, and kubefan has answered each probe for a while.
	returning
)

func (s side) String() string {
	switch s {
	case healthy:
		return "healthy"
	case away:
		return "away"
	default:
		return "returning"
	}
}

// machine decides where reads go. It has no clock and does nothing by itself.
type machine struct {
	side side
	// epoch counts the outages, so that an old failure does not begin a new one.
	epoch uint64
	// returnedAt is the time of the last return.
	returnedAt time.Time
	// healthySince is the time of the first probe in a row that was answered.
	healthySince time.Time
	// hold is for how long probes must be answered in this outage. Zero: one is enough, as no watch
	// has moved and kubefan has not failed soon after a return.
	hold time.Duration
}

// failed notes that a request which was sent in this epoch found no kubefan.
func (m *machine) failed(now time.Time, epoch uint64) {
	if m.side != healthy || epoch != m.epoch {
		return
	}
	isRelapse := !m.returnedAt.IsZero() && now.Sub(m.returnedAt) < max(2*m.hold, 2*holdMin)
	switch {
	case !isRelapse:
		m.hold = 0
	case m.hold == 0:
		m.hold = holdMin
	default:
		m.hold = min(2*m.hold, holdMax)
	}
	m.side = away
	m.epoch++
}

// moved notes that a read was started at the apiserver. From then on kubefan must be healthy for a
// while: a watch that moved should not move again soon.
func (m *machine) moved() {
	if m.side != healthy {
		m.hold = max(m.hold, holdMin)
	}
}

// probed notes the outcome of a probe.
func (m *machine) probed(now time.Time, isHealthy bool) {
	if m.side == healthy {
		return
	}
	if !isHealthy {
		m.side = away
		return
	}
	if m.side == away {
		m.side, m.healthySince = returning, now
	}
	if now.Sub(m.healthySince) >= m.hold {
		m.side, m.returnedAt = healthy, now
	}
}
