package kubefan

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const (
	// The server ends a watch at its timeout. If it is this late, the client ends the watch itself.
	timeoutGrace = 2 * time.Second
	// A stream that is moved sooner than this after it was opened has failed: otherwise a server that
	// moves every stream would be asked in a tight loop.
	movedAfter = 5 * time.Second
)

// WatchStream is a running watch. It is for one goroutine. It survives its connection: it reconnects
// with the last resume version, so the server sends exactly the changes in between. It never resumes
// from an object's own version, because that does not say which changes the selector has covered.
type WatchStream struct {
	client  *Client
	target  Target
	options WatchOptions
	ctx     context.Context
	cancel  context.CancelFunc

	resumeVersion string
	cluster       string
	// nextCluster is the cluster of the version that the current snapshot ends with.
	nextCluster *string
	// deadline is zero without a timeout.
	deadline time.Time
	backoff  *backoff
	retryAt  time.Time

	stream      api.WatchService_WatchClient
	streamCtx   context.Context
	closeStream func()
	// openedAt is zero until a stream was opened.
	openedAt time.Time
	// sent is the authorization of the last request.
	sent   string
	broken bool
	ended  bool

	// base is nil unless deltas are used.
	base *deltaBase
	// baseIsCurrent: the base is the state at exactly resumeVersion, and not on the way to a later one.
	baseIsCurrent bool
	// chunk has the events of a snapshot chunk that are not yet returned.
	chunk []*api.Event

	watchFallback
}

// Watch starts a watch, which ends with ctx. Nothing is sent before the first read. A read returns
// the errors that the watch cannot recover from, such as a wrong selector.
func (c *Client) Watch(ctx context.Context, target Target, options WatchOptions) *WatchStream {
	if options.DeltaBaseBytesMax <= 0 {
		options.DeltaBaseBytesMax = DeltaBaseBytesMax
	}
	open := context.WithCancel
	if c.fallback != nil {
		open = c.fallback.untilClosed
	}
	ctx, cancel := open(ctx)
	watch := &WatchStream{
		client: c, target: target, options: options, ctx: ctx, cancel: cancel,
		resumeVersion: options.ResourceVersion, cluster: options.Cluster, backoff: newBackoff(options.Backoff),
	}
	if options.Timeout > 0 {
		watch.deadline = time.Now().Add(options.Timeout)
	}
	if options.Fallback != FallbackNever {
		watch.reads = c.fallback
	}
	if options.Encoding == EncodingZstdDelta {
		watch.base = newDeltaBase(options.DeltaBaseBytesMax)
	}
	return watch
}

// All returns the items of the watch, for a range loop. Its last pair may have an error. A loop that
// ends closes the watch.
func (w *WatchStream) All() iter.Seq2[WatchItem, error] {
	return func(yield func(WatchItem, error) bool) {
		defer w.Close()
		for {
			item, err := w.Next()
			if errors.Is(err, io.EOF) || !yield(item, err) || err != nil {
				return
			}
		}
	}
}

// Next waits for the next item. It returns io.EOF after the timeout, the error of the context when
// that has ended, and otherwise an *Error that a retry cannot fix. After an error there are no more
// items.
func (w *WatchStream) Next() (WatchItem, error) {
	for {
		if err := w.ctx.Err(); err != nil {
			w.end()
			return WatchItem{}, err
		}
		if len(w.chunk) > 0 {
			event := w.chunk[0]
			w.chunk[0] = nil
			w.chunk = w.chunk[1:]
			return w.item(WatchItem{Kind: ItemEvent, Event: event}), nil
		}
		if w.ended {
			return WatchItem{}, io.EOF
		}
		if len(w.queue) > 0 {
			return w.nextQueued(), nil
		}
		if w.stream == nil {
			item, done, err := w.advance()
			if done || err != nil {
				return item, err
			}
			continue
		}
		response, err := w.stream.Recv()
		w.heard()
		if err != nil {
			item, done, err := w.streamEnded(w.client.limitedError(w.streamCtx, err))
			if done || err != nil {
				return item, err
			}
			continue
		}
		if item, done := w.accept(response); done {
			return item, nil
		}
	}
}

