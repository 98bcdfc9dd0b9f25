package kubefan

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"kubefan.dev/clients/go/internal/fallback"
)

const (
	// silenceMax is the silence on all streams of a client after which kubefan is asked for its
	// health.
	silenceMax = 4 * time.Second
	// silenceAnswerMax is the wait for that answer.
	silenceAnswerMax = 4 * time.Second
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
	s.mu.Lock()
	isSilent := len(s.streams) > 0 && s.clock.Now().Sub(s.heardAt) >= silenceMax
	s.mu.Unlock()
	hangs := false
	if isSilent {
		ctx, cancel := context.WithTimeout(context.Background(), silenceAnswerMax)
		hangs = !s.check(ctx)
		cancel()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.isArmed = false
	if isSilent {
		hangs = hangs && s.clock.Now().Sub(s.heardAt) >= silenceMax
		s.heardAt = s.clock.Now()
	}
	if hangs {
		s.failed()
		for _, cancel := range s.streams {
			cancel(errHangs)
		}
	}
	s.arm()
}

// answers asks kubefan for its health. Any answer is enough.
func (c *Client) answers(ctx context.Context) bool {
	_, err := grpc_health_v1.NewHealthClient(c.conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	code := status.Code(err)
	return code != codes.DeadlineExceeded && code != codes.Unavailable
}
