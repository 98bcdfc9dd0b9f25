package kubefan

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"kubefan.dev/clients/go/internal/fallback"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const (
	// answerMax is for how long kubefan may keep a call without the headers of an answer.
	answerMax = 10 * time.Second
	// refusedFor is for how long a watch that kubefan has no answer for stays at the apiserver.
	refusedFor = 5 * time.Minute
	// busyFor is the same after answers that ask to come back later.
	busyFor = time.Minute
)

// Budget limits the reads that clients start at the apiserver while kubefan is away.
type Budget = fallback.Budget

// Side says where the reads of a client go.
type Side = fallback.Side

const (
	// SideHealthy: reads go to kubefan.
	SideHealthy = fallback.Healthy
	// SideAway: reads go to the apiserver, within the budget.
	SideAway = fallback.Away
	// SideReturning: reads go to the apiserver, and kubefan has been healthy for a while.
	SideReturning = fallback.Returning
)

// Apiserver reads from an apiserver. Package apiserver makes one of a *rest.Config. Its errors are
// *Error, as kubefan would have them. It may be used from several goroutines.
type Apiserver interface {
	// List returns the present state.
	List(ctx context.Context, read ApiserverRead) (*ObjectList, error)
	// Get returns one object.
	Get(ctx context.Context, read ApiserverRead) (*api.Object, error)
	// Watch returns the events after a version.
	Watch(ctx context.Context, read ApiserverRead) (ApiserverWatch, error)
}

// ApiserverRead is a request to an apiserver.
type ApiserverRead struct {
	Target Target
	// Resource is the resource as kubefan has resolved it. nil: look it up.
	Resource *api.ResolvedResource
	// ResourceVersion of a watch is a number, without a place in it.
	ResourceVersion string
	// Projection is the parts of each object to return.
	Projection Projection
}

// ApiserverWatch is a running watch of an apiserver, for one goroutine.
type ApiserverWatch interface {
	// Next waits for an event, or for the version of a bookmark. It returns io.EOF at the end of
	// the watch.
	Next() (event *api.Event, bookmark string, err error)
	// Close ends the watch.
	Close()
}

// verdict is what the end of a call says about kubefan.
type verdict int

const (
	// verdictAnswered: kubefan has answered, or the error is not about it.
	verdictAnswered verdict = iota
	// verdictAway: kubefan cannot be reached.
	verdictAway
	// verdictBusy: kubefan asks to come back later.
	verdictBusy
	// verdictRefused: kubefan has no answer for this read, and the apiserver may have one.
	verdictRefused
)

func verdictOf(err *Error) verdict {
	switch {
	case err == nil || err.isProtocol || err.IsExpired():
		return verdictAnswered
	case err.Reason == ReasonUpstreamForbidden, err.Reason == ReasonNotCached, err.Reason == ReasonPassthrough:
		return verdictRefused
	case err.Reason == ReasonNotSynced, err.Reason == ReasonStale, err.Reason == ReasonUpstreamUnavailable,
		err.Reason == ReasonStopped, err.Reason == ReasonLimitReached:
		return verdictBusy
	case err.Reason != "":
		return verdictAnswered
	case err.HasRetryAfter:
		return verdictBusy
	case err.Code == codes.DataLoss || !err.IsRetryable():
		return verdictAnswered
	default:
		return verdictAway
	}
}

// fallbackReads is what the reads of a client share that may go to the apiserver.
type fallbackReads struct {
	apiserver Apiserver
	monitor   *fallback.Monitor
	gate      *fallback.Gate
	silence   *silence
	clock     fallback.Clock
	logger    *slog.Logger
	onStart   func(waited time.Duration)
	// redial replaces the connection, and tells whether kubefan answers on the new one. The old one
	// is closed by the returned function.
	redial func() (answers bool, closeOld func())
	// redialing is held meanwhile.
	redialing sync.Mutex

	mu sync.Mutex
	// resolved has the resources that kubefan has resolved, by the target's name of it.
	resolved map[[3]string]*api.ResolvedResource
	busy     map[form]fallback.Busy
}

// form has the parts of a call whose answers count together.
type form struct {
	method   string
	resource [3]string
}

func formOf(method string, target Target) form {
	return form{method: method, resource: resolvedKey(target)}
}

