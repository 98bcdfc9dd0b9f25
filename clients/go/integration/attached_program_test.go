package integration

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"kubefan.dev/clients/go/internal/cluster"
)

// A program with 40 informers and a manager of controller-runtime, which also writes.

const (
	customKinds = 12
	writeEvery  = 20 * time.Millisecond
	readEvery   = 100 * time.Millisecond
)

// resources are 28 of Kubernetes and customKinds others.
var resources = func() (all []schema.GroupVersionResource) {
	for group, names := range map[string][]string{
		"/v1": {"pods", "configmaps", "secrets", "services", "serviceaccounts", "endpoints", "limitranges", "resourcequotas",
			"podtemplates", "replicationcontrollers", "persistentvolumeclaims", "persistentvolumes", "nodes"},
		"apps/v1":                      {"deployments", "replicasets", "statefulsets", "daemonsets", "controllerrevisions"},
		"batch/v1":                     {"jobs", "cronjobs"},
		"rbac.authorization.k8s.io/v1": {"roles", "rolebindings"},
		"networking.k8s.io/v1":         {"ingresses", "networkpolicies", "ingressclasses"},
		"policy/v1":                    {"poddisruptionbudgets"},
		"storage.k8s.io/v1":            {"storageclasses"},
		"autoscaling/v2":               {"horizontalpodautoscalers"},
	} {
		groupName, version, _ := strings.Cut(group, "/")
		for _, name := range names {
			all = append(all, schema.GroupVersionResource{Group: groupName, Version: version, Resource: name})
		}
	}
	for number := range customKinds {
		all = append(all, schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: fmt.Sprintf("kind%ds", number)})
	}
	return all
}()

// written are those of the resources whose objects change.
var written = func() (found []schema.GroupVersionResource) {
	for _, each := range resources {
		if each.Group == "example.com" || slices.Contains([]string{"configmaps", "secrets", "pods"}, each.Resource) {
			found = append(found, each)
		}
	}
	return found
}()

func resourceNames() string {
	names := []string{}
	for _, each := range resources {
		names = append(names, each.GroupResource().String())
	}
	return strings.Join(names, ",")
}

// createCustomKinds creates the custom resources, and waits until they are served.
func createCustomKinds(t *testing.T, control *cluster.Cluster) {
	t.Helper()
	writer, err := dynamic.NewForConfig(control.Config)
	if err != nil {
		t.Fatal(err)
	}
	definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	for number := range customKinds {
		plural, kind := fmt.Sprintf("kind%ds", number), fmt.Sprintf("Kind%d", number)
		made := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
			"metadata": map[string]any{"name": plural + ".example.com"},
			"spec": map[string]any{
				"group": "example.com", "scope": "Namespaced",
				"names": map[string]any{"plural": plural, "singular": strings.ToLower(kind), "kind": kind},
				"versions": []any{map[string]any{
					"name": "v1", "served": true, "storage": true,
					"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
				}},
			},
		}}
		if _, err := writer.Resource(definitions).Create(t.Context(), made, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, each := range resources {
		eventually(t, each.Resource+" is served", func() string {
			if _, err := writer.Resource(each).List(t.Context(), metav1.ListOptions{}); err != nil {
				return err.Error()
			}
			return ""
		})
	}
}

// answer is that of a server to a read.
type answer struct {
	isDirect bool
	// kind is "list", "get", "state" (a watch that begins with it) or "resume".
	kind     string
	resource string
	status   int
	at       time.Time
}

// traffic records the answers to reads: direct ones are those of the apiserver.
type traffic struct {
	apiserver string
	mu        sync.Mutex
	answers   []answer
}

func (f *traffic) wrap(next http.RoundTripper) http.RoundTripper {
	return recorded{next: next, traffic: f}
}

type recorded struct {
	next    http.RoundTripper
	traffic *traffic
}

func (r recorded) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.next.RoundTrip(request)
	if request.Method != http.MethodGet {
		return response, err
	}
	made := answer{isDirect: "https://"+request.URL.Host == r.traffic.apiserver, at: time.Now()}
	if err == nil {
		made.status = response.StatusCode
	}
	made.kind, made.resource = kindOf(request)
	r.traffic.mu.Lock()
	defer r.traffic.mu.Unlock()
	r.traffic.answers = append(r.traffic.answers, made)
	return response, err
}