// advance makes a step without a stream of kubefan.
func (w *WatchStream) advance() (item WatchItem, done bool, err error) {
	if w.direct != nil {
		return w.nextDirect()
	}
	if w.goesDirect() {
		return w.openDirect()
	}
	return w.reopen()
}

// Close ends the watch.
func (w *WatchStream) Close() {
	w.end()
	w.cancel()
}

// Open makes one attempt to connect, if there is no stream, and returns its error. The watch may be
// read after any result, except an error that is not retryable. A watch that goes on at the
// apiserver has no error.
func (w *WatchStream) Open() error {
	if w.stream != nil || w.ended || w.direct != nil || w.goesDirect() {
		return nil
	}
	goesOn, err := w.openNoted()
	if goesOn {
		return nil
	}
	return err
}

// ResumeVersion is the version to resume from, with Cluster. See WatchItem.ResumeVersion.
func (w *WatchStream) ResumeVersion() string { return w.resumeVersion }

// Cluster is the identity of the cluster that ResumeVersion is from. Empty if it is unknown.
func (w *WatchStream) Cluster() string { return w.cluster }

func (w *WatchStream) item(item WatchItem) WatchItem {
	item.ResumeVersion, item.Cluster = w.resumeVersion, w.cluster
	return item
}

func (w *WatchStream) end() {
	w.ended = true
	w.drop()
	w.dropDirect()
}

// drop forgets the stream. Deltas and chunks of another stream do not continue it.
func (w *WatchStream) drop() {
	if w.closeStream != nil {
		w.closeStream()
	}
	w.stream, w.closeStream = nil, nil
}

// reopen waits for the moment of the next attempt and makes it.
func (w *WatchStream) reopen() (item WatchItem, done bool, err error) {
	wake := w.retryAt
	if !w.deadline.IsZero() && wake.After(w.deadline) {
		wake = w.deadline
	}
	if wait := time.Until(wake); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-w.ctx.Done():
			return WatchItem{}, false, nil // Next returns the error of the context.
		case <-timer.C:
		}
	}
	if !w.deadline.IsZero() && !time.Now().Before(w.deadline) {
		w.end()
		return WatchItem{}, true, io.EOF
	}
	if w.goesDirect() {
		// Another read has found kubefan away meanwhile.
		return WatchItem{}, false, nil
	}
	switch _, err := w.openNoted(); {
	case err != nil:
		return w.failed(err)
	case w.broken:
		w.broken = false
		return w.item(WatchItem{Kind: ItemReconnected}), true, nil
	default:
		return WatchItem{}, false, nil
	}
}

// open makes one attempt, or two if the token file has a newer token than the one refused.
func (w *WatchStream) open() error {
	if err := w.options.check(w.client.address); err != nil {
		return err
	}
	for attempt := 0; ; attempt++ {
		ctx, sent, err := w.client.authorize(w.ctx)
		if err != nil {
			return err
		}
		w.sent = sent
		ctx, answered, cancel := w.client.answerLimit(ctx)
		err = w.client.connection(ctx)
		var stream api.WatchService_WatchClient
		if err == nil {
			stream, err = w.client.service().Watch(ctx, w.request())
		}
		if err == nil {
			// The headers come when the server has accepted the request. Without them, Recv has the error.
			if header, headerErr := stream.Header(); headerErr == nil && header != nil {
				answered()
				w.learn(header)
				w.stream, w.closeStream, w.openedAt, w.nextCluster = stream, w.closer(cancel), time.Now(), nil
				w.streamCtx = ctx
				return nil
			}
			_, err = stream.Recv()
		}
		err = w.client.limitedError(ctx, err)
		cancel()
		if err == nil || errors.Is(err, io.EOF) {
			err = errEnded(w.client.address)
		}
		failed := errorOf(err, w.client.address)
		if failed.Code != codes.Unauthenticated || attempt > 0 || !w.client.token.replacement(sent) {
			return failed
		}
	}
}

// closer returns a function that ends a stream. A stream past the watch's deadline is ended too.
func (w *WatchStream) closer(cancel func()) func() {
	if w.deadline.IsZero() {
		return cancel
	}
	timer := time.AfterFunc(time.Until(w.deadline)+timeoutGrace, cancel)
	return func() {
		timer.Stop()
		cancel()
	}
}

