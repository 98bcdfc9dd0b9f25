package integration

import (
	"context"
	"maps"
	"slices"
	"testing"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"time"

	kubefan "kubefan.dev/clients/go"
	kubefaninformers "kubefan.dev/clients/go/informers"
	"kubefan.dev/clients/go/internal/cluster"
	"kubefan.dev/clients/go/internal/leaks"
)

func checkLeaks(t *testing.T) {
	t.Helper()
	current := goleak.IgnoreCurrent()
	// controller-runtime's own watches of metadata leave one behind when they are stopped.
	filter := goleak.IgnoreAnyFunction("k8s.io/apimachinery/pkg/watch.(*filteredWatch).loop")
	leaks.Check(t, current, filter)
}

func connect(t *testing.T, address string, options kubefan.Options) *kubefan.Client {
	t.Helper()
	client, err := kubefan.Connect(t.Context(), address, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// informer runs a shared informer with a handler that records its calls, until the test ends.
func informer(t *testing.T, source cache.ListerWatcher) (cache.SharedIndexInformer, *calls) {
	t.Helper()
	made, handler := cache.NewSharedIndexInformer(source, &corev1.Pod{}, 0, cache.Indexers{}), newCalls()
	if _, err := made.AddEventHandler(handler); err != nil {
		t.Fatal(err)
	}
	run(t, made)
	return made, handler
}

// strict makes a source end its watch where it would otherwise conflate: handlers then get fewer
// calls than there were changes, which is allowed, but cannot be compared. An error is reported,
// and fails the test.
func strict(source *kubefaninformers.ListWatch, broken *failures) {
	source.WatchOptions.OnLag = kubefan.OnLagExpire
	source.OnError = broken.add
}

func run(t *testing.T, made cache.SharedIndexInformer) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		made.RunWithContext(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	limited, stop := context.WithTimeout(ctx, waitAtMost)
	defer stop()
	if !cache.WaitForCacheSync(limited.Done(), made.HasSynced) {
		t.Fatal("not synced")
	}
}

func TestASharedInformerOverKubefanEqualsOneStraight(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	pods, updates := size()
	create(t, control.Client, 0, pods)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	client := connect(t, fan.Address, kubefan.Options{})

	straight, want := informer(t, cache.NewListWatchFromClient(control.Client.CoreV1().RESTClient(), "pods", "", fields.Everything()))
	over := map[string]cache.SharedIndexInformer{}
	got := map[string]*calls{}
	broken := &failures{}
	for name, encoding := range map[string]kubefan.Encoding{
		"JSON": kubefan.EncodingJSON, "zstd": kubefan.EncodingZstd, "deltas": kubefan.EncodingZstdDelta,
		"protobuf": kubefan.EncodingProtobuf,
	} {
		source := kubefaninformers.NewListWatch(client, "pods", "", &corev1.Pod{})
		source.WatchOptions.Encoding = encoding
		strict(source, broken)
		over[name], got[name] = informer(t, source)
	}
	change(t, control.Client, pods, updates)
	written, err := control.Client.CoreV1().Pods("default").Create(t.Context(), pod(pods), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	limited, cancel := context.WithTimeout(t.Context(), waitAtMost)
	defer cancel()
	for _, it := range append(slices.Collect(maps.Values(over)), straight) {
		if err := kubefaninformers.WaitUntil(limited, it.GetStore(), written.ResourceVersion); err != nil {
			t.Fatal(err)
		}
	}
	for name, it := range over {
		equal := equality.Semantic.DeepEqual
		if name == "deltas" {
			// Deltas are of the canonical form, which has no managedFields.
			equal = func(a, b any) bool {
				a, b = a.(*corev1.Pod).DeepCopy(), b.(*corev1.Pod).DeepCopy()
				a.(*corev1.Pod).ManagedFields, b.(*corev1.Pod).ManagedFields = nil, nil
				return equality.Semantic.DeepEqual(a, b)
			}
		}
		if difference := storesDiffer(straight.GetStore(), it.GetStore(), equal); difference != "" {
			t.Errorf("%s: stores: %s", name, difference)
		}
		eventually(t, name+": handler calls", func() string { return want.differs(got[name]) })
	}
	if err := broken.all(); err != nil {
		t.Error("a watch did not run through: ", err)
	}
	t.Logf("%d pods, %d updates: equal stores, equal handler calls over %v: %s",
		pods, updates, slices.Sorted(maps.Keys(over)), want)
}

func TestAFactoryOfClientGoTakesAnInformerOverKubefan(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	create(t, control.Client, 0, 3)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	client := connect(t, fan.Address, kubefan.Options{})
	factory := informers.NewSharedInformerFactory(control.Client, 0)
	over := factory.InformerFor(&corev1.Pod{}, func(_ kubernetes.Interface, resync time.Duration) cache.SharedIndexInformer {
		return cache.NewSharedIndexInformer(kubefaninformers.NewListWatch(client, "pods", "", &corev1.Pod{}), &corev1.Pod{}, resync,
			cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	})
	if factory.Core().V1().Pods().Informer() != over {
		t.Fatal("the factory made another informer")
	}
	factory.StartWithContext(t.Context())
	if !cache.WaitForCacheSync(t.Context().Done(), over.HasSynced) {
		t.Fatal("not synced")
	}
	if listed, err := factory.Core().V1().Pods().Lister().Pods("default").Get("pod-1"); err != nil || listed.UID == "" {
		t.Fatal(listed, err)
	}
	t.Cleanup(factory.Shutdown)
}
