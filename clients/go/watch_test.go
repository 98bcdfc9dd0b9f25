package kubefan

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"kubefan.dev/clients/go/internal/leaks"
	"kubefan.dev/clients/go/internal/scripted"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// fast makes retries immediate.
var fast = BackoffOptions{Initial: time.Millisecond, Max: time.Millisecond}

func started(t *testing.T, server *scripted.Server, options WatchOptions) *WatchStream {
	t.Helper()
	client, err := Connect(t.Context(), server.Address, Options{})
	if err != nil {
		t.Fatal(err)
	}
	options.Backoff = fast
	watch := client.Watch(context.Background(), Target{Resource: "pods"}, options)
	t.Cleanup(func() {
		watch.Close()
		_ = client.Close()
	})
	return watch
}

func kinds(t *testing.T, watch *WatchStream, count int) (kinds []ItemKind) {
	t.Helper()
	for range count {
		item, err := watch.Next()
		if err != nil {
			t.Fatal(err, kinds)
		}
		kinds = append(kinds, item.Kind)
	}
	return kinds
}

func TestAWatchResumesFromTheLastResumeVersionAndItsCluster(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t,
		scripted.Answer{
			Messages: append(scripted.Snapshot(10, "x"), scripted.Event("M", "x", 12), scripted.GapBegin(12), scripted.Inside("A", "y", 20)),
			Err:      scripted.Refusal(codes.Unavailable, "DRAINING", "draining"),
		},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "z", 13)}},
	)
	watch := started(t, server, WatchOptions{})
	want := []ItemKind{
		ItemSnapshotBegin, ItemEvent, ItemSnapshotEnd, ItemEvent, ItemGapBegin, ItemEvent, ItemDisconnected,
		ItemReconnected, ItemEvent,
	}
	if got := kinds(t, watch, len(want)); !slices.Equal(got, want) {
		t.Fatal(got)
	}
	second := server.Requests()[1]
	if second.ResourceVersion != "12" || second.Cluster != "c" || watch.ResumeVersion() != "13" {
		t.Fatal(second, watch.ResumeVersion())
	}
}

