package transport

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-logr/logr"

	"kubefan.dev/clients/go/internal/fallback"
)

const (
	// directWatchesEndWithin is the time after a return in which watches at the apiserver end.
	directWatchesEndWithin = time.Minute
	// directWatchesEndAfter is the shortest time. client-go lists after a watch that ends without
	// an event in the first second after its state, and the state of a large collection takes a
	// while.
	directWatchesEndAfter = 15 * time.Second
)

// kubefan answers the reads of all clients of one Attach.
type kubefan struct {
	router     router
	connection *connection
	monitor    *monitor
	health     *fallback.Health
	gate       *gate
	learned    learned
	direct     directWatches
	address    string
	logger     logr.Logger
	// waits: reads wait while kubefan is away.
	waits bool
	environment
}

// serve answers a read: from kubefan, or from the apiserver if kubefan has no answer.
func (k *kubefan) serve(request *http.Request, asked read, direct http.RoundTripper) (*http.Response, error) {
	waits := k.waits || asked.isOnlyForKubefan
	// news is what kubefan's answer to this read has shown.
	known, news, isPaced := answered, answered, false
	if !asked.isOnlyForKubefan {
		known = k.learned.verdictOf(asked.form, k.clock.Now())
	}
	for {
		now := k.monitor.look()
		switch {
		case known != answered && !isPaced:
			Reads.Increment(request.Context(), "apiserver", known.String())
			response, err := direct.RoundTrip(request)
			return k.learn(asked, news, response), err
		case known != answered || !now.isHealthy:
			isAdmitted, err := k.wait(request.Context(), asked, waits && known == answered, now)
			if err != nil {
				return nil, err
			}
			if !isAdmitted {
				continue
			}
			response, err := k.fallBack(request, asked, known, direct)
			return k.learn(asked, news, response), err
		}
		response, shown, err := k.ask(request, asked, now.epoch)
		hasNoCache := shown == missing || shown == unanswered
		switch {
		case err != nil:
			return nil, err
		case response == nil && (shown != silent || waits):
			continue
		case shown == answered, shown == uncached:
			return response, nil
		case hasNoCache && asked.isOnlyForKubefan, !hasNoCache && waits:
			return response, nil
		}
		if response != nil {
			_ = response.Body.Close()
		}
		known, news = shown, shown
		if hasNoCache {
			known = uncached
		}
		// Only the first read of a kind is paced: while kubefan is healthy, no fleet turns to the
		// apiserver at once. What kubefan itself has no cache for needs no pace: another kubefan
		// would forward it.
		isPaced = !hasNoCache || authorOf(response.Header) != ofKubefan
	}
}

// learnFrom remembers whether kubefan has a cache for reads like this one.
func (k *kubefan) learnFrom(response *http.Response, asked read, shown verdict) {
	isOfCache := authorOf(response.Header) == ofCache && response.StatusCode != http.StatusTooManyRequests
	switch {
	case isOfCache && shown == answered:
		k.learned.answered(asked.form)
	case shown == uncached:
		k.countPassedOn(asked)
	}
}

// countPassedOn counts a read that the apiserver has answered instead of the cache. A watch that
// resumes says nothing: its version may only be too old for the cache.
func (k *kubefan) countPassedOn(asked read) {
	isResume := asked.isWatch && asked.hasState
	if !isResume && !asked.isOnlyForKubefan && k.learned.passedOn(asked.form, k.clock.Now()) {
		k.logLearned(asked, uncached)
	}
}

// logLearned says that reads of one form go to the apiserver while kubefan is healthy.
func (k *kubefan) logLearned(asked read, shown verdict) {
	k.logger.Info("kubefan has no answer: one kind of read goes to the apiserver", "kubefan", k.address,
		"verb", asked.form.verb, "resource", asked.form.resource.name, "reason", shown.String())
}

// learn remembers that kubefan has no answer where the apiserver has one. If that refuses too, it
// is the caller's own mistake or lack of a right, which may end soon.
func (k *kubefan) learn(asked read, news verdict, response *http.Response) *http.Response {
	if response == nil || response.StatusCode >= 300 {
		return response
	}
	switch news {
	case unanswered:
		k.countPassedOn(asked)
	case missing:
		k.noteLasting(asked, uncached)
	case refused:
		k.noteLasting(asked, refused)
	}
	return response
}

func (k *kubefan) noteLasting(asked read, known verdict) {
	if k.learned.note(asked.form, known, k.clock.Now()) {
		k.logLearned(asked, known)
	}
}

