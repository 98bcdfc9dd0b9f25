package informers

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// oldStatesMax is how often in a row a state older than a version that is already known is refused.
// Replicas catch up sooner. A cluster that was restored from a backup may not for a long time.
const oldStatesMax = 10

// ListWatch lists and watches one resource of a kubefan. It is a cache.ListerWatcher, with contexts
// and with the semantics that client-go's WatchListClient needs.
//
// Set its fields before it is used. It may be used from several goroutines, for one watch at a time:
// it remembers the place that its watch has reached.
type ListWatch struct {
	// Target selects the objects. Selectors of a request are added to its selectors.
	Target kubefan.Target
	// WatchOptions are the options of each watch. ResourceVersion, Cluster, Timeout and OnExpired are
	// set for each request. A list has the same Projection, and the same Encoding if that is
	// kubefan.EncodingProtobuf, which needs a type that ReadsProtobuf.
	WatchOptions kubefan.WatchOptions
	// OnError, if set, is called with each error that the watch recovers from, such as a broken
	// connection, and with each object that cannot be decoded. It may be called from several
	// goroutines, and must not block.
	OnError func(error)

	client *kubefan.Client
	decode decoder

	mu    sync.Mutex
	known known
}

// known is the state that one request leaves to the next.
type known struct {
	// version is the latest that was delivered. A replica that lags must not go back behind it.
	version uint64
	// place is version as kubefan resumes from it: several events may have one version.
	place string
	// cluster is the cluster of version.
	cluster string
	// refused counts the states in a row that were older.
	refused int
}

var (
	_ cache.ListerWatcher            = (*ListWatch)(nil)
	_ cache.ListerWatcherWithContext = (*ListWatch)(nil)
)

// NewListWatch returns the reader of a resource, which is any name that kubectl accepts, such as
// "pods" or "deployments.apps". An empty namespace means all of them.
//
// The example has the type of the objects: a typed one such as &corev1.Pod{}, an
// *unstructured.Unstructured with its kind, or a *metav1.PartialObjectMetadata, for which only the
// metadata is sent. It is not changed.
func NewListWatch(client *kubefan.Client, resource, namespace string, example runtime.Object) *ListWatch {
	made := &ListWatch{
		Target: kubefan.Target{Resource: resource, Namespace: namespace},
		client: client,
		decode: decoderOf(example),
	}
	made.WatchOptions.Projection.MetadataOnly = made.decode.isMetadata
	return made
}

// ReadsProtobuf tells whether the type of the objects has protobuf methods, as every built-in type
// has: whether WatchOptions.Encoding may be kubefan.EncodingProtobuf. Types of custom resources
// have none, and neither has *unstructured.Unstructured. A *metav1.PartialObjectMetadata always has
// them, but kubefan has protobuf for built-in kinds only.
func (l *ListWatch) ReadsProtobuf() bool { return l.decode.readsProtobuf }

// checkEncoding returns the error of a request for objects that cannot be decoded.
func (l *ListWatch) checkEncoding() error {
	if l.WatchOptions.Encoding != kubefan.EncodingProtobuf || l.decode.readsProtobuf {
		return nil
	}
	return apierrors.NewBadRequest(fmt.Sprintf(
		"%s cannot be read as protobuf, because %v has no protobuf methods: set WatchOptions.Encoding to kubefan.EncodingJSON or kubefan.EncodingZstd",
		l.Target.Resource, l.decode.kind))
}

// List is ListWithContext without a context.
func (l *ListWatch) List(options metav1.ListOptions) (runtime.Object, error) {
	return l.ListWithContext(context.Background(), options)
}

// Watch is WatchWithContext without a context.
func (l *ListWatch) Watch(options metav1.ListOptions) (watch.Interface, error) {
	return l.WatchWithContext(context.Background(), options)
}

// IsWatchListSemanticsUnSupported tells client-go that a watch may start with the state.
func (l *ListWatch) IsWatchListSemanticsUnSupported() bool { return false }

// ListWithContext returns all objects, as an internal List: kubefan sends a list in chunks of one
// version, so there are no pages. Errors are those of the Kubernetes API.
func (l *ListWatch) ListWithContext(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	if options.Continue != "" {
		return nil, apierrors.NewBadRequest("kubefan sends a list without pages: leave continue out")
	}
	if options.ResourceVersionMatch == metav1.ResourceVersionMatchExact {
		return nil, apierrors.NewBadRequest("kubefan has the current state only: resourceVersionMatch=Exact is not possible")
	}
	if err := l.checkEncoding(); err != nil {
		return nil, err
	}
	list := &metainternal.List{}
	read := kubefan.ReadOptions{
		ResourceVersion: minimum(options.ResourceVersion), Projection: l.WatchOptions.Projection,
	}
	// A list is not compressed. In the other encodings its objects are JSON, as in the watch.
	if l.WatchOptions.Encoding == kubefan.EncodingProtobuf {
		read.Encoding = kubefan.EncodingProtobuf
	}
	isFirst := true
	err := l.client.ListChunks(ctx, l.target(options), read, func(chunk *api.ListResponse) error {
		if isFirst {
			if err := l.accepts(chunk.GetResourceVersion(), chunk.GetCluster()); err != nil {
				return err
			}
			isFirst = false
			l.deliveredState(chunk.GetResourceVersion(), chunk.GetCluster())
		}
		list.ResourceVersion = whole(chunk.GetResourceVersion())
		for _, it := range chunk.GetObjects() {
			object, err := l.decode.object(it.GetObject(), it.GetResourceVersion())
			if err != nil {
				l.report(fmt.Errorf("%s: %w", key(it.GetNamespace(), it.GetName()), err))
				continue
			}
			list.Items = append(list.Items, object)
		}
		return nil
	})
	if err != nil {
		return nil, apiError(err)
	}
	return list, nil
}