func errEnded(address string) *Error {
	return &Error{Address: address, Code: codes.Unavailable, Message: "the stream ended"}
}

// request is the request for the rest of the watch.
func (w *WatchStream) request() *api.WatchRequest {
	if w.base != nil && !w.baseIsCurrent {
		// It has parts of a span that broke off, which no later message need undo.
		w.base.clear()
	}
	encoding, dropManagedFields := w.options.Encoding, w.options.Projection.DropManagedFields
	if encoding == EncodingZstdDelta && w.base == nil {
		// Deltas had to be given up. This requests the bytes that they produced: the canonical form.
		encoding, dropManagedFields = EncodingZstd, true
	}
	projection := w.options.Projection
	projection.DropManagedFields = dropManagedFields
	version, isComplete := sentVersion(w.resumeVersion)
	request := &api.WatchRequest{
		Target:            w.target.message(),
		ResourceVersion:   version,
		VersionIsComplete: isComplete,
		Cluster:           w.cluster,
		Projection:        projection.message(w.options.OnlyChanges),
		Encoding:          encoding.message(),
		StateKept:         w.base != nil && w.base.complete,
		OnLag:             api.OnLag_ON_LAG_CONFLATE,
		OnExpired:         api.OnExpired_ON_EXPIRED_RESTART,
	}
	if w.options.OnLag == OnLagExpire {
		request.OnLag = api.OnLag_ON_LAG_EXPIRE
	}
	if w.options.OnExpired == OnExpiredFail {
		request.OnExpired = api.OnExpired_ON_EXPIRED_FAIL
	}
	if w.options.BookmarkInterval > 0 {
		request.BookmarkInterval = durationpb.New(w.options.BookmarkInterval)
	}
	if !w.deadline.IsZero() {
		request.TimeoutSeconds = max(int64((time.Until(w.deadline)+time.Second-1)/time.Second), 1)
	}
	return request
}

// accept applies a message, and returns its item unless the message has none of its own.
func (w *WatchStream) accept(response *api.WatchResponse) (item WatchItem, done bool) {
	done, w.isFresh = true, false
	var err error
	switch message := response.GetMessage().(type) {
	case *api.WatchResponse_Event:
		item = WatchItem{Kind: ItemEvent, Event: message.Event}
		err = w.resolve(message.Event)
	case *api.WatchResponse_SnapshotBegin:
		if w.base != nil {
			w.base.clear()
		}
		begin := message.SnapshotBegin
		w.rememberResource(begin.GetResource())
		cluster := begin.GetCluster()
		w.nextCluster = &cluster
		item = WatchItem{
			Kind: ItemSnapshotBegin, ResourceVersion: begin.GetResourceVersion(), Resource: begin.GetResource(),
			RestartedFrom: begin.GetRestartedFrom(), SnapshotCluster: cluster,
		}
	case *api.WatchResponse_SnapshotChunk:
		var events []*api.Event
		events, err = decodeChunk(message.SnapshotChunk.GetZstd())
		for _, event := range events {
			if err == nil {
				err = w.resolve(event)
			}
		}
		if err == nil {
			w.chunk = events
		}
		done = false
	case *api.WatchResponse_SnapshotEnd:
		if w.base != nil {
			w.base.endSnapshot()
		}
		item = WatchItem{Kind: ItemSnapshotEnd, ObjectCount: message.SnapshotEnd.GetObjectCount()}
	case *api.WatchResponse_GapBegin:
		begin := message.GapBegin
		item = WatchItem{Kind: ItemGapBegin, ResourceVersion: begin.GetResourceVersion(), Reason: begin.GetReason()}
	case *api.WatchResponse_GapEnd:
		item = WatchItem{Kind: ItemGapEnd}
	case *api.WatchResponse_CatchUpBegin:
		item = WatchItem{Kind: ItemCatchUpBegin, ResourceVersion: message.CatchUpBegin.GetResourceVersion()}
	case *api.WatchResponse_CatchUpEnd:
		item = WatchItem{Kind: ItemCatchUpEnd}
	case *api.WatchResponse_Bookmark:
		item = WatchItem{Kind: ItemBookmark}
	default:
		// A message of a newer server. Its resume version counts anyway.
		done = false
	}
	if err != nil {
		return w.undecodable(err), true
	}
	w.baseIsCurrent = response.GetResumeVersion() != ""
	if w.reads != nil && item.Kind == ItemEvent && done && w.baseIsCurrent && !w.at.accepts(item.Event) {
		// The base has it, and the version to resume from does not.
		w.baseIsCurrent = false
		return WatchItem{}, false
	}
	if item.Kind == ItemSnapshotEnd || item.Kind == ItemGapEnd || item.Kind == ItemCatchUpEnd {
		w.at, w.hadState = atVersion{}, false
	}
	if w.baseIsCurrent {
		w.resumeVersion = receivedVersion(response.GetResumeVersion(), response.GetVersionIsComplete())
		if w.nextCluster != nil {
			w.cluster, w.nextCluster = *w.nextCluster, nil
		}
	}
	return w.item(item), done
}

