package kubefan

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"kubefan.dev/clients/go/internal/fallback"
)

const (
	// silenceMax is the silence on all streams of a client after which kubefan is asked for its
	// health.
	silenceMax = 4 * time.Second
	// silenceAnswerMax is the wait for that answer, and then for one on a new connection.
	silenceAnswerMax = 2 * time.Second
)

// errHangs is the cause of a stream that ends because kubefan does not answer.
var errHangs = errors.New("kubefan does not answer")

// silence finds a kubefan that hangs while streams are open. The gRPC library would send a PING
// only after ten seconds.
type silence struct {
	clock  fallback.Clock
	check  func(context.Context) bool
	failed func()

	mu      sync.Mutex
	heardAt time.Time
	next    int
	streams map[int]context.CancelCauseFunc
	isArmed bool
}

// watch ends a stream if kubefan hangs, until the returned function is called.
func (s *silence) watch(cancel context.CancelCauseFunc) (done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	id := s.next
	if s.streams == nil {
		s.streams = map[int]context.CancelCauseFunc{}
	}
	s.streams[id] = cancel
	s.heardAt = s.clock.Now()
	s.arm()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.streams, id)
	}
}

// heard notes that kubefan has sent something.
func (s *silence) heard() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heardAt = s.clock.Now()
}

func (s *silence) arm() {
	if s.isArmed || len(s.streams) == 0 {
		return
	}
	s.isArmed = true
	s.clock.AfterFunc(max(silenceMax-s.clock.Now().Sub(s.heardAt), 0), s.due)
}

func (s *silence) due() {
	silent := s.silentStreams()
	hangs := false
	if len(silent) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), silenceAnswerMax)
		hangs = !s.check(ctx) && len(s.silentStreams()) > 0
		cancel()
	}
	if hangs {
		s.failed()
		for _, cancel := range silent {
			cancel(errHangs)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.isArmed = false
	if len(silent) > 0 {
		s.heardAt = s.clock.Now()
	}
	s.arm()
}

// silentStreams returns the streams if there is silence on all of them.
func (s *silence) silentStreams() []context.CancelCauseFunc {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock.Now().Sub(s.heardAt) < silenceMax {
		return nil
	}
	return slices.Collect(maps.Values(s.streams))
}

// answers asks kubefan for its health. Any answer is enough.
func (c *Client) answers(ctx context.Context) bool { return answersOn(ctx, c.Conn()) }

func answersOn(ctx context.Context, conn *grpc.ClientConn) bool {
	asked := &grpc_health_v1.HealthCheckRequest{}
	_, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, asked, grpc.WaitForReady(true))
	code := status.Code(err)
	return code != codes.DeadlineExceeded && code != codes.Unavailable
}

// redial replaces the connection. The library keeps one that hangs until its own PING, and chooses
// another replica only for a new one.
func (c *Client) redial() (answers bool, closeOld func()) {
	made, err := c.dial()
	if err != nil {
		return false, func() {}
	}
	ctx, cancel := context.WithTimeout(c.fallback.monitor.Closed(), silenceAnswerMax)
	defer cancel()
	answers = answersOn(ctx, made)
	old := c.conn.Swap(made)
	return answers, func() { _ = old.Close() }
}
