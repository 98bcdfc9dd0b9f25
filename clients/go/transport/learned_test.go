package transport

import (
	"testing"
	"time"
)

func TestWhatKubefanDoesNotCacheIsLearnedForAWhileAndForgotten(t *testing.T) {
	known, now := &learned{}, time.Unix(0, 0)
	pods, nodes := form{resource: resource{name: "pods"}}, form{resource: resource{name: "nodes"}}
	known.note(pods, uncached, now)
	if known.verdictOf(pods, now) != uncached || known.verdictOf(nodes, now) != answered {
		t.Error("not what was noted")
	}
	now = now.Add(learnedFor)
	known.note(nodes, refused, now)
	if known.verdictOf(pods, now) != answered || known.verdictOf(nodes, now) != refused || len(known.forms) != 1 {
		t.Error("not what was noted last", known.forms)
	}
}
