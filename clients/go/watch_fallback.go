package kubefan

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// shortStream is the life of a stream that was never open.
const shortStream = time.Second

// errLeave is the cause of a watch of the apiserver that ends because kubefan is back.
var errLeave = errors.New("kubefan is back")

// watchFallback is the part of a watch that reads from the apiserver. The zero value is for a watch
// that never does.
type watchFallback struct {
	reads *fallbackReads
	// queue has items that are not yet returned: of a list.
	queue []WatchItem
	// direct is the watch of the apiserver; nil while kubefan is read.
	direct *directWatch
	// directAt is the time of the next attempt after an error of the apiserver.
	directAt time.Time
	// refusedUntil is the time for which kubefan has no answer for this watch: refusedFor after its
	// start at the apiserver.
	refusedUntil time.Time
	refusedFor   time.Duration
	// isRefusedForGood: kubefan will have no answer later either.
	isRefusedForGood bool
	// hadState: the caller has a state, although the version has expired.
	hadState bool
	// barred: the apiserver has refused this watch in the outage barredIn.
	barred   bool
	barredIn uint64
	// openEpoch is the number of the outage before the attempt to open the stream of kubefan.
	openEpoch uint64
	// isFresh: that stream has not brought a message.
	isFresh bool
	// at has the objects whose events at one version were returned.
	at atVersion
}

// directWatch is a watch of the apiserver.
type directWatch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	// events is nil before the watch is opened, after a list.
	events ApiserverWatch
	// openedAt is the time at which events was set.
	openedAt time.Time
}

// atVersion knows which objects had an event at the last version. Several events may have one
// version, and the apiserver knows no place between them.
type atVersion struct {
	version string
	keys    map[string]struct{}
	// moved: the server has changed since, so events of this version may come again.
	moved bool
}

// accepts notes an event. It returns false for one that was returned before.
func (a *atVersion) accepts(event *api.Event) bool {
	key := event.GetNamespace() + "/" + event.GetName()
	if event.GetResourceVersion() != a.version {
		a.version, a.moved = event.GetResourceVersion(), false
		clear(a.keys)
	}
	if _, found := a.keys[key]; found && a.moved {
		return false
	}
	if a.keys == nil {
		a.keys = map[string]struct{}{}
	}
	a.keys[key] = struct{}{}
	return true
}

// fromVersion is the version to watch the apiserver from. After some events of a version it is the
// one before, so that the others are sent. A place in a version proves that there are others.
func (a *atVersion) fromVersion(resumeVersion string) string {
	version, place, _ := strings.Cut(resumeVersion, ".")
	isKnown := version == a.version && len(a.keys) > 0
	if place == "end" || place == "" && !isKnown {
		return version
	}
	number, err := strconv.ParseUint(version, 10, 64)
	if err != nil || number < 2 {
		return version
	}
	return strconv.FormatUint(number-1, 10)
}

// goesDirect tells whether the watch reads from the apiserver now.
func (w *WatchStream) goesDirect() bool {
	if w.reads == nil {
		return false
	}
	view := w.reads.monitor.Look()
	if view.IsHealthy {
		return time.Now().Before(w.refusedUntil)
	}
	return !w.barred || w.barredIn != view.Epoch
}

// openNoted makes an attempt to open a stream of kubefan, and notes its outcome. It also returns
// whether the watch goes on at the apiserver.
func (w *WatchStream) openNoted() (goesOn bool, err error) {
	if w.reads != nil {
		w.openEpoch = w.reads.monitor.Look().Epoch
	}
	err = w.open()
	w.isFresh = err == nil
	return w.noteOpened(err), err
}

// noteFresh notes a stream that ended without a message, soon after it was opened: the headers of a
// refusal may arrive before its status.
func (w *WatchStream) noteFresh(err error) {
	if w.isFresh && time.Since(w.openedAt) < shortStream {
		w.noteOpened(err)
	}
}

func (w *WatchStream) heard() {
	if w.client.fallback != nil {
		w.client.fallback.silence.heard()
	}
}

func (w *WatchStream) learn(header metadata.MD) {
	if w.client.fallback != nil {
		w.client.fallback.learn(header)
	}
}

func (w *WatchStream) rememberResource(resource *api.ResolvedResource) {
	if w.reads != nil {
		w.reads.remember(w.target, resource)
	}
}

