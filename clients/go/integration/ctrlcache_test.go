package integration

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/ctrlcache"
	"kubefan.dev/clients/go/informers"
	"kubefan.dev/clients/go/internal/cluster"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// failures collects errors, also those that come after the test.
type failures struct {
	mu     sync.Mutex
	errors []error
}

func (f *failures) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errors = append(f.errors, err)
}

func (f *failures) all() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.errors...)
}

// counted counts the reads of pods that reach the apiserver.
type counted struct {
	next  http.RoundTripper
	reads *atomic.Int64
}

func (c counted) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method == http.MethodGet && strings.HasSuffix(request.URL.Path, "/pods") {
		c.reads.Add(1)
	}
	return c.next.RoundTrip(request)
}

// started runs a manager until the test ends, with a handler on its pods, typed and unstructured.
func started(t *testing.T, control *cluster.Cluster, newCache cache.NewCacheFunc) (manager.Manager, []*calls, *atomic.Int64) {
	t.Helper()
	reads := &atomic.Int64{}
	config := rest.CopyConfig(control.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return counted{next: next, reads: reads} })
	made, err := ctrl.NewManager(config, manager.Options{
		NewCache: newCache,
		Metrics:  server.Options{BindAddress: "0"},
		Logger:   logr.Discard(),
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(),
			ByObject: map[client.Object]cache.ByObject{
				&corev1.Pod{}: {
					Label:                 labels.SelectorFromSet(labels.Set{"app": "app-1"}),
					Namespaces:            map[string]cache.Config{"default": {}},
					UnsafeDisableDeepCopy: new(true),
				},
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- made.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	anyPod := &unstructured.Unstructured{}
	anyPod.SetAPIVersion("v1")
	anyPod.SetKind("Pod")
	metadata := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	var handlers []*calls
	for _, object := range []client.Object{&corev1.Pod{}, anyPod, metadata} {
		limited, stop := context.WithTimeout(ctx, waitAtMost)
		defer stop()
		informer, err := made.GetCache().GetInformer(limited, object)
		if err != nil {
			t.Fatal(err)
		}
		handler := newCalls()
		if _, err := informer.AddEventHandler(handler); err != nil {
			t.Fatal(err)
		}
		handlers = append(handlers, handler)
	}
	// GetInformer does not wait for an informer of a manager that is still starting.
	limited, stop := context.WithTimeout(ctx, waitAtMost)
	defer stop()
	if !made.GetCache().WaitForCacheSync(limited) {
		t.Fatal("not synced")
	}
	return made, handlers, reads
}

func TestAManagerOverKubefanEqualsOneStraight(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	pods, updates := size()
	create(t, control.Client, 0, pods)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	kube := connect(t, fan.Address, kubefan.Options{})

	broken := &failures{}
	straight, want, wantReads := started(t, control, nil)
	over, got, gotReads := started(t, control, ctrlcache.NewCache(kube, ctrlcache.Options{
		Configure: func(_ schema.GroupVersionKind, source *informers.ListWatch) { strict(source, broken) },
	}))
	// As a manager reads from the apiserver: protobuf where there is any.
	protobuf, gotProtobuf, protobufReads := started(t, control, ctrlcache.NewCache(kube, ctrlcache.Options{
		Configure: func(_ schema.GroupVersionKind, source *informers.ListWatch) {
			strict(source, broken)
			if source.ReadsProtobuf() {
				source.WatchOptions.Encoding = kubefan.EncodingProtobuf
			}
		},
	}))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(broken.all())
		}
	})
	change(t, control.Client, pods, updates)

	// Writes go to the apiserver, and the cache has them when it says so.
	written := pod(pods + 1)
	written.Labels["app"] = "app-1"
	if err := over.GetClient().Create(t.Context(), written); err != nil {
		t.Fatal(err)
	}
	for i := range want {
		eventually(t, fmt.Sprintf("handler %d", i), func() string { return want[i].differs(got[i]) })
		eventually(t, fmt.Sprintf("handler %d over protobuf", i), func() string { return want[i].differs(gotProtobuf[i]) })
	}
	eventually(t, "stores", func() string {
		lists := [3]corev1.PodList{}
		for i, from := range []manager.Manager{straight, over, protobuf} {
			if err := from.GetCache().List(t.Context(), &lists[i]); err != nil {
				t.Fatal(err)
			}
		}
		byName := map[string]corev1.Pod{}
		for _, it := range lists[0].Items {
			byName[it.Name] = it
		}
		for _, it := range append(lists[1].Items, lists[2].Items...) {
			if len(it.ManagedFields) > 0 || it.Labels["app"] != "app-1" || !equality.Semantic.DeepEqual(it, byName[it.Name]) {
				return it.Name
			}
		}
		pods := len(lists[0].Items)
		if pods != len(lists[1].Items) || pods != len(lists[2].Items) || byName[written.Name].Name == "" {
			return "another number of objects"
		}
		return ""
	})
	// UnsafeDisableDeepCopy is kept: both reads return the same object.
	first, second := &corev1.Pod{}, &corev1.Pod{}
	for _, into := range []*corev1.Pod{first, second} {
		if err := over.GetCache().Get(t.Context(), client.ObjectKeyFromObject(written), into); err != nil {
			t.Fatal(err)
		}
	}
	if &first.Spec.Containers[0] != &second.Spec.Containers[0] {
		t.Error("the cache made copies")
	}
	if gotReads.Load() != 0 || protobufReads.Load() != 0 || wantReads.Load() == 0 {
		t.Errorf("%d lists and watches of pods at the apiserver over kubefan, %d straight", gotReads.Load(), wantReads.Load())
	}
	if err := broken.all(); err != nil {
		t.Error("a watch did not run through: ", err)
	}
	t.Logf("%d pods, %d updates: equal stores, equal handler calls over JSON and protobuf (typed: %s; unstructured: %s; "+
		"metadata: %s); reads of pods at the apiserver: %d straight, %d over kubefan", pods, updates,
		want[0], want[1], want[2], wantReads.Load(), gotReads.Load())
}

func TestACacheReadsATypeDirectAndWaitsForAWrite(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	kube := connect(t, fan.Address, kubefan.Options{})
	made, err := ctrlcache.NewCache(kube, ctrlcache.Options{
		Direct: func(kind schema.GroupVersionKind) bool { return kind.Kind == "ConfigMap" },
	})(control.Config, cache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- made.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	limited, stop := context.WithTimeout(ctx, waitAtMost)
	defer stop()
	if !made.WaitForCacheSync(limited) {
		t.Fatal("not started")
	}
	maps := &corev1.ConfigMapList{}
	if err := made.List(limited, maps); err != nil {
		t.Fatal(err)
	}
	written, err := control.Client.CoreV1().Pods("default").Create(limited, pod(1), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := ctrlcache.WaitUntil(limited, made, &corev1.Pod{}, written.ResourceVersion); err != nil {
		t.Fatal(err)
	}
	if err := made.Get(limited, client.ObjectKeyFromObject(written), &corev1.Pod{}); err != nil {
		t.Fatal(err)
	}
}

var _ toolscache.ResourceEventHandler = (*calls)(nil)
