package transport

import (
	"sync"
	"time"
)

// learnedFor is how long a read is sent to the apiserver because kubefan has no cache for it or
// refuses it. Then kubefan is asked again: it may have a cache now, or the right to read.
const learnedFor = 5 * time.Minute

// learned remembers the forms of reads that kubefan does not answer from a cache.
type learned struct {
	mu    sync.Mutex
	forms map[form]lesson
}

// lesson is what an answer of kubefan has shown.
type lesson struct {
	verdict verdict
	until   time.Time
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

// note remembers an answer, and forgets what is too old.
func (l *learned) note(of form, shown verdict, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for old, found := range l.forms {
		if !now.Before(found.until) {
			delete(l.forms, old)
		}
	}
	if l.forms == nil {
		l.forms = map[form]lesson{}
	}
	l.forms[of] = lesson{verdict: shown, until: now.Add(learnedFor)}
}