func newFallback(client *Client, options Options, clock fallback.Clock) *fallbackReads {
	logger := options.Logger
	if logger == nil {
		logger = slog.Default()
	}
	before := fallback.Healthy
	onSide := func(side Side, reason string) {
		// One line for each change of the server, not for each change of the state.
		if (before == fallback.Healthy) != (side == fallback.Healthy) {
			if side == fallback.Healthy {
				logger.Info("reads return to kubefan", "kubefan", client.address)
			} else {
				logger.Warn("kubefan is away: reads go to the apiserver", "kubefan", client.address, "reason", reason)
			}
		}
		before = side
		if options.OnSide != nil {
			options.OnSide(side, reason)
		}
	}
	made := &fallbackReads{
		apiserver: options.Apiserver, clock: clock, logger: logger, onStart: options.OnStart,
		gate:     fallback.NewGate(clock, rand.Float64, options.Budget),
		resolved: map[[3]string]*api.ResolvedResource{}, busy: map[form]fallback.Busy{},
	}
	made.monitor = fallback.NewMonitor(fallback.Settings{
		Clock: clock, Random: rand.Float64, Probe: client.isServing, OnSide: onSide,
	})
	made.redial = client.redial
	made.silence = &silence{clock: clock, check: client.answers, failed: func() {
		made.hangs(made.monitor.Look().Epoch, errHangs)
	}}
	return made
}

// isServing asks kubefan for its health, without credentials.
func (c *Client) isServing(ctx context.Context) bool {
	c.awaitConnection(ctx)
	answer, err := grpc_health_v1.NewHealthClient(c.Conn()).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	return err == nil && answer.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING
}

// note notes the outcome of a call to kubefan that was made in this epoch.
func (f *fallbackReads) note(ctx context.Context, asked form, err *Error, epoch uint64) verdict {
	if f.monitor.Closed().Err() != nil {
		return verdictAnswered
	}
	found := verdictOf(err)
	if f.isBusyForLong(asked, found) {
		isServing, ctxErr := f.monitor.IsServing(ctx)
		switch {
		case ctxErr != nil:
			return verdictBusy
		case isServing:
			// One resource or one limit is no outage: the others stay.
			return verdictRefused
		}
		found = verdictAway
	}
	switch {
	case found == verdictAway && err.isSilent:
		f.hangs(epoch, err)
	case found == verdictAway:
		f.fails(epoch, err)
	}
	return found
}

// hangs notes that one replica of kubefan does not answer. Another one may be well: a new
// connection decides. Failures on the old one say nothing more.
func (f *fallbackReads) hangs(epoch uint64, reason error) {
	f.redialing.Lock()
	defer f.redialing.Unlock()
	if now := f.monitor.Look(); !now.IsHealthy || now.Epoch != epoch || f.monitor.Closed().Err() != nil {
		return
	}
	answers, closeOld := f.redial()
	if answers {
		f.monitor.Note("", func(machine *fallback.Machine, _ time.Time) { machine.Redialed() })
	} else {
		f.fails(epoch, reason)
	}
	closeOld()
}

func (f *fallbackReads) fails(epoch uint64, reason error) {
	f.monitor.Note(reason.Error(), func(machine *fallback.Machine, now time.Time) { machine.Failed(now, epoch) })
}

func (f *fallbackReads) isBusyForLong(asked form, found verdict) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if found != verdictBusy {
		delete(f.busy, asked)
		return false
	}
	row := f.busy[asked]
	lasts := row.Lasts(f.clock.Now())
	f.busy[asked] = row
	return lasts
}

// untilClosed is a context that also ends with the client.
func (f *fallbackReads) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	forget := context.AfterFunc(f.monitor.Closed(), cancel)
	context.AfterFunc(ctx, func() { forget() })
	return ctx, cancel
}

// learn reads the budget that kubefan tells.
func (f *fallbackReads) learn(header metadata.MD) {
	if budget, found := fallback.ParseBudget(header.Get(fallback.BudgetKey)); found {
		f.gate.SetBudget(budget)
	}
}

func (c *Client) learn(header metadata.MD, err error) {
	if c.fallback != nil && err == nil {
		c.fallback.learn(header)
	}
}

func (c *Client) remember(target Target, resource *api.ResolvedResource) {
	if c.fallback != nil {
		c.fallback.remember(target, resource)
	}
}

func resolvedKey(target Target) [3]string {
	return [3]string{target.Group, target.Version, target.Resource}
}

