package kubefan

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"kubefan.dev/clients/go/internal/fakeclock"
	"kubefan.dev/clients/go/internal/fallback"
	"kubefan.dev/clients/go/internal/leaks"
	"kubefan.dev/clients/go/internal/scripted"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// gone is what a proxy without a kubefan answers.
var gone = scripted.Answer{Err: status.Error(codes.Unavailable, "no healthy upstream")}

// fakeApiserver answers as the test says.
type fakeApiserver struct {
	lists   []*ObjectList
	watches []*fakeEvents
	// hangs: a watch gets no answer.
	hangs bool
	// away is the error of lists.
	away error

	mu       sync.Mutex
	requests []string
}

// fakeEvents are events, and then an error; nil keeps the watch open.
type fakeEvents struct {
	events []*api.Event
	// bookmark, if set, comes after the events.
	bookmark string
	err      error
	ctx      context.Context
}

func (f *fakeApiserver) note(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, what)
}

func (f *fakeApiserver) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.requests)
}

func (f *fakeApiserver) List(context.Context, ApiserverRead) (*ObjectList, error) {
	f.note("list")
	if f.away != nil {
		return nil, f.away
	}
	made := f.lists[0]
	f.lists = f.lists[1:]
	return made, nil
}

func (f *fakeApiserver) Get(_ context.Context, read ApiserverRead) (*api.Object, error) {
	f.note("get " + read.Target.Name)
	return &api.Object{Name: read.Target.Name}, nil
}

func (f *fakeApiserver) Watch(ctx context.Context, read ApiserverRead) (ApiserverWatch, error) {
	f.note("watch " + read.ResourceVersion)
	if f.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	made := &fakeEvents{}
	if len(f.watches) > 0 {
		made, f.watches = f.watches[0], f.watches[1:]
	}
	made.ctx = ctx
	return made, nil
}

func (e *fakeEvents) Next() (*api.Event, string, error) {
	if len(e.events) > 0 {
		event := e.events[0]
		e.events = e.events[1:]
		return event, "", nil
	}
	if version := e.bookmark; version != "" {
		e.bookmark = ""
		return nil, version, nil
	}
	if e.err == nil {
		<-e.ctx.Done()
		return nil, "", e.ctx.Err()
	}
	return nil, "", e.err
}

func (e *fakeEvents) Close() {}

// refusal is an error of the apiserver.
func refusal(code codes.Code, reason string) *Error {
	return &Error{Address: "https://apiserver", Code: code, Reason: reason, Message: reason}
}

// scene is a watch with a fallback, and the time of the fallback.
type scene struct {
	client    *Client
	watch     *WatchStream
	clock     *fakeclock.Clock
	apiserver *fakeApiserver
	// background has the readers that end with the test.
	background sync.WaitGroup
}

func newScene(t *testing.T, server *scripted.Server, apiserver *fakeApiserver, options WatchOptions) *scene {
	t.Helper()
	return newSceneWith(t, server, apiserver, Options{}, options)
}

func newSceneWith(t *testing.T, server *scripted.Server, apiserver *fakeApiserver, all Options, options WatchOptions) *scene {
	t.Helper()
	server.Health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	all.Apiserver, all.Budget = apiserver, Budget{Clients: 1, StartsPerSecond: 1}
	client, err := ConnectLazy(server.Address, all)
	if err != nil {
		t.Fatal(err)
	}
	clock := fakeclock.New()
	clock.Quick = 2 * time.Second
	client.fallback = newFallback(client, all, clock)
	options.Backoff = fast
	ctx, cancel := context.WithCancel(t.Context())
	made := &scene{client: client, clock: clock, apiserver: apiserver}
	made.watch = client.Watch(ctx, Target{Resource: "pods"}, options)
	t.Cleanup(func() {
		cancel()
		made.background.Wait()
		made.watch.Close()
		_ = client.Close()
	})
	return made
}

// inBackground reads one more item, or waits for the end of the test.
func (s *scene) inBackground() {
	s.background.Go(func() { _, _ = s.watch.Next() })
}

// words reads items as words: their kind, the object's name and the version to resume from.
func (s *scene) words(t *testing.T, count int) (words []string) {
	t.Helper()
	for range count {
		item, err := s.watch.Next()
		if err != nil {
			t.Fatal(err, words)
		}
		word := item.Kind.String()
		if item.Kind == ItemEvent {
			word = item.Event.GetName() + " " + item.ResumeVersion
		} else if item.Kind == ItemBookmark || item.Kind == ItemSnapshotEnd {
			word += " " + item.ResumeVersion
		}
		words = append(words, word)
	}
	return words
}

