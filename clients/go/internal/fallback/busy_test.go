package fallback

import (
	"testing"
	"time"
)

func TestOnlyARowOfBusyAnswersLasts(t *testing.T) {
	begin := time.Unix(1000, 0)
	for name, row := range map[string]struct {
		at   []time.Duration
		want bool
	}{
		"one answer":              {[]time.Duration{0}, false},
		"a short row":             {[]time.Duration{0, BusyMax - 1}, false},
		"a long row":              {[]time.Duration{0, BusyMax - 1, BusyMax}, true},
		"two within the pause":    {[]time.Duration{0, BusyPause}, true},
		"two far apart":           {[]time.Duration{0, BusyPause + 1}, false},
		"a row after an old row":  {[]time.Duration{0, BusyMax, BusyMax + BusyPause + 1, 2*BusyMax + BusyPause}, false},
		"a long one after an old": {[]time.Duration{0, BusyPause + 1, BusyPause + 1 + BusyMax}, true},
	} {
		it, got := Busy{}, false
		for _, at := range row.at {
			got = it.Lasts(begin.Add(at))
		}
		if got != row.want {
			t.Error(name, got)
		}
	}
}
