package transport

import (
	"fmt"
	"testing"
	"time"

	"kubefan.dev/clients/go/internal/fallback"
)

var (
	podForm  = form{resource: resource{name: "pods"}}
	nodeForm = form{resource: resource{name: "nodes"}}
)

func TestAnAnswerThatIsPassedOnTeachesOnlyWithOthersInARow(t *testing.T) {
	known, now := &learned{}, time.Unix(0, 0)
	for range passedOnMax - 1 {
		known.passedOn(podForm, now)
	}
	known.answered(podForm)
	for range passedOnMax {
		if got := known.verdictOf(podForm, now); got != answered {
			t.Fatal(got)
		}
		known.passedOn(podForm, now)
	}
	if known.verdictOf(podForm, now) != uncached || known.verdictOf(nodeForm, now) != answered {
		t.Error("not what was noted", known.forms)
	}
}

func TestWhatIsLearnedIsAskedAgainMoreAndMoreSeldom(t *testing.T) {
	for name, learn := range map[string]func(known *learned, now time.Time){
		"passed on": func(known *learned, now time.Time) {
			for range passedOnMax {
				if known.passedOn(podForm, now); known.verdictOf(podForm, now) != answered {
					return
				}
			}
		},
		"refused": func(known *learned, now time.Time) { known.note(podForm, refused, now) },
	} {
		t.Run(name, func(t *testing.T) {
			known, now := &learned{}, time.Unix(0, 0)
			for _, lasts := range []time.Duration{learnedMin, 2 * learnedMin, 4 * learnedMin, 8 * learnedMin, learnedMax, learnedMax} {
				learn(known, now)
				now = now.Add(lasts - 1)
				if known.verdictOf(podForm, now) == answered {
					t.Error("forgotten before ", lasts)
				}
				now = now.Add(1)
				if known.verdictOf(podForm, now) != answered {
					t.Error("remembered after ", lasts)
				}
			}
		})
	}
}

func TestBusyForLongIsOfOneFormAndInARow(t *testing.T) {
	known, now := &learned{}, time.Unix(0, 0)
	for _, step := range []struct {
		after   time.Duration
		between func(form)
		want    bool
	}{
		{0, nil, false}, {fallback.BusyMax - 1, nil, false}, {1, nil, true}, {fallback.BusyPause, nil, true},
		{fallback.BusyPause + 1, nil, false}, {fallback.BusyMax, nil, true},
		{1, known.answered, false}, {fallback.BusyMax, nil, true},
		{1, func(of form) { known.passedOn(of, now) }, false}, {fallback.BusyMax, nil, true},
	} {
		now = now.Add(step.after)
		if step.between != nil {
			step.between(podForm)
		}
		known.answered(nodeForm)
		if got := known.isBusyForLong(podForm, now); got != step.want {
			t.Errorf("%+v: %v", step.after, got)
		}
	}
}

func TestOldFormsAreForgotten(t *testing.T) {
	known, now := &learned{}, time.Unix(0, 0)
	for number := range 10 * sweptMin {
		now = now.Add(time.Minute)
		known.note(form{namespace: fmt.Sprint(number)}, refused, now)
	}
	if len(known.forms) > sweptMin {
		t.Error(len(known.forms), "are kept")
	}
}

func TestAFormIsNewUntilKubefanAnswersIt(t *testing.T) {
	known, now := &learned{}, time.Unix(0, 0)
	for number := range 2 * passedOnMax {
		if isNew := known.passedOn(podForm, now); isNew != (number == passedOnMax-1) {
			t.Error("passed on", number, isNew)
		}
	}
	if !known.note(nodeForm, refused, now) || known.note(nodeForm, refused, now.Add(learnedMin)) {
		t.Error("not new, or new again")
	}
	known.answered(nodeForm)
	if !known.note(nodeForm, refused, now) {
		t.Error("not new after an answer")
	}
}