// noteOpened notes the outcome of an attempt to open a stream of kubefan. It returns true if the
// watch goes on at the apiserver.
func (w *WatchStream) noteOpened(err error) bool {
	if w.reads == nil || w.ctx.Err() != nil {
		return false
	}
	if err == nil {
		w.reads.note(w.ctx, formOf("watch", w.target), nil, w.openEpoch)
		return false
	}
	failure := errorOf(err, w.client.address)
	switch w.reads.note(w.ctx, formOf("watch", w.target), failure, w.openEpoch) {
	case verdictAway:
		return w.goesDirect()
	case verdictRefused:
		w.refuse(failure)
		return true
	default:
		return false
	}
}

// openDirect waits for the moment of a start at the apiserver, and makes it.
func (w *WatchStream) openDirect() (item WatchItem, done bool, _ error) {
	if err := w.options.check(w.client.address); err != nil {
		w.end()
		return WatchItem{}, true, err
	}
	view := w.reads.monitor.Look()
	changed := view.Changed
	if view.IsHealthy {
		// kubefan has no answer for this watch: its state does not matter.
		changed = nil
	}
	ctx, cancel := w.untilDeadline()
	defer cancel()
	if wait := time.Until(w.directAt); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-changed:
			return WatchItem{}, false, nil
		case <-ctx.Done():
			return w.waitEnded()
		}
	}
	isAdmitted, err := w.reads.waitForStart(ctx, w.resumeVersion != "" || w.hadState, changed)
	switch {
	case err != nil:
		return w.waitEnded()
	case !isAdmitted:
		return WatchItem{}, false, nil
	}
	direct := &directWatch{}
	direct.ctx, direct.cancel = context.WithCancelCause(w.ctx)
	w.direct = direct
	// Before the requests are sent: an apiserver that hangs must not keep the watch from kubefan.
	leave := func() { direct.cancel(errLeave) }
	if view.IsHealthy {
		w.refusedUntil = time.Now().Add(w.refusedFor)
		stop := w.reads.clock.AfterFunc(time.Until(w.refusedUntil), leave)
		context.AfterFunc(direct.ctx, stop)
	} else {
		go w.reads.monitor.AwaitReturn(direct.ctx, leave)
	}
	if !w.deadline.IsZero() {
		timer := time.AfterFunc(time.Until(w.deadline), func() { direct.cancel(context.DeadlineExceeded) })
		context.AfterFunc(direct.ctx, func() { timer.Stop() })
	}
	if w.resumeVersion == "" {
		err = w.listDirect()
	} else {
		err = w.watchDirect()
	}
	w.reads.noteMoved(err)
	if err != nil {
		return w.directEnded(direct, err)
	}
	if w.broken {
		w.broken = false
		return w.item(WatchItem{Kind: ItemReconnected}), true, nil
	}
	return WatchItem{}, false, nil
}

// untilDeadline is the context of the watch, until its timeout.
func (w *WatchStream) untilDeadline() (context.Context, context.CancelFunc) {
	if w.deadline.IsZero() {
		return context.WithCancel(w.ctx)
	}
	return context.WithDeadline(w.ctx, w.deadline)
}

// waitEnded ends a wait whose context has ended: that of the watch, or by its timeout.
func (w *WatchStream) waitEnded() (item WatchItem, done bool, _ error) {
	if w.ctx.Err() != nil {
		return WatchItem{}, false, nil // Next returns the error of the context.
	}
	w.end()
	return WatchItem{}, true, io.EOF
}

// listDirect reads the state. The watch that follows is part of the same start.
func (w *WatchStream) listDirect() error {
	list, err := w.reads.apiserver.List(w.direct.ctx, w.reads.read(w.target, w.options.Projection))
	if err != nil {
		return err
	}
	begin := WatchItem{Kind: ItemSnapshotBegin, ResourceVersion: wholeVersion(list.ResourceVersion), Resource: list.Resource}
	w.queue = append(w.queue, begin)
	for _, object := range list.Objects {
		w.queue = append(w.queue, WatchItem{Kind: ItemEvent, Event: &api.Event{
			Type: api.EventType_EVENT_TYPE_ADDED, Namespace: object.GetNamespace(), Name: object.GetName(),
			Uid: object.GetUid(), ResourceVersion: object.GetResourceVersion(), Object: object.GetObject(),
		}})
	}
	end := WatchItem{Kind: ItemSnapshotEnd, ObjectCount: int64(len(list.Objects)), ResumeVersion: list.ResourceVersion}
	w.queue = append(w.queue, end)
	return nil
}

func wholeVersion(version string) string {
	whole, _, _ := strings.Cut(version, ".")
	return whole
}

// watchDirect opens the watch from the last version.
func (w *WatchStream) watchDirect() error {
	read := w.reads.read(w.target, w.options.Projection)
	read.ResourceVersion = w.at.fromVersion(w.resumeVersion)
	events, err := w.reads.apiserver.Watch(w.direct.ctx, read)
	if err != nil {
		return err
	}
	w.direct.events, w.direct.openedAt, w.at.moved = events, time.Now(), true
	return nil
}

