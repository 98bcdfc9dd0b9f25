package transport

import (
	"sync"
	"time"

	"kubefan.dev/clients/go/internal/fallback"
)

const (
	// learnedMin is how long a read is sent to the apiserver because kubefan has no cache for it or
	// refuses it. Then kubefan is asked again: it may have a cache now, or the right to read. The
	// time doubles while its answer stays the same.
	learnedMin = 30 * time.Second
	learnedMax = 5 * time.Minute
	// passedOnMax is how many reads in a row the cache must have left to the apiserver before it is
	// taken for one that does not exist. It also leaves single reads of what it has, such as those
	// that come before it has proved that its state is fresh.
	passedOnMax = 3
	// sweptMin is the number of forms from which those that are too old are forgotten.
	sweptMin = 100
)

// learned remembers the forms of reads that kubefan does not answer from a cache.
type learned struct {
	mu    sync.Mutex
	forms map[form]lesson
	// sweepAt is the number of forms at which the next sweep is due.
	sweepAt int
}

// lesson is what the answers of kubefan to reads of one form have shown.
type lesson struct {
	// verdict is uncached or refused. It counts until that time.
	verdict verdict
	until   time.Time
	// lasts is for how long the last answer counts.
	lasts time.Duration
	// passedOn is the number of answers in a row that were the apiserver's.
	passedOn int
	// busy is the row of 429.
	busy fallback.Busy
	// notedAt is the time of the last answer.
	notedAt time.Time
}

// verdictOf returns uncached or refused, or answered if kubefan should be asked.
func (l *learned) verdictOf(of form, now time.Time) verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	if found, ok := l.forms[of]; ok && now.Before(found.until) {
		return found.verdict
	}
	return answered
}

// note remembers an answer that says by itself that kubefan does not answer reads of this form. It
// returns whether that is new.
func (l *learned) note(of form, shown verdict, now time.Time) (isNew bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.forms[of]
	l.keep(of, found.lastingAs(shown, now), now)
	return found.lasts == 0
}

// passedOn counts an answer of the apiserver to a read that kubefan has left to it. It returns
// whether it is learned now that kubefan has no cache.
func (l *learned) passedOn(of form, now time.Time) (isNew bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.forms[of]
	hadLasted := found.lasts
	found.busy = fallback.Busy{}
	if found.passedOn++; found.passedOn >= passedOnMax {
		found = found.lastingAs(uncached, now)
	}
	l.keep(of, found, now)
	return hadLasted == 0 && found.lasts > 0
}

// isBusyForLong counts a 429. It returns true if kubefan has answered nothing else for a while.
func (l *learned) isBusyForLong(of form, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.forms[of]
	lasts := found.busy.Lasts(now)
	l.keep(of, found, now)
	return lasts
}

// answered forgets what was learned: there is a cache.
func (l *learned) answered(of form) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.forms, of)
}

func (l lesson) lastingAs(shown verdict, now time.Time) lesson {
	l.lasts = min(max(2*l.lasts, learnedMin), learnedMax)
	l.verdict, l.until = shown, now.Add(l.lasts)
	return l
}

func (l *learned) keep(of form, made lesson, now time.Time) {
	if l.forms == nil {
		l.forms = map[form]lesson{}
	}
	made.notedAt = now
	l.forms[of] = made
	if len(l.forms) < max(l.sweepAt, sweptMin) {
		return
	}
	for old, found := range l.forms {
		if now.Sub(found.notedAt) > 2*learnedMax {
			delete(l.forms, old)
		}
	}
	l.sweepAt = 2 * len(l.forms)
}