func (f *fallbackReads) remember(target Target, resource *api.ResolvedResource) {
	if resource.GetVersion() == "" {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resolved[resolvedKey(target)] = resource
}

func (f *fallbackReads) read(target Target, projection Projection) ApiserverRead {
	f.mu.Lock()
	defer f.mu.Unlock()
	return ApiserverRead{Target: target, Resource: f.resolved[resolvedKey(target)], Projection: projection}
}

// waitForStart waits for the moment of a start at the apiserver. It returns false if kubefan is to
// be asked first.
func (f *fallbackReads) waitForStart(ctx context.Context, hasState bool, changed <-chan struct{}) (bool, error) {
	since := f.clock.Now()
	isAdmitted, err := f.gate.Wait(ctx, hasState, changed)
	if isAdmitted && f.onStart != nil {
		f.onStart(f.clock.Now().Sub(since))
	}
	return isAdmitted, err
}

// noteMoved notes an answer of the apiserver. While the apiserver is away too, no read moves, and
// reads return to kubefan with its first answer.
func (f *fallbackReads) noteMoved(err error) {
	if err == nil {
		f.monitor.Note("", func(machine *fallback.Machine, _ time.Time) { machine.Moved() })
	}
}

// eitherRead is a list or a get, as it is made at kubefan and at the apiserver.
type eitherRead struct {
	form         form
	send, direct func(context.Context) error
	// isPartial: the caller has got a part of kubefan's answer, so no other may follow.
	isPartial bool
}

// readEither makes a read at kubefan, and at the apiserver while kubefan is away.
func (c *Client) readEither(ctx context.Context, read *eitherRead) error {
	if c.fallback == nil {
		return c.call(ctx, read.send)
	}
	for {
		view := c.fallback.monitor.Look()
		var changed <-chan struct{}
		if view.IsHealthy {
			err := c.call(ctx, read.send)
			if ctx.Err() != nil {
				return err
			}
			if err == nil || read.isPartial {
				c.fallback.note(ctx, read.form, nil, view.Epoch)
				return err
			}
			found := c.fallback.note(ctx, read.form, errorOf(err, c.address), view.Epoch)
			if found == verdictAnswered || found == verdictBusy {
				return err
			}
			if found == verdictAway {
				continue
			}
		} else {
			changed = view.Changed
		}
		isMade, err := c.readDirect(ctx, read, changed)
		if isMade || err != nil {
			return err
		}
	}
}

// readDirect makes a read at the apiserver. It returns false if kubefan is to be asked first.
func (c *Client) readDirect(ctx context.Context, read *eitherRead, changed <-chan struct{}) (isMade bool, err error) {
	ctx, cancel := c.fallback.untilClosed(ctx)
	defer cancel()
	isAdmitted, err := c.fallback.waitForStart(ctx, false, changed)
	if err != nil || !isAdmitted {
		return false, err
	}
	if c.fallback.monitor.Closed().Err() != nil {
		return false, context.Canceled
	}
	err = read.direct(ctx)
	c.fallback.noteMoved(err)
	if err != nil && ctx.Err() != nil {
		return true, context.Cause(ctx)
	}
	return true, err
}

// errNoAnswer is the cause of a call that ends without an answer.
var errNoAnswer = errors.New("no answer within " + answerMax.String())

// answerLimit ends a call that has no answer in time, if the client has an apiserver to ask, and
// later if kubefan hangs. The caller calls answered when there is an answer.
func (c *Client) answerLimit(ctx context.Context) (limited context.Context, answered func(), cancel context.CancelFunc) {
	limited, cancelCause := context.WithCancelCause(ctx)
	if c.fallback == nil {
		return limited, func() {}, func() { cancelCause(nil) }
	}
	timer := time.AfterFunc(answerMax, func() { cancelCause(errNoAnswer) })
	done := func() {}
	answered = func() {
		timer.Stop()
		done = c.fallback.silence.watch(cancelCause)
	}
	return limited, answered, func() {
		timer.Stop()
		done()
		cancelCause(nil)
	}
}

// connection waits for a connection. With an apiserver to ask, an attempt that has not ended yet is
// an error: the library would wait for it.
func (c *Client) connection(ctx context.Context) error {
	if c.awaitConnection(ctx) || c.fallback == nil || c.Conn().GetState() != connectivity.Connecting {
		// Without a connection the call fails at once, with the reason.
		return nil
	}
	return &Error{
		Address: c.address, Code: codes.Unavailable, Message: "no connection within " + c.connectTimeout.String(),
	}
}

// limitedError is the error of a call under an answerLimit.
func (c *Client) limitedError(limited context.Context, err error) error {
	cause := context.Cause(limited)
	if err != nil && (errors.Is(cause, errNoAnswer) || errors.Is(cause, errHangs)) {
		return &Error{Address: c.address, Code: codes.Unavailable, Message: cause.Error(), isSilent: errors.Is(cause, errNoAnswer)}
	}
	return err
}
