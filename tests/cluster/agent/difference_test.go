package main

import (
	"net/http"
	"testing"
	"time"
)

var start = time.Unix(0, 0)

// recordOf makes a record of a list at version 10, and of these events, a second apart.
func recordOf(events ...event) *record {
	made := &record{state: map[string]uint64{}, cached: 1}
	_ = made.Replace(nil, "10")
	for i, event := range events {
		event.at = start.Add(time.Duration(i) * time.Second)
		made.events = append(made.events, event)
		made.newest = event.version
		made.state[event.key] = event.version
	}
	return made
}

func added(key string, version uint64) event { return event{kind: "ADDED", key: key, version: version} }

func TestEqualRecordsDoNotDiffer(t *testing.T) {
	found := compareRecords(recordOf(added("a", 11), added("b", 12)), recordOf(added("a", 11), added("b", 12)))
	if problems := found.problems(limits{}); len(problems) != 0 || found.Events != 2 {
		t.Errorf("%q, %d events", problems, found.Events)
	}
}

func TestALostEventIsFoundThoughTheStateIsEqual(t *testing.T) {
	found := compareRecords(recordOf(added("a", 11), added("a", 12)), recordOf(added("a", 12)))
	if len(found.Lost) != 1 || len(found.Differs) != 0 {
		t.Errorf("%+v", found)
	}
}

func TestARepeatedAndAReorderedEventAreFound(t *testing.T) {
	found := compareRecords(recordOf(added("a", 11), added("b", 12)), recordOf(added("a", 11), added("b", 12), added("a", 11)))
	if len(found.Repeated) != 1 || len(found.Reordered) != 1 {
		t.Errorf("%+v", found)
	}
}

func TestAnEventThatOnlyKubefanSentIsFound(t *testing.T) {
	found := compareRecords(recordOf(added("a", 11)), recordOf(added("a", 11), added("b", 12)))
	if len(found.Unknown) != 1 || len(found.Differs) != 1 {
		t.Errorf("%+v", found)
	}
}

func TestAListReplacesTheEventsBeforeIt(t *testing.T) {
	through := recordOf(added("a", 11))
	_ = through.Replace(nil, "13")
	through.state = map[string]uint64{"a": 11, "b": 12, "c": 13}
	found := compareRecords(recordOf(added("a", 11), added("b", 12), added("c", 13)), through)
	if found.Replaced != 2 || found.Relists != 1 || len(found.Lost) != 0 {
		t.Errorf("%+v", found)
	}
	if len(found.problems(limits{relists: 0})) == 0 {
		t.Error("a list that the limits do not allow is no problem")
	}
}

func TestLatenessIsMeasuredPerEvent(t *testing.T) {
	direct, through := recordOf(added("a", 11), added("b", 12)), recordOf(added("a", 11), added("b", 12))
	through.events[1].at = through.events[1].at.Add(7 * time.Second)
	found := compareRecords(direct, through)
	if found.LateMost != 7*time.Second || len(found.problems(limits{late: 5 * time.Second})) == 0 {
		t.Errorf("%+v", found)
	}
}

func TestAnAnswerThatWasPassedOnIsNotOfTheCache(t *testing.T) {
	for value, expected := range map[string]bool{
		"": false, "kubefan; hit": true, "kubefan; fwd=bypass": false, "cdn; fwd=miss, kubefan;hit": true, "cdn; hit": false,
	} {
		if isOfCache(http.Header{"Cache-Status": {value}}) != expected {
			t.Errorf("%q", value)
		}
	}
	through := recordOf(added("a", 11))
	through.cached, through.forwarded = 0, 1
	if problems := compareRecords(recordOf(added("a", 11)), through).problems(limits{}); len(problems) != 1 {
		t.Errorf("a stream that no cache has answered has the problems %q", problems)
	}
}