func kindOf(request *http.Request) (kind, resource string) {
	query, parts := request.URL.Query(), strings.Split(request.URL.Path, "/")
	last := parts[len(parts)-1]
	isState := query.Get("resourceVersion") == "" || query.Get("sendInitialEvents") == "true"
	switch {
	case query.Has("watch") && isState:
		return "state", last
	case query.Has("watch"):
		return "resume", last
	case slices.Contains(parts, "namespaces"):
		return "get", parts[len(parts)-2]
	default:
		return "list", last
	}
}

// since returns the answers after a time.
func (f *traffic) since(from time.Time) (found []answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, each := range f.answers {
		if each.at.After(from) {
			found = append(found, each)
		}
	}
	return found
}

// counts returns the number of reads of each kind at the apiserver.
func (f *traffic) counts(from time.Time) map[string]int {
	found := map[string]int{}
	for _, each := range f.since(from) {
		if each.isDirect {
			found[each.kind]++
		}
	}
	return found
}

// unwatched returns the resources without a watch that a server has accepted since then. One that
// kubefan's cache has left to the apiserver before stays there, also if kubefan is lost or returns.
func (f *traffic) unwatched(isDirect bool, from time.Time) string {
	missing := map[string]bool{}
	for _, each := range resources {
		missing[each.Resource] = true
	}
	for _, each := range f.since(time.Time{}) {
		isAccepted := each.status == http.StatusOK
		switch {
		case each.kind != "state" && each.kind != "resume":
		case !each.isDirect && each.status == http.StatusGatewayTimeout, isAccepted && each.isDirect == isDirect && each.at.After(from):
			delete(missing, each.resource)
		case isAccepted && !each.isDirect && !each.at.After(from):
			missing[each.resource] = true
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(missing)), " ")
}

// history records the calls of a handler, and when they came.
type history struct {
	*calls
	mu sync.Mutex
	at map[string]time.Time
	// repeated is the number of calls for a version that was told before.
	repeated int
}

func (h *history) note(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	meta, err := apimeta.Accessor(object)
	if err != nil {
		panic(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := string(meta.GetUID()) + " " + meta.GetResourceVersion()
	if _, isRepeated := h.at[key]; isRepeated {
		h.repeated++
	} else {
		h.at[key] = time.Now()
	}
}

func (h *history) OnAdd(object any, isInitial bool) {
	if !isInitial {
		h.note(object)
		h.calls.OnAdd(object, false)
	}
}

func (h *history) OnUpdate(old, object any) {
	h.note(object)
	h.calls.OnUpdate(old, object)
}

func (h *history) OnDelete(object any) {
	h.note(object)
	h.calls.OnDelete(object)
}

// latest returns how much later than another history this one has an event after a moment, at most.
func (h *history) latest(other *history, from time.Time) (most time.Duration) {
	h.mu.Lock()
	mine := maps.Clone(h.at)
	h.mu.Unlock()
	other.mu.Lock()
	defer other.mu.Unlock()
	for key, at := range mine {
		if theirs, isKnown := other.at[key]; isKnown && theirs.After(from) {
			most = max(most, at.Sub(theirs))
		}
	}
	return most
}

// watcher is an informer of each resource.
type watcher struct {
	informers map[schema.GroupVersionResource]cache.SharedIndexInformer
	histories map[schema.GroupVersionResource]*history
}

func watchAll(t *testing.T, config *rest.Config) *watcher {
	t.Helper()
	source, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	made := &watcher{
		informers: map[schema.GroupVersionResource]cache.SharedIndexInformer{},
		histories: map[schema.GroupVersionResource]*history{},
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(source, 0)
	for _, each := range resources {
		it, seen := factory.ForResource(each).Informer(), &history{calls: newCalls(), at: map[string]time.Time{}}
		if _, err := it.AddEventHandler(seen); err != nil {
			t.Fatal(err)
		}
		made.informers[each], made.histories[each] = it, seen
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		factory.Shutdown()
	})
	factory.Start(ctx.Done())
	limited, stop := context.WithTimeout(ctx, waitAtMost)
	defer stop()
	for each, isSynced := range factory.WaitForCacheSync(limited.Done()) {
		if !isSynced {
			t.Fatal(each, "is not synced")
		}
	}
	return made
}

// startedManager runs a manager with caches of pods and configmaps, as protobuf.
func startedManager(t *testing.T, config *rest.Config) manager.Manager {
	t.Helper()
	made, err := ctrl.NewManager(config, manager.Options{Metrics: server.Options{BindAddress: "0"}})
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
	limited, stop := context.WithTimeout(ctx, waitAtMost)
	defer stop()
	for _, object := range []client.Object{&corev1.Pod{}, &corev1.ConfigMap{}} {
		if _, err := made.GetCache().GetInformer(limited, object); err != nil {
			t.Fatal(err)
		}
	}
	return made
}

// load writes and reads all the time.
type load struct {
	client dynamic.Interface
	// isExcused: the apiserver is away, so that a direct write fails too.
	isExcused atomic.Bool
	writes    atomic.Int64
	// failed are the failures without an excuse, and allFailed is the number with it.
	failed    failures
	allFailed atomic.Int64
	// prefix is that of the names of its objects.
	prefix string

	mu    sync.Mutex
	reads []time.Time
}

func startLoad(t *testing.T, config *rest.Config, prefix string) (made *load, stop func()) {
	t.Helper()
	writer, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	made = &load{client: writer, prefix: prefix}
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { made.writeAll(ctx) })
	group.Go(func() { made.readAll(ctx) })
	stop = sync.OnceFunc(func() {
		cancel()
		group.Wait()
	})
	t.Cleanup(stop)
	return made, stop
}

// writeAll creates, changes and deletes objects of each written resource in turn.
func (l *load) writeAll(ctx context.Context) {
	ticker := time.NewTicker(writeEvery)
	defer ticker.Stop()
	for number := 0; ; number++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		wasExcused := l.isExcused.Load()
		err := ignoreMissing(l.write(ctx, written[number%len(written)], number/len(written)))
		if err != nil && ctx.Err() == nil {
			l.allFailed.Add(1)
		}
		if err != nil && ctx.Err() == nil && !wasExcused && !l.isExcused.Load() {
			l.failed.add(fmt.Errorf("write %d: %w", number, err))
		}
		l.writes.Add(1)
	}
}