func check(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("got %q, not %q", got, want)
	}
}

func podEvent(kind, name string, version int) *api.Event {
	return scripted.Event(kind, name, version).GetEvent()
}

func TestAWatchContinuesAtTheApiserverAndReturnsWithNothingLostOrRepeated(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t,
		scripted.Answer{Messages: append(scripted.Snapshot(10, "x"), scripted.Event("M", "x", 12)), Err: gone.Err},
		gone,
		// What the replica sends after 14 includes an event that the apiserver has brought.
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("D", "z", 14), scripted.Event("D", "w", 14)}},
	)
	apiserver := &fakeApiserver{watches: []*fakeEvents{{events: []*api.Event{
		podEvent("M", "x", 12), podEvent("A", "y", 12), podEvent("D", "y", 14), podEvent("D", "z", 14),
	}}}}
	s := newScene(t, server, apiserver, WatchOptions{})
	check(t, s.words(t, 9),
		"SnapshotBegin", "x ", "SnapshotEnd 10", "x 12", "Disconnected", "Disconnected", "Reconnected", "y 12", "y 14")
	check(t, s.words(t, 1), "z 14")
	check(t, apiserver.asked(), "watch 11")

	server.Health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	returned := make(chan []string, 1)
	go func() { returned <- s.words(t, 1) }()
	for words := []string(nil); words == nil; {
		select {
		case words = <-returned:
			check(t, words, "w 14")
		default:
			s.clock.Advance(time.Second)
		}
	}
	if last := server.Requests()[2]; last.GetResourceVersion() != "14" || last.GetVersionIsComplete() {
		t.Error(last)
	}
}

func TestAProgramThatNeverReachedKubefanGetsItsStateFromTheApiserver(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, gone)
	apiserver := &fakeApiserver{
		lists:   []*ObjectList{{ResourceVersion: "20.end", Objects: []*api.Object{{Name: "a", ResourceVersion: "3"}}}},
		watches: []*fakeEvents{{events: []*api.Event{podEvent("A", "b", 21)}, bookmark: "30", err: io.EOF}},
	}
	s := newScene(t, server, apiserver, WatchOptions{})
	check(t, s.words(t, 7),
		"Disconnected", "Reconnected", "SnapshotBegin", "a ", "SnapshotEnd 20.end", "b 21", "Bookmark 30.end")
	s.inBackground()
	for deadline := time.After(10 * time.Second); len(apiserver.asked()) < 3; {
		select {
		case <-deadline:
			t.Fatal(apiserver.asked())
		default:
		}
	}
	check(t, apiserver.asked(), "list", "watch 20", "watch 30")
}

func TestAVersionThatHasExpiredAtTheApiserverRestartsOrEndsTheWatch(t *testing.T) {
	leaks.Check(t)
	expired := func() *fakeApiserver {
		return &fakeApiserver{
			lists:   []*ObjectList{{ResourceVersion: "20.end"}},
			watches: []*fakeEvents{{err: refusal(codes.OutOfRange, ReasonTooOld)}},
		}
	}
	options := WatchOptions{ResourceVersion: "5", Cluster: "c"}
	s := newScene(t, scripted.Start(t, gone, gone), expired(), options)
	check(t, s.words(t, 5), "Disconnected", "Reconnected", "Restarted", "SnapshotBegin", "SnapshotEnd 20.end")

	options.OnExpired = OnExpiredFail
	s = newScene(t, scripted.Start(t, gone, gone), expired(), options)
	check(t, s.words(t, 2), "Disconnected", "Reconnected")
	if _, err := s.watch.Next(); !IsExpired(err) {
		t.Error(err)
	}
}

func TestAWatchThatTheApiserverRefusesWaitsForKubefan(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, gone, scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 6)}})
	apiserver := &fakeApiserver{watches: []*fakeEvents{{err: refusal(codes.PermissionDenied, ReasonForbidden)}}}
	s := newScene(t, server, apiserver, WatchOptions{ResourceVersion: "5"})
	check(t, s.words(t, 5), "Disconnected", "Reconnected", "Disconnected", "Reconnected", "x 6")
	check(t, apiserver.asked(), "watch 5")
}

