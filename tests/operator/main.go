// An operator with controller-runtime. For each Service it writes a ConfigMap with the addresses of the
// Service's pods. It reads from one server and writes to another, or does both at one.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/manager/signals"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// The annotations of a ConfigMap name its Service.
const (
	namespaceKey = "operator.example/namespace"
	nameKey      = "operator.example/name"
)

type settings struct {
	server, reads, agent, output, leader string
}

func main() {
	var set settings
	flag.StringVar(&set.server, "server", "", "kubeconfig of the server to write to, and to read from without -reads")
	flag.StringVar(&set.reads, "reads", "", "kubeconfig of the server that the cache reads from")
	flag.StringVar(&set.agent, "agent", "operator", "the User-Agent")
	flag.StringVar(&set.output, "output", "", "namespace of the ConfigMaps")
	flag.StringVar(&set.leader, "leader", "", "name of the Lease of the leader election; without it there is none")
	flag.Parse()
	log.SetLogger(klog.Background())
	if err := run(signals.SetupSignalHandler(), set); err != nil {
		fmt.Fprintln(os.Stderr, "operator:", err)
		os.Exit(1)
	}
}

func connect(kubeconfig, agent string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = agent
	return config, nil
}

func run(ctx context.Context, set settings) error {
	config, err := connect(set.server, set.agent)
	if err != nil {
		return err
	}
	options := manager.Options{
		Metrics:                 server.Options{BindAddress: "0"},
		LeaderElection:          set.leader != "",
		LeaderElectionID:        set.leader,
		LeaderElectionNamespace: set.output,
		Cache: cache.Options{ByObject: map[client.Object]cache.ByObject{
			&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{set.output: {}}},
		}},
	}
	if set.reads != "" {
		reads, err := connect(set.reads, set.agent)
		if err != nil {
			return err
		}
		options.NewCache = func(_ *rest.Config, options cache.Options) (cache.Cache, error) {
			// The manager's HTTP client belongs to the server of the writes.
			options.HTTPClient = nil
			return cache.New(reads, options)
		}
	}
	made, err := manager.New(config, options)
	if err != nil {
		return err
	}
	backends := &backends{client: made.GetClient(), output: set.output}
	err = builder.ControllerManagedBy(made).
		For(&corev1.Service{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(backends.servicesOf)).
		Watches(
			&corev1.ConfigMap{}, handler.EnqueueRequestsFromMapFunc(serviceOf),
			builder.WithPredicates(predicate.NewPredicateFuncs(isOurs)),
		).
		// All replicas watch, not only the leader: a new leader has the state at once.
		WithOptions(controller.Options{EnableWarmup: ptr.To(true)}).
		Complete(backends)
	if err != nil {
		return err
	}
	if err := made.Add(&announcer{made.GetCache()}); err != nil {
		return err
	}
	return made.Start(ctx)
}

// announcer prints a line when the caches have the state, in each replica.
type announcer struct{ cache cache.Cache }

func (a *announcer) NeedLeaderElection() bool { return false }

func (a *announcer) Start(ctx context.Context) error {
	for _, object := range []client.Object{&corev1.Service{}, &corev1.Pod{}, &corev1.ConfigMap{}} {
		if _, err := a.cache.GetInformer(ctx, object); err != nil {
			return err
		}
	}
	fmt.Println("caches synced")
	return nil
}

// backends writes the ConfigMaps. All its reads are from the cache.
type backends struct {
	client client.Client
	output string
}

func (b *backends) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	written := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: b.output, Name: request.Namespace + "." + request.Name,
	}}
	var service corev1.Service
	if err := b.client.Get(ctx, request.NamespacedName, &service); apierrors.IsNotFound(err) {
		return reconcile.Result{}, client.IgnoreNotFound(b.client.Delete(ctx, written))
	} else if err != nil {
		return reconcile.Result{}, err
	}
	var pods corev1.PodList
	err := b.client.List(ctx, &pods, client.InNamespace(request.Namespace), client.MatchingLabels(service.Spec.Selector))
	if err != nil {
		return reconcile.Result{}, err
	}
	data := map[string]string{"service": service.Labels["change"]}
	for _, pod := range pods.Items {
		data[pod.Name] = pod.Status.PodIP + " " + pod.Labels["change"]
	}
	_, err = controllerutil.CreateOrUpdate(ctx, b.client, written, func() error {
		written.Annotations = map[string]string{namespaceKey: request.Namespace, nameKey: request.Name}
		written.Data = data
		return nil
	})
	// The cache may not have the last write yet. The event that brings it comes here again.
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, err
}

// servicesOf returns the Services that select a pod.
func (b *backends) servicesOf(ctx context.Context, pod client.Object) []reconcile.Request {
	var services corev1.ServiceList
	if err := b.client.List(ctx, &services, client.InNamespace(pod.GetNamespace())); err != nil {
		log.FromContext(ctx).Error(err, "the Services of a pod are unknown", "pod", pod.GetName())
		return nil
	}
	var requests []reconcile.Request
	for _, service := range services.Items {
		if labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pod.GetLabels())) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&service)})
		}
	}
	return requests
}

func isOurs(written client.Object) bool { return written.GetAnnotations()[nameKey] != "" }

func serviceOf(_ context.Context, written client.Object) []reconcile.Request {
	annotations := written.GetAnnotations()
	return []reconcile.Request{{NamespacedName: types.NamespacedName{
		Namespace: annotations[namespaceKey], Name: annotations[nameKey],
	}}}
}