// write creates an object in the first of six turns, and deletes it in the last one.
func (l *load) write(ctx context.Context, to schema.GroupVersionResource, turn int) error {
	objects := l.client.Resource(to).Namespace("default")
	name := fmt.Sprintf("%s-%d", l.prefix, turn/6%5)
	switch turn % 6 {
	case 0:
		_, err := objects.Create(ctx, objectOf(to, name), metav1.CreateOptions{})
		return err
	case 5:
		return objects.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	default:
		patch := fmt.Sprintf(`{"metadata":{"labels":{"turn":"%d"}}}`, turn)
		_, err := objects.Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
}

func objectOf(resource schema.GroupVersionResource, name string) *unstructured.Unstructured {
	kind := map[string]string{"pods": "Pod", "configmaps": "ConfigMap", "secrets": "Secret"}[resource.Resource]
	if kind == "" {
		kind = "K" + strings.TrimSuffix(resource.Resource[1:], "s")
	}
	made := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"containers": []any{map[string]any{"name": "main", "image": "registry.example/app:1.0"}},
	}}}
	if kind == "ConfigMap" || kind == "Secret" {
		delete(made.Object, "spec")
	}
	made.SetGroupVersionKind(resource.GroupVersion().WithKind(kind))
	made.SetName(name)
	return made
}

// readAll gets an object that a cache may answer.
func (l *load) readAll(ctx context.Context) {
	ticker := time.NewTicker(readEvery)
	defer ticker.Stop()
	for ctx.Err() == nil {
		objects := l.client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}).Namespace("kube-system")
		_, err := objects.Get(ctx, "extension-apiserver-authentication", metav1.GetOptions{ResourceVersion: "0"})
		if err == nil {
			l.mu.Lock()
			l.reads = append(l.reads, time.Now())
			l.mu.Unlock()
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// gap returns the longest time without an answer after a moment, and the number of answers.
func (l *load) gap(from time.Time) (most time.Duration, answers int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := from
	for _, at := range l.reads {
		if at.After(from) {
			most, last = max(most, at.Sub(last)), at
			answers++
		}
	}
	return most, answers
}
