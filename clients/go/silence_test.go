package kubefan

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"kubefan.dev/clients/go/internal/fakeclock"
	"kubefan.dev/clients/go/internal/fallback"
	"kubefan.dev/clients/go/internal/leaks"
	"kubefan.dev/clients/go/internal/scripted"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// replicas is a name with several servers, of which each connection gets the next one.
type replicas struct {
	addresses []string
	dialed    atomic.Int64
	// hang is the number of those, from the first one, from which nothing more is received.
	hang atomic.Int64
}

func (r *replicas) dial(ctx context.Context, _ string) (net.Conn, error) {
	number := r.dialed.Add(1)
	made, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.addresses[min(int(number), len(r.addresses))-1])
	return &replica{Conn: made, of: r, number: number, closed: make(chan struct{})}, err
}

// replica is a connection to one of them.
type replica struct {
	net.Conn
	of     *replicas
	number int64
	once   sync.Once
	closed chan struct{}
}

func (r *replica) Read(into []byte) (int, error) {
	count, err := r.Conn.Read(into)
	if r.number <= r.of.hang.Load() {
		<-r.closed
		return 0, net.ErrClosed
	}
	return count, err
}

func (r *replica) Close() error {
	r.once.Do(func() { close(r.closed) })
	return r.Conn.Close()
}

// overReplicas is a scene whose client connects to the next server each time.
func overReplicas(t *testing.T, apiserver *fakeApiserver, answers ...scripted.Answer) (*scene, *replicas) {
	t.Helper()
	several := &replicas{}
	var first *scripted.Server
	for _, answer := range answers {
		server := scripted.Start(t, answer)
		several.addresses = append(several.addresses, server.Address)
		if first == nil {
			first = server
		}
	}
	all := Options{DialOptions: []grpc.DialOption{grpc.WithContextDialer(several.dial)}}
	return newSceneWith(t, first, apiserver, all, WatchOptions{}), several
}

func TestAnotherReplicaIsTriedBeforeKubefanIsAway(t *testing.T) {
	leaks.Check(t)
	s, several := overReplicas(t, &fakeApiserver{}, scripted.Answer{Messages: scripted.Snapshot(10)},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 11)}})
	check(t, s.words(t, 2), "SnapshotBegin", "SnapshotEnd 10")
	several.hang.Store(1)
	s.clock.Advance(silenceMax)
	check(t, s.words(t, 3), "Disconnected", "Reconnected", "x 11")
	if side, asked := s.client.fallback.monitor.Side(), s.apiserver.asked(); side != fallback.Healthy || len(asked) > 0 {
		t.Error(side, asked)
	}
}

func TestKubefanIsAwayIfNoReplicaAnswers(t *testing.T) {
	leaks.Check(t)
	apiserver := &fakeApiserver{watches: []*fakeEvents{{events: []*api.Event{podEvent("A", "x", 11)}}}}
	s, several := overReplicas(t, apiserver, scripted.Answer{Messages: scripted.Snapshot(10)}, scripted.Answer{})
	check(t, s.words(t, 2), "SnapshotBegin", "SnapshotEnd 10")
	several.hang.Store(100)
	s.clock.Advance(silenceMax)
	check(t, s.words(t, 3), "Disconnected", "Reconnected", "x 11")
	if several.dialed.Load() < 2 || s.client.fallback.monitor.Look().Epoch != 1 {
		t.Error("no other connection, or not one outage:", several.dialed.Load(), s.client.fallback.monitor.Look())
	}
}

func TestACallWithoutAnAnswerIsMadeAtAnotherReplica(t *testing.T) {
	leaks.Check(t)
	s, several := overReplicas(t, &fakeApiserver{}, scripted.Answer{Messages: scripted.Snapshot(10)}, scripted.Answer{})
	check(t, s.words(t, 2), "SnapshotBegin", "SnapshotEnd 10")
	silent := &Error{Code: codes.Unavailable, isSilent: true}
	for range 2 {
		s.client.fallback.note(t.Context(), form{}, silent, 0)
	}
	if side, dialed := s.client.fallback.monitor.Side(), several.dialed.Load(); side != fallback.Healthy || dialed != 2 {
		t.Error(side, dialed)
	}
}

func TestStreamsEndIfKubefanIsSilentAndDoesNotAnswer(t *testing.T) {
	clock := fakeclock.New()
	answers, checks, failures := true, 0, 0
	silent := &silence{
		clock: clock, failed: func() { failures++ },
		check: func(context.Context) bool { checks++; return answers },
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	done := silent.watch(cancel)
	for range 10 {
		clock.Advance(time.Second)
		silent.heard()
	}
	if checks != 0 {
		t.Error("a kubefan that sends is asked")
	}
	clock.Advance(2*silenceMax + time.Second)
	if checks != 2 || ctx.Err() != nil {
		t.Error(checks, ctx.Err())
	}
	answers = false
	clock.Advance(silenceMax)
	if failures != 1 || !errors.Is(context.Cause(ctx), errHangs) {
		t.Error(failures, context.Cause(ctx))
	}
	done()
	clock.Advance(time.Minute)
	if checks != 3 || clock.Timers() != 0 {
		t.Error("a client without streams asks:", checks, clock.Timers())
	}
}
