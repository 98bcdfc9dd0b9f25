package informers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/internal/leaks"
	"kubefan.dev/clients/go/internal/scripted"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// waitAtMost bounds each wait of a test.
const waitAtMost = time.Minute

func listWatch(t *testing.T, server *scripted.Server, example runtime.Object) *ListWatch {
	t.Helper()
	client, err := kubefan.Connect(t.Context(), server.Address, kubefan.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	made := NewListWatch(client, "pods", "", example)
	made.WatchOptions.Backoff = kubefan.BackoffOptions{Initial: time.Millisecond, Max: time.Millisecond}
	return made
}

// seen reads events and writes each in one word: its type, name and version.
func seen(t *testing.T, from watch.Interface, count int) (words []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitAtMost)
	defer cancel()
	for range count {
		select {
		case event, open := <-from.ResultChan():
			if !open {
				return append(words, "end")
			}
			if event.Type == watch.Error {
				words = append(words, fmt.Sprintf("ERROR %d", event.Object.(*metav1.Status).Code))
				continue
			}
			meta, err := apimeta.Accessor(event.Object)
			if err != nil {
				t.Fatal(err)
			}
			end := ""
			if meta.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				end = " end-of-state"
			}
			words = append(words, strings.TrimSpace(fmt.Sprintf("%s %s %s%s", event.Type, meta.GetName(), meta.GetResourceVersion(), end)))
		case <-ctx.Done():
			t.Fatal("no event", words)
		}
	}
	return words
}

func expect(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("\n%q, not\n%q", got, want)
	}
}

var (
	withState = metav1.ListOptions{SendInitialEvents: new(true), AllowWatchBookmarks: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}
	resumed   = metav1.ListOptions{ResourceVersion: "10", AllowWatchBookmarks: true}
)

func watched(t *testing.T, source *ListWatch, options metav1.ListOptions) watch.Interface {
	t.Helper()
	made, err := source.WatchWithContext(context.Background(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(made.Stop)
	return made
}

func checkLeaks(t *testing.T) {
	t.Helper()
	leaks.Check(t, goleak.IgnoreCurrent())
}

func TestAStateEndsWithTheBookmarkThatClientGoWaitsFor(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t, scripted.Answer{Messages: append(scripted.Snapshot(10, "x", "y"), scripted.Event("D", "x", 11), scripted.Bookmark(15))})
	got := watched(t, listWatch(t, server, &corev1.Pod{}), withState)
	expect(t, seen(t, got, 5), "ADDED x 1", "ADDED y 1", "BOOKMARK  10 end-of-state", "DELETED x 11", "BOOKMARK  15")
}

func TestAWatchContinuesFromThePlaceOfItsList(t *testing.T) {
	checkLeaks(t)
	bookmark := scripted.Bookmark(10)
	bookmark.VersionIsComplete = true
	server := scripted.Start(t,
		scripted.Answer{Messages: []*api.WatchResponse{bookmark}, Err: scripted.Refusal(codes.Unavailable, "DRAINING", "draining")},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 11)}})
	server.OnList(func(*api.ListRequest) ([]*api.ListResponse, error) {
		return []*api.ListResponse{{ResourceVersion: "10", VersionIsComplete: true, Cluster: "c"}}, nil
	})
	source := listWatch(t, server, &corev1.Pod{})
	list, err := source.List(metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if version := list.(*metainternal.List).ResourceVersion; version != "10" {
		t.Fatal(version)
	}
	// The bookmark, the break and its end move no version, so client-go hears of none.
	expect(t, seen(t, watched(t, source, resumed), 1), "ADDED x 11")
	for _, request := range server.Requests() {
		if request.ResourceVersion != "10" || !request.GetVersionIsComplete() || request.Cluster != "c" {
			t.Fatal(request)
		}
	}
}

func TestAGapIsHeldBackUntilItsEndAndThenDeliveredInTheOrderOfVersions(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t, scripted.Answer{Messages: []*api.WatchResponse{
		scripted.GapBegin(10), scripted.Inside("M", "a", 30), scripted.Inside("A", "b", 20), scripted.GapEnd(40), scripted.Event("M", "a", 41),
	}})
	got := watched(t, listWatch(t, server, &corev1.Pod{}), resumed)
	expect(t, seen(t, got, 4), "ADDED b 20", "MODIFIED a 30", "BOOKMARK  40", "MODIFIED a 41")
}