func (w *WatchStream) resolve(event *api.Event) error {
	switch {
	case w.base != nil:
		return w.base.resolve(event)
	case event.GetDelta() != nil:
		return errNoBase
	default:
		return nil
	}
}

// undecodable reconnects after a message that cannot be decoded, so that the server sends it again
// with whole objects. The resume version has not moved past it.
func (w *WatchStream) undecodable(err error) WatchItem {
	if errors.Is(err, errOverLimit) {
		w.base = nil
	}
	w.baseIsCurrent = false
	item, _, _ := w.failed(&Error{Address: w.client.address, Code: codes.DataLoss, Message: err.Error()})
	return item
}

// streamEnded handles the end of the open stream.
func (w *WatchStream) streamEnded(err error) (item WatchItem, done bool, _ error) {
	if w.ctx.Err() != nil {
		return WatchItem{}, false, nil // Next returns the error of the context.
	}
	isOver := !w.deadline.IsZero() && !time.Now().Before(w.deadline)
	switch isEnd := errors.Is(err, io.EOF); {
	case isOver || isEnd && !w.deadline.IsZero():
		w.end()
		return WatchItem{}, true, io.EOF
	case isEnd:
		return w.failed(errEnded(w.client.address))
	}
	failed := errorOf(err, w.client.address)
	w.noteFresh(failed)
	isMoved := failed.Reason == ReasonRebalanced || failed.Reason == ReasonConnectionAge
	if isMoved && time.Since(w.openedAt) >= movedAfter {
		// Nothing was lost, and nothing has failed.
		w.drop()
		w.retryAt = time.Time{}
		return WatchItem{}, false, nil
	}
	return w.failed(failed)
}

// failed decides whether the watch continues after an error.
func (w *WatchStream) failed(err error) (item WatchItem, done bool, _ error) {
	w.drop()
	w.chunk = nil
	// What follows may come from another server.
	w.at.moved = true
	if w.ctx.Err() != nil {
		return WatchItem{}, false, nil
	}
	failure := errorOf(err, w.client.address)
	isRefused := failure.Code == codes.Unauthenticated
	if isRefused || failure.Reason == ReasonReauthenticate {
		w.client.token.expire(w.sent)
	}
	restart := failure.IsExpired() && w.options.OnExpired == OnExpiredRestart
	// The file may get another token. A token that was never accepted is a mistake, though.
	mayLogin := isRefused && !w.openedAt.IsZero() && w.client.token.mayChange()
	if !restart && !mayLogin && !w.isRefused(failure) && !failure.IsRetryable() {
		w.end()
		return WatchItem{}, true, failure
	}
	// A restart is delayed too: otherwise, with a ring that is too short, clients would read snapshots
	// in a tight loop.
	retryIn := w.backoff.delay(time.Now(), failure.RetryAfter)
	w.retryAt = time.Now().Add(retryIn)
	if restart {
		w.hadState = w.hadState || w.resumeVersion != ""
		w.resumeVersion, w.cluster, w.baseIsCurrent = "", "", false
		return w.item(WatchItem{Kind: ItemRestarted, Err: failure}), true, nil
	}
	w.broken = true
	return w.item(WatchItem{Kind: ItemDisconnected, Err: failure, RetryIn: retryIn}), true, nil
}