// nextQueued returns the next item of a list.
func (w *WatchStream) nextQueued() WatchItem {
	item := w.queue[0]
	w.queue[0] = WatchItem{}
	w.queue = w.queue[1:]
	if item.Kind == ItemSnapshotEnd {
		// The apiserver does not tell the cluster.
		w.resumeVersion, w.cluster, w.hadState = item.ResumeVersion, "", false
		w.at, w.baseIsCurrent = atVersion{}, false
	}
	return w.item(item)
}

// nextDirect waits for the next item of the apiserver.
func (w *WatchStream) nextDirect() (item WatchItem, done bool, _ error) {
	direct := w.direct
	if direct.events == nil {
		if err := w.watchDirect(); err != nil {
			return w.directEnded(direct, err)
		}
	}
	event, bookmark, err := direct.events.Next()
	if err != nil {
		return w.directEnded(direct, err)
	}
	w.baseIsCurrent = false
	if event == nil {
		w.resumeVersion = bookmark + versionEnd
		return w.item(WatchItem{Kind: ItemBookmark}), true, nil
	}
	if !w.at.accepts(event) {
		return WatchItem{}, false, nil
	}
	w.resumeVersion = event.GetResourceVersion()
	return w.item(WatchItem{Kind: ItemEvent, Event: event}), true, nil
}

// directEnded handles the end of the apiserver's watch.
func (w *WatchStream) directEnded(direct *directWatch, err error) (item WatchItem, done bool, _ error) {
	cause := context.Cause(direct.ctx)
	w.dropDirect()
	isOver := !w.deadline.IsZero() && !time.Now().Before(w.deadline)
	switch {
	case w.ctx.Err() != nil:
		return WatchItem{}, false, nil // Next returns the error of the context.
	case isOver:
		w.end()
		return WatchItem{}, true, io.EOF
	case errors.Is(cause, errLeave):
		w.retryAt, w.refusedUntil = time.Time{}, time.Time{}
		return WatchItem{}, false, nil
	case errors.Is(err, io.EOF):
		if time.Since(direct.openedAt) < shortStream {
			w.directAt = time.Now().Add(w.backoff.delay(time.Now(), 0))
		}
		return WatchItem{}, false, nil
	}
	failure := errorOf(err, w.client.address)
	view := w.reads.monitor.Look()
	switch {
	case failure.IsExpired():
		item, done, err = w.failed(failure)
		// With short windows, an apiserver that always says so would be asked for lists without a
		// pause.
		w.directAt = w.retryAt
		return item, done, err
	case failure.IsRetryable():
	case view.IsHealthy && w.isRefusedForGood && failure.Code != codes.Unauthenticated:
		// Neither has an answer.
		w.end()
		return WatchItem{}, true, failure
	case view.IsHealthy:
		// kubefan may have an answer now, or the file of the token another one.
		w.refusedUntil = time.Time{}
	default:
		w.barred, w.barredIn = true, view.Epoch
	}
	retryIn := w.backoff.delay(time.Now(), failure.RetryAfter)
	w.directAt = time.Now().Add(retryIn)
	w.retryAt = w.directAt
	w.broken = true
	return w.item(WatchItem{Kind: ItemDisconnected, Err: failure, RetryIn: retryIn}), true, nil
}

// dropDirect ends the apiserver's watch.
func (w *WatchStream) dropDirect() {
	if w.direct == nil {
		return
	}
	w.direct.cancel(nil)
	if w.direct.events != nil {
		w.direct.events.Close()
	}
	w.direct, w.queue = nil, nil
	// What follows comes from another server.
	w.at.moved = true
}

// isRefused tells whether the error is one of kubefan that the apiserver may not have, and lets the
// watch go on there.
func (w *WatchStream) isRefused(failure *Error) bool {
	if w.reads == nil || verdictOf(failure) != verdictRefused {
		return false
	}
	w.refuse(failure)
	return true
}

// refuse lets the watch go on at the apiserver although kubefan is healthy.
func (w *WatchStream) refuse(failure *Error) {
	if !time.Now().Before(w.refusedUntil) {
		w.reads.logger.Warn("kubefan has no answer: one watch goes to the apiserver",
			"kubefan", w.client.address, "resource", w.target.Resource, "reason", failure)
	}
	w.refusedFor, w.isRefusedForGood = refusedFor, !failure.IsRetryable()
	if verdictOf(failure) == verdictBusy {
		w.refusedFor = busyFor
	}
	w.refusedUntil = time.Now().Add(w.refusedFor)
}
