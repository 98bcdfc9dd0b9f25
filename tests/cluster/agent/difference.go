package main

import (
	"fmt"
	"slices"
	"time"
)

// difference is how a stream through kubefan differs from a direct one of the same objects.
type difference struct {
	Resource string `json:"resource"`
	Media    string `json:"media"`
	// Events of the direct stream that came through kubefan too.
	Events int `json:"events"`
	// Events that only the direct stream has, although no list of the other one replaced them.
	Lost []string `json:"lost"`
	// Events that came twice, and events older than one before them.
	Repeated  []string `json:"repeated"`
	Reordered []string `json:"reordered"`
	// Events that only the stream through kubefan has.
	Unknown []string `json:"unknown"`
	// Objects whose version differs at the end.
	Differs []string `json:"differs"`
	// Those of them that a later list replaced, as after a 410 Gone.
	Replaced int `json:"replaced"`
	// Lists after the first one.
	Relists int `json:"relists"`
	// How much later than directly the events came, or the lists that replaced them: the median, and the
	// most with its event.
	LateMedian time.Duration `json:"lateMedian"`
	LateMost   time.Duration `json:"lateMost"`
	Latest     string        `json:"latest"`
	// Lists and watches that kubefan answered from its caches, and those that it passed on.
	Cached    int `json:"cached"`
	Forwarded int `json:"forwarded"`
	// Requests that failed, and the last failure.
	Errors    int    `json:"errors"`
	LastError string `json:"lastError"`
}

// Findings that a report names; the rest is counted only.
const namedMax = 20

type identity struct {
	kind    string
	key     string
	version uint64
}

func (e event) identity() identity { return identity{e.kind, e.key, e.version} }

func (i identity) String() string { return fmt.Sprintf("%s %s %d", i.kind, i.key, i.version) }

// compareRecords compares a record with the direct one.
//
// Both begin with a list, at versions of their own, so events up to the newer one are not compared. A
// list that came later replaces the events since the newest version before it. Versions are numbers
// that grow with each write, for objects of one resource (KEP 5504).
func compareRecords(direct, through *record) difference {
	found := difference{Cached: through.cached, Forwarded: through.forwarded, Errors: through.errors, LastError: through.lastError}
	if len(direct.listings) == 0 || len(through.listings) == 0 {
		found.Differs = []string{fmt.Sprintf("no list yet: %d directly, %d through kubefan", len(direct.listings), len(through.listings))}
		return found
	}
	found.Relists = len(through.listings) - 1
	start := max(direct.listings[0].version, through.listings[0].version)

	arrived := map[identity]time.Time{}
	var newest uint64
	for _, event := range through.events {
		id := event.identity()
		if _, twice := arrived[id]; twice {
			found.Repeated = name(found.Repeated, id)
		} else {
			arrived[id] = event.at
		}
		if event.version < newest {
			found.Reordered = name(found.Reordered, id)
		}
		newest = max(newest, event.version)
	}

	var late []time.Duration
	expected := map[identity]bool{}
	for _, event := range direct.events {
		id := event.identity()
		expected[id] = true
		if event.version <= start {
			continue
		}
		at, came := arrived[id]
		if !came {
			list := replacement(through, event.version)
			if list == nil {
				found.Lost = name(found.Lost, id)
				continue
			}
			found.Replaced++
			at = list.at
		}
		found.Events++
		late = append(late, at.Sub(event.at))
		if late[len(late)-1] > found.LateMost {
			found.LateMost, found.Latest = late[len(late)-1], id.String()
		}
	}
	if len(late) > 0 {
		slices.Sort(late)
		found.LateMedian = late[len(late)/2]
	}
	for _, event := range through.events {
		if event.version > start && !expected[event.identity()] && replacement(direct, event.version) == nil {
			found.Unknown = name(found.Unknown, event.identity())
		}
	}
	for key, version := range direct.state {
		if through.state[key] != version {
			found.Differs = append(found.Differs, fmt.Sprintf("%s is at %d, and through kubefan at %d", key, version, through.state[key]))
		}
	}
	for key, version := range through.state {
		if _, exists := direct.state[key]; !exists {
			found.Differs = append(found.Differs, fmt.Sprintf("%s is deleted, and through kubefan at %d", key, version))
		}
	}
	return found
}

// replacement returns the list after the first one that stands for the event of this version, if any.
func replacement(record *record, version uint64) *listing {
	for i := range record.listings[1:] {
		if list := &record.listings[i+1]; list.after < version && version <= list.version {
			return list
		}
	}
	return nil
}

func name(named []string, id identity) []string {
	if len(named) == namedMax {
		return named
	}
	return append(named, id.String())
}