func TestAGapThatBreaksIsNotDelivered(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t,
		scripted.Answer{
			Messages: []*api.WatchResponse{scripted.GapBegin(10), scripted.Inside("A", "b", 20)},
			Err:      scripted.Refusal(codes.Unavailable, "DRAINING", "draining"),
		},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "c", 50)}})
	source := listWatch(t, server, &corev1.Pod{})
	var broken []error
	source.OnError = func(err error) { broken = append(broken, err) }
	got := watched(t, source, resumed)
	expect(t, seen(t, got, 1), "ADDED c 50")
	got.Stop()
	if requests := server.Requests(); len(requests) != 2 || requests[1].ResourceVersion != "10" || len(broken) != 1 {
		t.Fatal(requests, broken)
	}
}

func TestAMissedDeletionBecomesExpired(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t, scripted.Answer{Messages: []*api.WatchResponse{
		scripted.GapBegin(10), scripted.Inside("U", "a", 5), scripted.Inside("A", "b", 20), scripted.GapEnd(40),
	}})
	got := watched(t, listWatch(t, server, &corev1.Pod{}), resumed)
	expect(t, seen(t, got, 2), "ERROR 410", "end")
}

func TestAStateThatBreaksEndsTheWatch(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t, scripted.Answer{Messages: scripted.Snapshot(10, "x", "y")[:2], Err: scripted.Refusal(codes.Unavailable, "DRAINING", "draining")})
	got := watched(t, listWatch(t, server, &corev1.Pod{}), withState)
	expect(t, seen(t, got, 3), "ADDED x 1", "ERROR 503", "end")
}

func TestAStateOlderThanTheKnownVersionIsRefusedUnlessItIsOfAnotherCluster(t *testing.T) {
	checkLeaks(t)
	other := []*api.WatchResponse{scripted.SnapshotBegin(4, "d"), scripted.SnapshotEnd(4, 0)}
	server := scripted.Start(t,
		scripted.Answer{Messages: scripted.Snapshot(10)}, scripted.Answer{Messages: scripted.Snapshot(9)}, scripted.Answer{Messages: other})
	source := listWatch(t, server, &corev1.Pod{})
	expect(t, seen(t, watched(t, source, withState), 1), "BOOKMARK  10 end-of-state")
	expect(t, seen(t, watched(t, source, withState), 2), "ERROR 503", "end")
	server.OnList(func(*api.ListRequest) ([]*api.ListResponse, error) {
		return []*api.ListResponse{{ResourceVersion: "9", Cluster: "c"}}, nil
	})
	if _, err := source.List(metav1.ListOptions{}); !apierrors.IsServiceUnavailable(err) {
		t.Fatal(err)
	}
	expect(t, seen(t, watched(t, source, withState), 1), "BOOKMARK  4 end-of-state")
}

func TestObjectsAreDecodedToTheExampleWithVersionAndKind(t *testing.T) {
	checkLeaks(t)
	example := &unstructured.Unstructured{}
	example.SetAPIVersion("v1")
	example.SetKind("Pod")
	projected := scripted.Event("A", "x", 11)
	projected.GetEvent().Object = []byte(`{"spec":{"priority":7}}`)
	broken := scripted.Event("M", "x", 12)
	broken.GetEvent().Object = []byte(`{"spec":[]}`)
	gone := scripted.Event("D", "x", 13)
	gone.GetEvent().Object = []byte(`{"spec":[]}`)
	server := scripted.Start(t,
		scripted.Answer{Messages: []*api.WatchResponse{projected}},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 11), broken, gone}},
		scripted.Answer{})

	event := <-watched(t, listWatch(t, server, example), resumed).ResultChan()
	object := event.Object.(*unstructured.Unstructured)
	priority, _, _ := unstructured.NestedInt64(object.Object, "spec", "priority")
	if object.GetName() != "x" || object.GetNamespace() != "a" || object.GetResourceVersion() != "11" || object.GetKind() != "Pod" || priority != 7 {
		t.Fatal(object)
	}

	source := listWatch(t, server, &corev1.Pod{})
	var mu sync.Mutex
	var reported []string
	source.OnError = func(err error) {
		mu.Lock()
		defer mu.Unlock()
		reported = append(reported, err.Error())
	}
	typed := watched(t, source, resumed)
	first := (<-typed.ResultChan()).Object.(*corev1.Pod)
	if first.UID != "u-x" || first.Kind != "" || first.APIVersion != "" {
		t.Fatal(first)
	}
	// The modification cannot be decoded; the deletion is not lost for that.
	expect(t, seen(t, typed, 2), "BOOKMARK  12", "DELETED x 13")
	mu.Lock()
	defer mu.Unlock()
	if len(reported) != 1 || !strings.HasPrefix(reported[0], "a/x: ") {
		t.Fatal(reported)
	}
	metadata := listWatch(t, server, &metav1.PartialObjectMetadata{})
	watched(t, metadata, resumed)
	if kind := server.Requests()[2].Projection.GetType(); kind != api.ProjectionType_PROJECTION_TYPE_METADATA {
		t.Fatal(kind)
	}
}