// ask sends a read to kubefan. The error is that of the caller's context; without one and without a
// response, kubefan is away, or serves and is silent about this read. A 429 is an answer, until
// there was no other one for a while.
func (k *kubefan) ask(request *http.Request, asked read, epoch uint64) (*http.Response, verdict, error) {
	path, _ := k.router.pathOf(request.URL)
	response, cancel, err := k.connection.ask(toKubefan(request, asked), path)
	if err != nil {
		if request.Context().Err() != nil {
			return nil, broken, err
		}
		Reads.Increment(request.Context(), "kubefan", "unreachable")
		isServing := false
		if errors.Is(err, errNoAnswer) {
			// kubefan may wait for an apiserver that is down, such as for a review of the caller.
			if isServing, err = k.health.IsServing(request.Context()); err != nil {
				return nil, silent, err
			}
			err = errNoAnswer
		}
		if isServing {
			return nil, silent, nil
		}
		k.fails(epoch, err.Error())
		return nil, broken, nil
	}
	k.readBudget(response)
	released := body{ReadCloser: response.Body, release: cancel}
	response.Body = &released
	shown := verdictOf(response)
	Reads.Increment(request.Context(), "kubefan", shown.String())
	if shown == busy && !k.learned.isBusyForLong(asked.form, k.clock.Now()) {
		shown = answered
	}
	isAway, err := k.isAway(request.Context(), response, shown, epoch)
	if isAway || err != nil {
		_ = released.Close()
		return nil, shown, err
	}
	k.learnFrom(response, asked, shown)
	if asked.isWatch {
		response.Body = &kubefanWatch{body: released, caller: request.Context()}
	}
	return response, shown, nil
}

// toKubefan returns the request for kubefan. It forwards no read that the apiserver can answer
// itself.
func toKubefan(request *http.Request, asked read) *http.Request {
	if asked.isOnlyForKubefan {
		return request
	}
	made := request.Clone(request.Context())
	made.Header.Add("Cache-Control", onlyIfCached)
	return made
}

// isAway tells whether an answer shows that kubefan is away.
func (k *kubefan) isAway(ctx context.Context, response *http.Response, shown verdict, epoch uint64) (bool, error) {
	if !isDoubtful(response, shown) {
		return false, nil
	}
	isServing, err := k.health.IsServing(ctx)
	if err != nil || isServing {
		return false, err
	}
	k.fails(epoch, fmt.Sprint("answer ", response.StatusCode))
	return true, nil
}

// isDoubtful tells whether an answer may be of a kubefan that does not serve, or of something in
// its place.
func isDoubtful(response *http.Response, shown verdict) bool {
	isRefusal := shown == missing || shown == refused
	return shown == broken || shown == busy || isRefusal && authorOf(response.Header) == unknown
}

func (k *kubefan) fails(epoch uint64, reason string) {
	k.monitor.note(reason, func(machine *fallback.Machine, now time.Time) { machine.Failed(now, epoch) })
}

// wait waits until a read may start at the apiserver. It returns false if kubefan is to be asked
// first.
func (k *kubefan) wait(ctx context.Context, asked read, waits bool, now view) (bool, error) {
	done := k.monitor.use()
	defer done()
	if waits {
		select {
		case <-now.changed:
			return false, nil
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
	since := k.clock.Now()
	isAdmitted, err := k.gate.wait(ctx, asked.hasState, now.changed)
	if isAdmitted {
		Wait.Observe(ctx, k.clock.Now().Sub(since))
	}
	return isAdmitted, err
}

// fallBack starts a read at the apiserver. A watch ends after kubefan's return.
func (k *kubefan) fallBack(request *http.Request, asked read, known verdict, direct http.RoundTripper) (*http.Response, error) {
	reason := "away"
	if known != answered {
		reason = known.String()
	}
	Reads.Increment(request.Context(), "apiserver", reason)
	// A watch that kubefan does not answer stays: it would come back.
	if !asked.isWatch || known == refused || known == uncached {
		response, err := direct.RoundTrip(request)
		k.noteMoved(response)
		return response, err
	}
	ctx, cancel := context.WithCancel(request.Context())
	response, err := direct.RoundTrip(request.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	k.noteMoved(response)
	done := k.monitor.use()
	made := &directWatch{body: body{ReadCloser: response.Body}, cancel: cancel}
	made.release = func() {
		cancel()
		k.direct.remove(made)
		done()
	}
	k.direct.add(made)
	response.Body = made
	if k.monitor.look().isHealthy {
		// kubefan has returned meanwhile, or could only not answer this one.
		k.endSoon(made)
	}
	return response, nil
}

// noteMoved notes an answer of the apiserver. While the apiserver is away too, no read moves, and
// reads return to kubefan with its first answer.
func (k *kubefan) noteMoved(response *http.Response) {
	if response != nil && response.StatusCode < http.StatusInternalServerError {
		k.monitor.note("", func(machine *fallback.Machine, _ time.Time) { machine.Moved() })
	}
}

// endDirectWatches ends the watches at the apiserver after a return.
func (k *kubefan) endDirectWatches() {
	for _, watch := range k.direct.all() {
		k.endSoon(watch)
	}
}

// endSoon ends a watch at the apiserver at a random moment. If kubefan is away again by then, it
// stays.
func (k *kubefan) endSoon(watch *directWatch) {
	spread := time.Duration(k.random() * float64(directWatchesEndWithin-directWatchesEndAfter))
	k.clock.AfterFunc(directWatchesEndAfter+spread, func() {
		if k.monitor.look().isHealthy {
			watch.end()
		}
	})
}

// isServing asks for the health.
func (k *kubefan) isServing() bool {
	isServing, _ := k.health.IsServing(context.Background())
	return isServing
}

// readBudget believes only answers of the cache: others may have the header from another server.
func (k *kubefan) readBudget(response *http.Response) {
	if found, ok := budgetOf(response.Header); ok && authorOf(response.Header) == ofCache {
		k.gate.setBudget(found)
	}
}