// WatchWithContext starts a watch. Without a version, or with SendInitialEvents, it starts with the
// state, which ends with the bookmark that client-go waits for. Errors are those of the Kubernetes
// API.
func (l *ListWatch) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	if err := l.checkEncoding(); err != nil {
		return nil, err
	}
	withState := minimum(options.ResourceVersion) == ""
	if options.SendInitialEvents != nil {
		if !*options.SendInitialEvents && withState {
			return nil, apierrors.NewBadRequest("kubefan has no watch from now on: name a resourceVersion")
		}
		withState = *options.SendInitialEvents
	}
	watchOptions := l.WatchOptions
	watchOptions.OnExpired = kubefan.OnExpiredFail
	watchOptions.ResourceVersion, watchOptions.Cluster, watchOptions.Timeout = "", "", 0
	if !withState {
		watchOptions.ResourceVersion, watchOptions.Cluster = l.resume(options.ResourceVersion)
	}
	if options.TimeoutSeconds != nil {
		watchOptions.Timeout = time.Duration(*options.TimeoutSeconds) * time.Second
	}
	ctx, cancel := context.WithCancel(ctx)
	stream := l.client.Watch(ctx, l.target(options), watchOptions)
	if err := stream.Open(); err != nil {
		// Without a state there is nothing to resume from, so the caller decides when to ask again. With
		// a state the watch continues: client-go would list after most errors, which brings nothing new.
		if withState || !kubefan.IsRetryable(err) {
			l.expired(err)
			cancel()
			stream.Close()
			return nil, apiError(err)
		}
		l.report(err)
	}
	made := &watcher{
		source: l, stream: stream, cancel: cancel, results: make(chan watch.Event), done: make(chan struct{}),
		inState: withState, bookmarks: options.AllowWatchBookmarks,
		version: whole(watchOptions.ResourceVersion), ctx: ctx,
	}
	go made.run()
	return made, nil
}

func (l *ListWatch) target(options metav1.ListOptions) kubefan.Target {
	target := l.Target
	target.LabelSelector = both(target.LabelSelector, options.LabelSelector)
	target.FieldSelector = both(target.FieldSelector, options.FieldSelector)
	return target
}

func both(first, second string) string {
	return strings.Trim(first+","+second, ",")
}

// minimum is the version that a state must have reached. Kubernetes' "0" means any state.
func minimum(version string) string {
	if version == "0" {
		return ""
	}
	return version
}

func key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

func (l *ListWatch) report(err error) {
	if l.OnError != nil {
		l.OnError(err)
	}
}

// resume returns the place to resume from, and its cluster. Several events may have one version, and
// client-go knows no place inside it.
func (l *ListWatch) resume(version string) (string, string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if whole(l.known.place) == version {
		version = l.known.place
	}
	return version, l.known.cluster
}

// whole returns a version without the place inside it ("218" of "218.1" and of "218.end").
func whole(version string) string {
	version, _, _ = strings.Cut(version, ".")
	return version
}

// delivered remembers the latest version that was passed on.
func (l *ListWatch) delivered(version, cluster string) {
	number, err := strconv.ParseUint(whole(version), 10, 64)
	if err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if number >= l.known.version {
		l.known.version, l.known.place = number, version
	}
	l.known.cluster = cluster
}

// deliveredState is delivered, for a state: it may go back, if it was accepted.
func (l *ListWatch) deliveredState(version, cluster string) {
	l.mu.Lock()
	l.known = known{}
	l.mu.Unlock()
	l.delivered(version, cluster)
}

// expired forgets a version that belongs to another history.
func (l *ListWatch) expired(err error) {
	if failure, ok := err.(*kubefan.Error); ok && failure.IsExpired() && failure.Reason != kubefan.ReasonTooOld {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.known = known{}
	}
}

// accepts refuses a state that would go back in time: an informer that listed it would report
// objects as deleted that exist.
func (l *ListWatch) accepts(version, cluster string) error {
	number, err := strconv.ParseUint(whole(version), 10, 64)
	l.mu.Lock()
	defer l.mu.Unlock()
	isSame := cluster == l.known.cluster || cluster == "" || l.known.cluster == ""
	if err != nil || number >= l.known.version || !isSame || l.known.refused >= oldStatesMax {
		return nil
	}
	l.known.refused++
	return &kubefan.Error{
		Address: l.client.Address(), Code: unavailable,
		Message: fmt.Sprintf("this replica is at version %d, behind version %d", number, l.known.version),
	}
}