func TestAnItemIsPrintedInAFewWords(t *testing.T) {
	event := scripted.Event("M", "x", 12).GetEvent()
	cluster := &api.Event{Type: api.EventType_EVENT_TYPE_DELETED, Name: "node-1"}
	items := map[string]WatchItem{
		"MODIFIED a/x":           {Event: event},
		"DELETED node-1":         {Event: cluster},
		"no item":                {},
		"SnapshotBegin":          {Kind: ItemSnapshotBegin},
		"SnapshotEnd: 2 objects": {Kind: ItemSnapshotEnd, ObjectCount: 2},
		"GapBegin: expired":      {Kind: ItemGapBegin, Reason: "expired"},
		"Restarted: the end":     {Kind: ItemRestarted, Err: errors.New("the end")},
		"Disconnected: the end; retry in 1.2s": {
			Kind: ItemDisconnected, Err: errors.New("the end"), RetryIn: 1200 * time.Millisecond,
		},
	}
	for want, item := range items {
		if got := fmt.Sprint(item); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

func TestASnapshotThatBreaksStartsAgain(t *testing.T) {
	leaks.Check(t)
	whole := scripted.Snapshot(10, "x", "y")
	server := scripted.Start(t,
		scripted.Answer{Messages: whole[:2], End: true},
		scripted.Answer{Messages: whole},
	)
	watch := started(t, server, WatchOptions{})
	want := []ItemKind{ItemSnapshotBegin, ItemEvent, ItemDisconnected, ItemReconnected, ItemSnapshotBegin, ItemEvent, ItemEvent, ItemSnapshotEnd}
	if got := kinds(t, watch, len(want)); !slices.Equal(got, want) {
		t.Fatal(got)
	}
	if version := server.Requests()[1].ResourceVersion; version != "" {
		t.Fatal(version)
	}
}

func TestAnExpiredVersionRestartsOrEndsTheWatch(t *testing.T) {
	leaks.Check(t)
	expired := scripted.Answer{Err: scripted.Refusal(codes.OutOfRange, ReasonTooOld, "too old resource version: 5 (9)")}
	server := scripted.Start(t, expired, scripted.Answer{Messages: scripted.Snapshot(10)}, expired)
	watch := started(t, server, WatchOptions{ResourceVersion: "5", Cluster: "c"})
	if got := kinds(t, watch, 3); !slices.Equal(got, []ItemKind{ItemRestarted, ItemSnapshotBegin, ItemSnapshotEnd}) {
		t.Fatal(got)
	}
	watch = started(t, server, WatchOptions{ResourceVersion: "5", OnExpired: OnExpiredFail})
	if _, err := watch.Next(); !IsExpired(err) {
		t.Fatal(err)
	}
	if _, err := watch.Next(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

func TestAnErrorThatNoRetryMendsEndsTheWatch(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Err: scripted.Refusal(codes.PermissionDenied, "FORBIDDEN", "no")})
	watch := started(t, server, WatchOptions{})
	var failure *Error
	if _, err := watch.Next(); !errors.As(err, &failure) || failure.Reason != "FORBIDDEN" || failure.IsRetryable() {
		t.Fatal(err)
	}
}

func TestOptionsThatMeanNothingAreRefusedBeforeARequest(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t)
	client, err := Connect(t.Context(), server.Address, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	refused := func(err error, field, word string) {
		t.Helper()
		var failure *Error
		if !errors.As(err, &failure) || failure.Code != codes.InvalidArgument || failure.IsRetryable() ||
			failure.Field != field || !strings.Contains(failure.Message, word) {
			t.Error(err)
		}
	}
	pods := Target{Resource: "pods"}
	watched := func(options WatchOptions) error {
		watch := client.Watch(t.Context(), pods, options)
		defer watch.Close()
		_, err := watch.Next()
		if _, after := watch.Next(); !errors.Is(after, io.EOF) {
			t.Error(after)
		}
		return err
	}
	for word, wrong := range map[string]WatchOptions{
		"EncodingZstdDelta, EncodingProtobuf": {Encoding: EncodingProtobuf + 1},
		"OnExpiredRestart, OnExpiredFail":     {OnExpired: OnExpiredFail + 1},
		"OnLagConflate, OnLagExpire":          {OnLag: -1},
		"FallbackPaced, FallbackNever":        {Fallback: FallbackNever + 1},
	} {
		refused(watched(wrong), "", word)
	}
	_, err = client.List(t.Context(), pods, ReadOptions{Encoding: -1})
	refused(err, "", "EncodingJSON")
	_, err = client.Get(t.Context(), pods, ReadOptions{Encoding: -1})
	refused(err, "", "EncodingJSON")
	for word, wrong := range map[string]Projection{
		"leave Fields nil": {Fields: []string{}},
		"either":           {Fields: []string{"status"}, MetadataOnly: true},
	} {
		refused(watched(WatchOptions{Projection: wrong}), "projection.paths", word)
		_, err := client.List(t.Context(), pods, ReadOptions{Projection: wrong})
		refused(err, "projection.paths", word)
		_, err = client.Get(t.Context(), pods, ReadOptions{Projection: wrong})
		refused(err, "projection.paths", word)
	}
	if requests := server.Requests(); len(requests) != 0 {
		t.Error(requests)
	}
}

func TestAWatchEndsAtItsTimeout(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t, scripted.Answer{Messages: scripted.Snapshot(1), End: true})
	watch := started(t, server, WatchOptions{Timeout: time.Hour})
	count := 0
	for _, err := range watch.All() {
		if err != nil {
			t.Fatal(err)
		}
		count++
	}
	if seconds := server.Requests()[0].TimeoutSeconds; count != 2 || seconds < 3500 || seconds > 3600 {
		t.Fatal(count, seconds)
	}
}

func TestADeltaForOtherBytesIsAskedForAgainWithoutStateKept(t *testing.T) {
	leaks.Check(t)
	wrong := scripted.Event("M", "x", 11)
	wrong.GetEvent().Object, wrong.GetEvent().Delta = nil, &api.ObjectDelta{BaseCrc32: 1}
	server := scripted.Start(t,
		scripted.Answer{Messages: append(scripted.Snapshot(10, "x"), wrong)},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("M", "x", 11)}, Err: scripted.Refusal(codes.Unavailable, "DRAINING", "")},
		scripted.Answer{},
	)
	watch := started(t, server, WatchOptions{Encoding: EncodingZstdDelta})
	want := []ItemKind{ItemSnapshotBegin, ItemEvent, ItemSnapshotEnd, ItemDisconnected, ItemReconnected, ItemEvent, ItemDisconnected, ItemReconnected}
	if got := kinds(t, watch, len(want)); !slices.Equal(got, want) {
		t.Fatal(got)
	}
	for i, request := range server.Requests() {
		if request.StateKept || i > 0 && request.ResourceVersion != []string{"10", "11"}[i-1] {
			t.Error(i, request)
		}
	}
}

