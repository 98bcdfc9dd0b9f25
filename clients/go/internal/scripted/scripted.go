// Package scripted is a server for tests that answers each call by the test's script. It produces
// cases that are rare with a real kubefan: gaps, streams that break inside a unit, wrong deltas.
package scripted

import (
	"net"
	"strconv"
	"sync"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// Answer is the answer to one watch: messages, and then an error. A nil error keeps the stream open
// until the client ends it, unless End is set.
type Answer struct {
	Messages []*api.WatchResponse
	Err      error
	// End ends the stream with OK.
	End bool
}

// Server has the answers to the next watches, in order.
type Server struct {
	api.UnimplementedWatchServiceServer
	Address string
	// Health is gRPC's health service, which says SERVING until it is told otherwise.
	Health *health.Server
	// Metadata is sent with each answer to a watch, if it is set before the first.
	Metadata metadata.MD

	mu       sync.Mutex
	answers  []Answer
	requests []*api.WatchRequest
	lists    []func(*api.ListRequest) ([]*api.ListResponse, error)
}

// Start starts a server that ends with the test.
func Start(t testing.TB, answers ...Answer) *Server {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	made := &Server{Address: listener.Addr().String(), answers: answers, Health: health.NewServer()}
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, made.Health)
	api.RegisterWatchServiceServer(server, made)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return made
}

// OnList sets the answers to the next lists, in order.
func (s *Server) OnList(answers ...func(*api.ListRequest) ([]*api.ListResponse, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists = answers
}

// Requests returns the watches that were requested.
func (s *Server) Requests() []*api.WatchRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*api.WatchRequest(nil), s.requests...)
}

// Watch answers as the test says. A watch without an answer stays open.
func (s *Server) Watch(request *api.WatchRequest, stream grpc.ServerStreamingServer[api.WatchResponse]) error {
	s.mu.Lock()
	s.requests = append(s.requests, request)
	answer := Answer{}
	if len(s.answers) > 0 {
		answer, s.answers = s.answers[0], s.answers[1:]
	}
	s.mu.Unlock()
	if answer.Err != nil && len(answer.Messages) == 0 {
		return answer.Err
	}
	if err := stream.SendHeader(s.Metadata); err != nil {
		return err
	}
	for _, message := range answer.Messages {
		if err := stream.Send(message); err != nil {
			return err
		}
	}
	if answer.Err == nil && !answer.End {
		<-stream.Context().Done()
	}
	return answer.Err
}

// List answers as the test says.
func (s *Server) List(request *api.ListRequest, stream grpc.ServerStreamingServer[api.ListResponse]) error {
	s.mu.Lock()
	if len(s.lists) == 0 {
		s.mu.Unlock()
		return Refusal(codes.Unavailable, "NOT_SYNCED", "no answer to a list")
	}
	answer := s.lists[0]
	s.lists = s.lists[1:]
	s.mu.Unlock()
	chunks, err := answer(request)
	for _, chunk := range chunks {
		if err := stream.Send(chunk); err != nil {
			return err
		}
	}
	return err
}

// Refusal is an error as kubefan makes it. Unavailable and ResourceExhausted ask for a delay of 1 ms.
func Refusal(code codes.Code, reason, message string) error {
	made := status.New(code, message)
	made, _ = made.WithDetails(&errdetails.ErrorInfo{Domain: "kubefan.dev", Reason: reason})
	if code == codes.Unavailable || code == codes.ResourceExhausted {
		made, _ = made.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(1e6)})
	}
	return made.Err()
}

// Pod is the JSON of a pod.
func Pod(name, version string) []byte {
	return []byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"` + name + `","namespace":"a","uid":"u-` + name +
		`","resourceVersion":"` + version + `"}}`)
}

// Event is a change outside of a unit. Its kind is the first letter of the type: "A", "M" or "D"; "U"
// is a deletion with an unknown final state, which exists in a unit only.
func Event(kind, name string, version int) *api.WatchResponse {
	return &api.WatchResponse{ResumeVersion: strconv.Itoa(version), Message: &api.WatchResponse_Event{Event: event(kind, name, version)}}
}

// Inside is a change in a snapshot, a gap or a catch-up.
func Inside(kind, name string, version int) *api.WatchResponse {
	return &api.WatchResponse{Message: &api.WatchResponse_Event{Event: event(kind, name, version)}}
}

func event(kind, name string, version int) *api.Event {
	made := &api.Event{Namespace: "a", Name: name, Uid: "u-" + name, ResourceVersion: strconv.Itoa(version)}
	made.Object = Pod(name, made.ResourceVersion)
	switch kind {
	case "A":
		made.Type = api.EventType_EVENT_TYPE_ADDED
	case "M":
		made.Type = api.EventType_EVENT_TYPE_MODIFIED
	case "D":
		made.Type, made.DeleteReason = api.EventType_EVENT_TYPE_DELETED, api.DeleteReason_DELETE_REASON_OBJECT_DELETED
	case "U":
		made.Type, made.DeleteReason = api.EventType_EVENT_TYPE_DELETED, api.DeleteReason_DELETE_REASON_FINAL_STATE_UNKNOWN
	}
	return made
}

// Snapshot is a complete snapshot of the cluster "c", with the pods of these names at version 1.
func Snapshot(version int, names ...string) []*api.WatchResponse {
	made := []*api.WatchResponse{SnapshotBegin(version, "c")}
	for _, name := range names {
		made = append(made, Inside("A", name, 1))
	}
	return append(made, SnapshotEnd(version, len(names)))
}

// SnapshotBegin begins a snapshot.
func SnapshotBegin(version int, cluster string) *api.WatchResponse {
	return &api.WatchResponse{Message: &api.WatchResponse_SnapshotBegin{
		SnapshotBegin: &api.SnapshotBegin{ResourceVersion: strconv.Itoa(version), Cluster: cluster},
	}}
}

// SnapshotEnd ends a snapshot.
func SnapshotEnd(version, count int) *api.WatchResponse {
	return &api.WatchResponse{ResumeVersion: strconv.Itoa(version), Message: &api.WatchResponse_SnapshotEnd{
		SnapshotEnd: &api.SnapshotEnd{ObjectCount: int64(count)},
	}}
}

// GapBegin begins a gap.
func GapBegin(version int) *api.WatchResponse {
	return &api.WatchResponse{Message: &api.WatchResponse_GapBegin{
		GapBegin: &api.GapBegin{ResourceVersion: strconv.Itoa(version), Reason: "expired"},
	}}
}

// GapEnd ends a gap.
func GapEnd(version int) *api.WatchResponse {
	return &api.WatchResponse{ResumeVersion: strconv.Itoa(version), Message: &api.WatchResponse_GapEnd{GapEnd: &api.GapEnd{}}}
}

// Bookmark is a bookmark.
func Bookmark(version int) *api.WatchResponse {
	return &api.WatchResponse{ResumeVersion: strconv.Itoa(version), Message: &api.WatchResponse_Bookmark{Bookmark: &api.Bookmark{}}}
}
