package fallback

import "time"

const (
	// BusyMax is for how long kubefan may answer nothing but "later" to reads of one kind. A cache
	// that starts answers so for some seconds.
	BusyMax = 10 * time.Second
	// BusyPause is the longest time between two "later" in a row. Clients ask again within a minute.
	BusyPause = 2 * time.Minute
)

// Busy is a row of answers to reads of one kind that ask to come back later. Each kind has its own:
// one cache that never gets ready, or one limit, says nothing about the others.
type Busy struct{ since, at time.Time }

// Lasts notes such an answer. It returns true if there was no other one for a while.
func (b *Busy) Lasts(now time.Time) bool {
	// Messages of open streams are no answers here, so only time can end an old row.
	if now.Sub(b.at) > BusyPause {
		b.since = now
	}
	b.at = now
	return now.Sub(b.since) >= BusyMax
}