func TestAWatchThatKubefanHasNoAnswerForIsReadFromTheApiserver(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Err: scripted.Refusal(codes.FailedPrecondition, ReasonNotCached, "not cached")})
	lines := strings.Builder{}
	s := newSceneWith(t, server, &fakeApiserver{watches: []*fakeEvents{{events: []*api.Event{podEvent("A", "x", 6)}}}},
		Options{Logger: slog.New(slog.NewTextHandler(&lines, nil))}, WatchOptions{ResourceVersion: "5"})
	check(t, s.words(t, 3), "Disconnected", "Reconnected", "x 6")
	if side := s.client.fallback.monitor.Side(); side != fallback.Healthy {
		t.Error(side)
	}
	if strings.Count(lines.String(), "one watch goes to the apiserver") != 1 {
		t.Error("not one line:", lines.String())
	}
}

func TestAWatchAsksKubefanAgainIfTheApiserverRefusesItsToken(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Err: scripted.Refusal(codes.FailedPrecondition, ReasonNotCached, "not cached")},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 6)}})
	apiserver := &fakeApiserver{watches: []*fakeEvents{{err: refusal(codes.Unauthenticated, "")}}}
	s := newScene(t, server, apiserver, WatchOptions{ResourceVersion: "5"})
	check(t, s.words(t, 5), "Disconnected", "Reconnected", "Disconnected", "Reconnected", "x 6")
}

func TestAWatchThatWaitsAsksNoKubefanThatIsKnownToBeAway(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Messages: scripted.Snapshot(10), Err: gone.Err})
	apiserver := &fakeApiserver{watches: []*fakeEvents{{events: []*api.Event{podEvent("A", "x", 11)}}}}
	s := newScene(t, server, apiserver, WatchOptions{})
	check(t, s.words(t, 3), "SnapshotBegin", "SnapshotEnd 10", "Disconnected")
	s.watch.retryAt = time.Now().Add(100 * time.Millisecond)
	waiting := make(chan []string)
	go func() { waiting <- s.words(t, 2) }()
	s.client.fallback.fails(0, gone.Err)
	check(t, <-waiting, "Reconnected", "x 11")
	if asked := server.Requests(); len(asked) != 1 {
		t.Error(asked)
	}
}

func TestAReadThatEndsWithItsContextHasTheErrorOfTheContext(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t)
	server.OnList(func(*api.ListRequest) ([]*api.ListResponse, error) { return nil, gone.Err })
	s := newScene(t, server, &fakeApiserver{}, WatchOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	s.client.fallback.apiserver = endsWithContext{s.apiserver, cancel}
	if _, err := s.client.List(ctx, Target{Resource: "pods"}, ReadOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// endsWithContext is an apiserver during whose list the caller gives up.
type endsWithContext struct {
	Apiserver
	cancel func()
}

func (e endsWithContext) List(context.Context, ApiserverRead) (*ObjectList, error) {
	e.cancel()
	return nil, refusal(codes.Unavailable, "")
}

func TestASettingWaitsInsteadOfFallingBack(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, gone, gone, scripted.Answer{Messages: scripted.Snapshot(10)})
	s := newScene(t, server, &fakeApiserver{}, WatchOptions{Fallback: FallbackNever})
	check(t, s.words(t, 5), "Disconnected", "Disconnected", "Reconnected", "SnapshotBegin", "SnapshotEnd 10")
	if asked := s.apiserver.asked(); len(asked) > 0 {
		t.Error(asked)
	}
}

func TestListsAndGetsAreMadeAtTheApiserverToo(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t)
	server.OnList(func(*api.ListRequest) ([]*api.ListResponse, error) { return nil, gone.Err })
	s := newScene(t, server, &fakeApiserver{lists: []*ObjectList{{ResourceVersion: "20.end"}}}, WatchOptions{})
	list, err := s.client.List(t.Context(), Target{Resource: "pods"}, ReadOptions{})
	if err != nil || list.ResourceVersion != "20.end" {
		t.Fatal(list, err)
	}
	got, err := s.client.Get(t.Context(), Target{Resource: "pods", Name: "x"}, ReadOptions{})
	if err != nil || got.GetObject().GetName() != "x" {
		t.Fatal(got, err)
	}
	check(t, s.apiserver.asked(), "list", "get x")
}