func TestASpanThatBrokeOffLeavesNoBaseOfDeltas(t *testing.T) {
	leaks.Check(t)
	broken := scripted.Refusal(codes.Unavailable, "DRAINING", "")
	server := scripted.Start(t,
		scripted.Answer{Messages: append(scripted.Snapshot(10, "x"), scripted.GapBegin(10), scripted.Inside("M", "x", 12)), Err: broken},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Bookmark(10)}, Err: broken},
		scripted.Answer{},
	)
	watch := started(t, server, WatchOptions{Encoding: EncodingZstdDelta})
	want := []ItemKind{
		ItemSnapshotBegin, ItemEvent, ItemSnapshotEnd, ItemGapBegin, ItemEvent, ItemDisconnected,
		ItemReconnected, ItemBookmark, ItemDisconnected, ItemReconnected,
	}
	if got := kinds(t, watch, len(want)); !slices.Equal(got, want) {
		t.Fatal(got)
	}
	for i, request := range server.Requests() {
		if request.StateKept {
			t.Error(i, request)
		}
	}
}

func TestAWatchEndsWithItsContext(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t)
	client, err := ConnectLazy(server.Address, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	ctx, cancel := context.WithCancel(context.Background())
	watch := client.Watch(ctx, Target{Resource: "pods"}, WatchOptions{})
	if err := watch.Open(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := watch.Next(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestConnectSaysWhyThereIsNoConnection(t *testing.T) {
	leaks.Check(t)
	// Several times: the attempt may fail before the client looks at its state again.
	for range 20 {
		_, err := Connect(t.Context(), "127.0.0.1:1", Options{})
		var failure *Error
		if !errors.As(err, &failure) || failure.Code != codes.Unavailable || !failure.IsRetryable() {
			t.Fatal(err)
		}
	}
}

func TestACallAfterAFailedOneDoesNotWaitForTheConnectTimeout(t *testing.T) {
	leaks.Check(t)
	client, err := ConnectLazy("127.0.0.1:1", Options{ConnectTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 2 {
		var failure *Error
		if _, err := client.List(ctx, Target{Resource: "pods"}, ReadOptions{}); !errors.As(err, &failure) || failure.Code != codes.Unavailable {
			t.Fatal(err)
		}
	}
}

func TestAPortThatDoesNotServeGRPCIsRecognizedAndNotAskedAgain(t *testing.T) {
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	defer server.Close()
	client, err := ConnectLazy(server.Listener.Addr().String(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	_, listErr := client.List(t.Context(), Target{Resource: "pods"}, ReadOptions{})
	watch := client.Watch(t.Context(), Target{Resource: "pods"}, WatchOptions{})
	defer watch.Close()
	_, watchErr := watch.Next()
	for _, err := range []error{listErr, watchErr} {
		var failure *Error
		if !errors.As(err, &failure) || failure.Code != codes.Internal || failure.IsRetryable() ||
			!strings.Contains(err.Error(), "is it kubefan's admin port?") {
			t.Error(err)
		}
	}
}