func TestOptionsThatMeanNothingAreBadRequests(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t)
	source := listWatch(t, server, &corev1.Pod{})
	source.WatchOptions.Projection.Fields = []string{}
	_, listErr := source.ListWithContext(t.Context(), metav1.ListOptions{})
	_, watchErr := source.WatchWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "10"})
	source.WatchOptions.Projection.Fields, source.WatchOptions.Fallback = nil, kubefan.FallbackNever+1
	_, fallbackErr := source.WatchWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "10"})
	for err, word := range map[error]string{listErr: "Fields", watchErr: "Fields", fallbackErr: "FallbackNever"} {
		if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), word) {
			t.Error(err)
		}
	}
}

func TestProtobufIsDecodedAsClientGoDecodesIt(t *testing.T) {
	checkLeaks(t)
	known := runtime.NewScheme()
	if err := corev1.AddToScheme(known); err != nil {
		t.Fatal(err)
	}
	metav1.AddToGroupVersion(known, schema.GroupVersion{Version: "v1"})
	encode := func(object runtime.Object, kind schema.GroupVersionKind) []byte {
		object = object.DeepCopyObject()
		object.GetObjectKind().SetGroupVersionKind(kind)
		encoded, err := runtime.Encode(protobuf.NewSerializer(known, known), object)
		if err != nil {
			t.Fatal(err)
		}
		return encoded
	}
	want := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "x", UID: "u-x", ResourceVersion: "11", Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	added := scripted.Event("A", "x", 11)
	added.GetEvent().Object = encode(want, corev1.SchemeGroupVersion.WithKind("Pod"))
	cut := added.GetEvent().Object[:len(added.GetEvent().Object)-20]
	broken, gone := scripted.Event("M", "x", 12), scripted.Event("D", "x", 13)
	broken.GetEvent().Object, gone.GetEvent().Object = cut, cut
	partial := &metav1.PartialObjectMetadata{ObjectMeta: want.ObjectMeta}
	metadata := scripted.Event("A", "x", 11)
	metadata.GetEvent().Object = encode(partial, metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"))
	server := scripted.Start(t,
		scripted.Answer{Messages: []*api.WatchResponse{added, broken, gone}},
		scripted.Answer{Messages: []*api.WatchResponse{metadata}})
	server.OnList(func(request *api.ListRequest) ([]*api.ListResponse, error) {
		if request.GetEncoding() != api.Encoding_ENCODING_PROTOBUF {
			t.Error(request)
		}
		object := &api.Object{Namespace: "a", Name: "x", ResourceVersion: "11", Object: added.GetEvent().GetObject()}
		return []*api.ListResponse{{ResourceVersion: "11", Objects: []*api.Object{object}}}, nil
	})
	source := func(example runtime.Object) *ListWatch {
		made := listWatch(t, server, example)
		made.WatchOptions.Encoding = kubefan.EncodingProtobuf
		return made
	}

	typed := watched(t, source(&corev1.Pod{}), resumed)
	if got := (<-typed.ResultChan()).Object; !equality.Semantic.DeepEqual(got, want) {
		t.Fatal(got)
	}
	// The modification cannot be decoded; the deletion is not lost for that.
	expect(t, seen(t, typed, 2), "BOOKMARK  12", "DELETED x 13")
	listed, err := source(&corev1.Pod{}).List(metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if items, err := apimeta.ExtractList(listed); err != nil || len(items) != 1 || !equality.Semantic.DeepEqual(items[0], want) {
		t.Fatal(items, err)
	}
	kind := metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	partial.TypeMeta = kind
	reader := source(&metav1.PartialObjectMetadata{TypeMeta: kind})
	if got := (<-watched(t, reader, resumed).ResultChan()).Object; !reader.ReadsProtobuf() || !equality.Semantic.DeepEqual(got, partial) {
		t.Fatal(got)
	}
	for _, request := range server.Requests() {
		if request.GetEncoding() != api.Encoding_ENCODING_PROTOBUF {
			t.Fatal(request)
		}
	}

	none := source(&unstructured.Unstructured{})
	_, watchErr := none.Watch(resumed)
	_, listErr := none.List(metav1.ListOptions{})
	for _, err := range []error{watchErr, listErr} {
		if none.ReadsProtobuf() || !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "kubefan.EncodingJSON") {
			t.Fatal(err)
		}
	}
	if requests := server.Requests(); len(requests) != 2 {
		t.Fatal("it asked for objects that it cannot decode", requests)
	}
}

func TestEachRefusalIsTheErrorOfAKubeApiserver(t *testing.T) {
	rows := []struct {
		code   codes.Code
		reason string
		is     func(error) bool
	}{
		{codes.OutOfRange, kubefan.ReasonTooOld, apierrors.IsResourceExpired},
		{codes.OutOfRange, kubefan.ReasonHistoryRewritten, apierrors.IsResourceExpired},
		{codes.Unavailable, kubefan.ReasonTooLarge, func(err error) bool {
			return apierrors.IsTimeout(err) && apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
		}},
		{codes.Unavailable, kubefan.ReasonNotSynced, apierrors.IsTooManyRequests},
		{codes.ResourceExhausted, "LIMIT_REACHED", apierrors.IsTooManyRequests},
		{codes.Unavailable, "STALE", apierrors.IsServiceUnavailable},
		{codes.InvalidArgument, "INVALID_ARGUMENT", apierrors.IsBadRequest},
		{codes.Unauthenticated, "UNAUTHENTICATED", apierrors.IsUnauthorized},
		{codes.PermissionDenied, "FORBIDDEN", apierrors.IsForbidden},
		{codes.NotFound, "RESOURCE_NOT_FOUND", apierrors.IsNotFound},
		{codes.FailedPrecondition, "NOT_CACHED", apierrors.IsNotFound},
		{codes.DeadlineExceeded, "REQUEST_TIMEOUT", apierrors.IsTimeout},
		{codes.Internal, "NOT_RECORDED", apierrors.IsInternalError},
	}
	server := scripted.Start(t)
	source := listWatch(t, server, &corev1.Pod{})
	for _, row := range rows {
		server.OnList(func(*api.ListRequest) ([]*api.ListResponse, error) {
			return nil, scripted.Refusal(row.code, row.reason, "words of kubefan")
		})
		_, err := source.List(metav1.ListOptions{})
		if !row.is(err) || !strings.Contains(err.Error(), "words of kubefan") {
			t.Errorf("%s %s: %#v", row.code, row.reason, err)
		}
	}
	for _, options := range []metav1.ListOptions{{Continue: "x"}, {ResourceVersionMatch: metav1.ResourceVersionMatchExact}} {
		if _, err := source.List(options); !apierrors.IsBadRequest(err) {
			t.Error(err)
		}
	}
	if _, err := source.Watch(metav1.ListOptions{SendInitialEvents: new(false)}); !apierrors.IsBadRequest(err) {
		t.Error(err)
	}
}

func TestSelectorsOfARequestAreAddedToThoseOfTheSource(t *testing.T) {
	source := &ListWatch{Target: kubefan.Target{LabelSelector: "a=b"}}
	target := source.target(metav1.ListOptions{LabelSelector: "c=d", FieldSelector: "metadata.name=x"})
	if target.LabelSelector != "a=b,c=d" || target.FieldSelector != "metadata.name=x" {
		t.Fatal(target)
	}
}

// A shared informer of client-go, over a gap with a missed deletion: its handlers hear of it as
// client-go tells it.
func TestAnInformerHearsOfAMissedDeletionWithTheLastKnownObject(t *testing.T) {
	checkLeaks(t)
	server := scripted.Start(t,
		scripted.Answer{Messages: append(scripted.Snapshot(10, "x", "y"),
			scripted.Event("M", "x", 11), scripted.GapBegin(11), scripted.Inside("U", "x", 11), scripted.GapEnd(20))},
		scripted.Answer{Messages: scripted.Snapshot(20, "y")})
	informer := cache.NewSharedIndexInformer(listWatch(t, server, &corev1.Pod{}), &corev1.Pod{}, 0, cache.Indexers{})
	deleted := make(chan any, 1)
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(object any) { deleted <- object }}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		informer.RunWithContext(ctx)
	}()
	select {
	case object := <-deleted:
		unknown, ok := object.(cache.DeletedFinalStateUnknown)
		if !ok || unknown.Key != "a/x" || unknown.Obj.(*corev1.Pod).ResourceVersion != "11" {
			t.Fatalf("%#v", object)
		}
	case <-time.After(waitAtMost):
		t.Fatal("no call")
	}
	limited, stop := context.WithTimeout(ctx, waitAtMost)
	defer stop()
	for _, version := range []string{"20", "20.end"} {
		if err := WaitUntil(limited, informer.GetStore(), version); err != nil {
			t.Fatal(err)
		}
	}
	if err := WaitUntil(limited, informer.GetStore(), "x"); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	cancel()
	<-ended
}