func TestCloseEndsAWatchAtTheApiserverAndStartsNoOther(t *testing.T) {
	leaks.Check(t)
	apiserver := &fakeApiserver{}
	s := newScene(t, scripted.Start(t, gone), apiserver, WatchOptions{ResourceVersion: "5"})
	check(t, s.words(t, 2), "Disconnected", "Reconnected")
	if err := s.client.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.watch.Next(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := s.client.List(t.Context(), Target{Resource: "pods"}, ReadOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	check(t, apiserver.asked(), "watch 5")
}

func TestCloseOfAClientIsNoOutage(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Messages: scripted.Snapshot(10)})
	s := newScene(t, server, &fakeApiserver{}, WatchOptions{})
	check(t, s.words(t, 2), "SnapshotBegin", "SnapshotEnd 10")
	if err := s.client.Close(); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := s.watch.Next(); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			break
		}
	}
	if side, asked := s.client.fallback.monitor.Side(), s.apiserver.asked(); side != fallback.Healthy || len(asked) > 0 {
		t.Error(side, asked)
	}
}

func TestAHungApiserverDoesNotKeepAWatchFromKubefan(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, gone, scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 6)}})
	s := newScene(t, server, &fakeApiserver{hangs: true}, WatchOptions{ResourceVersion: "5"})
	check(t, s.words(t, 1), "Disconnected")
	server.Health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	returned := make(chan []string, 1)
	go func() { returned <- s.words(t, 2) }()
	for words := []string(nil); words == nil; {
		select {
		case words = <-returned:
			check(t, words, "Reconnected", "x 6")
		default:
			s.clock.Advance(time.Second)
		}
	}
}

func TestReadsReturnAtOnceWhileTheApiserverIsAwayToo(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t)
	server.OnList(func(*api.ListRequest) ([]*api.ListResponse, error) { return nil, gone.Err })
	s := newScene(t, server, &fakeApiserver{away: refusal(codes.Unavailable, "")}, WatchOptions{})
	if _, err := s.client.List(t.Context(), Target{Resource: "pods"}, ReadOptions{}); !errors.Is(err, s.apiserver.away) {
		t.Error(err)
	}
	server.Health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	s.clock.Advance(2 * fallback.ProbeEvery)
	if side := s.client.fallback.monitor.Side(); side != fallback.Healthy {
		t.Error("the apiserver has answered nothing", side)
	}
}

func TestTheTimeoutOfAWatchEndsARequestToAHungApiserver(t *testing.T) {
	leaks.Check(t)
	options := WatchOptions{ResourceVersion: "5", Timeout: 500 * time.Millisecond}
	s := newScene(t, scripted.Start(t, gone), &fakeApiserver{hangs: true}, options)
	for {
		if _, err := s.watch.Next(); err != nil {
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
			return
		}
	}
}

func TestTheBudgetOfKubefanReplacesTheOptions(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Messages: scripted.Snapshot(10), Err: gone.Err}, gone)
	server.Metadata = metadata.Pairs(fallback.BudgetKey, "clients=3000, rate=50")
	s := newScene(t, server, &fakeApiserver{}, WatchOptions{})
	check(t, s.words(t, 4), "SnapshotBegin", "SnapshotEnd 10", "Disconnected", "Disconnected")
	s.inBackground()
	for armed := range s.clock.Armed {
		// The first start of a caller with a state is in the second window of 60 s.
		if armed >= time.Minute && armed < 2*time.Minute {
			return
		}
	}
}

