package transport

import (
	"net/http"
	"testing"
	"time"
)

func TestTheBudgetOfAnAnswerIsReadOrIgnoredAsAWhole(t *testing.T) {
	for _, row := range []struct {
		lines  []string
		window time.Duration
	}{
		{[]string{"clients=3000, rate=50"}, time.Minute},
		{[]string{"rate=0.5,clients=1"}, 2 * time.Second},
		{[]string{"clients=10", "rate=10"}, time.Second},
		{[]string{"clients=1;x=2, rate=1;y, other=7, flag"}, time.Second},
		{[]string{"clients=5, clients=1, rate=1"}, time.Second},
		{nil, 0},
		{[]string{""}, 0},
		{[]string{"clients=3000"}, 0},
		{[]string{"rate=50"}, 0},
		{[]string{"clients=0, rate=50"}, 0},
		{[]string{"clients=1, rate=0"}, 0},
		{[]string{"clients=-1, rate=1"}, 0},
		{[]string{"clients=1.5, rate=1"}, 0},
		{[]string{"clients=1, rate=-1"}, 0},
		{[]string{"clients=1, rate=Inf"}, 0},
		{[]string{"clients=1, rate=1e9"}, 0},
		{[]string{"clients=99999999999999999999, rate=1"}, 0},
		{[]string{`clients="1", rate=1`}, 0},
		{[]string{"Clients=1, rate=1"}, 0},
	} {
		found, ok := budgetOf(http.Header{budgetHeader: row.lines})
		if ok != (row.window > 0) || ok && found.window() != row.window {
			t.Errorf("%q: %+v %v", row.lines, found, ok)
		}
	}
}

func TestAWindowStaysInTheRangeOfTheClock(t *testing.T) {
	if got := (Budget{Clients: 1 << 30, StartsPerSecond: 1e-300}).window(); got != windowMax {
		t.Error(got)
	}
	if got := (Budget{}).withDefaults().window(); got != time.Second {
		t.Error(got)
	}
}