func TestOnlySomeErrorsAreAboutKubefan(t *testing.T) {
	soon := func(code codes.Code, reason string) *Error {
		return &Error{Code: code, Reason: reason, HasRetryAfter: true}
	}
	for _, it := range []struct {
		err  *Error
		want verdict
	}{
		{nil, verdictAnswered},
		{&Error{Code: codes.Unavailable}, verdictAway},
		{&Error{Code: codes.DeadlineExceeded}, verdictAway},
		{&Error{Code: codes.Internal}, verdictAway},
		{soon(codes.Unavailable, ""), verdictBusy},
		{soon(codes.Unavailable, ReasonNotSynced), verdictBusy},
		{soon(codes.ResourceExhausted, ReasonLimitReached), verdictBusy},
		{&Error{Code: codes.PermissionDenied, Reason: ReasonUpstreamForbidden}, verdictRefused},
		{&Error{Code: codes.FailedPrecondition, Reason: ReasonNotCached}, verdictRefused},
		{soon(codes.Unavailable, ReasonPassthrough), verdictRefused},
		{&Error{Code: codes.OutOfRange, Reason: ReasonTooOld}, verdictAnswered},
		{&Error{Code: codes.PermissionDenied, Reason: ReasonForbidden}, verdictAnswered},
		{&Error{Code: codes.PermissionDenied}, verdictAnswered},
		{&Error{Code: codes.Unauthenticated, Reason: ReasonUnauthenticated}, verdictAnswered},
		{&Error{Code: codes.NotFound, Reason: ReasonResourceNotFound}, verdictAnswered},
		{&Error{Code: codes.InvalidArgument, Reason: ReasonInvalidArgument}, verdictAnswered},
		{soon(codes.Unavailable, ReasonDraining), verdictAnswered},
		{&Error{Code: codes.DataLoss}, verdictAnswered},
		{protocolError("no kubefan", "a"), verdictAnswered},
	} {
		if got := verdictOf(it.err); got != it.want {
			t.Errorf("%+v: %v, not %v", it.err, got, it.want)
		}
	}
}

func TestAVersionIsMappedToTheApiserver(t *testing.T) {
	for text, want := range map[string]string{
		"12.end": "12", "12": "11", "12.1": "11", "9": "9", "9.end": "9", "": "",
		// A place that another watch gave proves that 9 has several events.
		"9.1": "8",
	} {
		at := atVersion{}
		for _, name := range strings.Fields("x y") {
			at.accepts(podEvent("A", name, 12))
		}
		if got := at.fromVersion(text); got != want {
			t.Error(fmt.Sprint(text, ": ", got, ", not ", want))
		}
	}
}

func TestOneBusyResourceMovesAlone(t *testing.T) {
	leaks.Check(t)
	busy := scripted.Refusal(codes.Unavailable, ReasonNotSynced, "not synced")
	server := scripted.Start(t, scripted.Answer{Messages: scripted.Snapshot(10)},
		scripted.Answer{Err: busy}, scripted.Answer{Err: busy})
	apiserver := &fakeApiserver{
		lists: []*ObjectList{{ResourceVersion: "20.end"}, {ResourceVersion: "21.end"}}, watches: []*fakeEvents{{}},
	}
	s := newScene(t, server, apiserver, WatchOptions{})
	server.Health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	check(t, s.words(t, 2), "SnapshotBegin", "SnapshotEnd 10")

	broken := s.client.Watch(t.Context(), Target{Resource: "brokens"}, WatchOptions{Backoff: fast})
	defer broken.Close()
	if item, err := broken.Next(); err != nil || item.Kind != ItemDisconnected {
		t.Fatal(item, err)
	}
	s.clock.Advance(10 * time.Second)
	for range 2 {
		if _, err := broken.Next(); err != nil {
			t.Fatal(err)
		}
	}
	if item, err := broken.Next(); err != nil || item.Kind != ItemSnapshotBegin {
		t.Fatal(item, err)
	}
	check(t, apiserver.asked(), "list")

	server.OnList(
		func(*api.ListRequest) ([]*api.ListResponse, error) { return nil, busy },
		func(*api.ListRequest) ([]*api.ListResponse, error) { return nil, busy },
		func(*api.ListRequest) ([]*api.ListResponse, error) { return nil, busy },
	)
	if _, err := s.client.List(t.Context(), Target{Resource: "brokens"}, ReadOptions{}); !IsRetryable(err) {
		t.Error("a list moves with the first answer:", err)
	}
	s.clock.Advance(10 * time.Second)
	if list, err := s.client.List(t.Context(), Target{Resource: "brokens"}, ReadOptions{}); err != nil || list.ResourceVersion != "21.end" {
		t.Error(list, err)
	}
	if side := s.client.fallback.monitor.Side(); side != fallback.Healthy {
		t.Error("one resource moves the client:", side)
	}

	server.Health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	apiserver.lists = []*ObjectList{{ResourceVersion: "22.end"}}
	if list, err := s.client.List(t.Context(), Target{Resource: "brokens"}, ReadOptions{}); err != nil || list.ResourceVersion != "22.end" {
		t.Error(list, err)
	}
	if side := s.client.fallback.monitor.Side(); side == fallback.Healthy {
		t.Error("a busy kubefan that does not serve is healthy")
	}
}
