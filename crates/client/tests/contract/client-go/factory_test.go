package contract

import (
	"context"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
)

// A factoryPiece is a factory of informers. The server of every resource has one object. It sends
// nothing if the script names the resource in "mute".
type factoryPiece struct {
	log     *log
	factory dynamicinformer.DynamicSharedInformerFactory
	mute    []string
	known   map[string]cache.SharedIndexInformer
	context context.Context
	cancel  context.CancelFunc
}

func newFactoryPiece(log *log) piece {
	ctx, cancel := context.WithCancel(context.Background())
	return &factoryPiece{log: log, known: map[string]cache.SharedIndexInformer{}, context: ctx, cancel: cancel}
}

func (p *factoryPiece) close() {
	p.cancel()
	time.Sleep(time.Minute)
}

func gvr(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Version: "v1", Resource: name}
}

func (p *factoryPiece) step(command string, arguments []string) []string {
	switch command {
	case "new":
		var resync time.Duration
		if period := durationOption(arguments, "resync"); period != nil {
			resync = *period
		}
		namespace, _ := option(arguments, "namespace")
		var tweak dynamicinformer.TweakListOptionsFunc
		if _, tweaked := option(arguments, "tweak"); tweaked {
			tweak = func(options *metav1.ListOptions) { options.LabelSelector = "app" }
		}
		p.factory = dynamicinformer.NewFilteredDynamicSharedInformerFactory(dynamicClient{p}, resync, namespace, tweak)
		return nil
	case "mute":
		p.mute = arguments
		return nil
	case "informer":
		informer := p.factory.ForResource(gvr(arguments[0])).Informer()
		before, seen := p.known[arguments[0]]
		p.known[arguments[0]] = informer
		if seen {
			return []string{fmt.Sprintf("same as before: %t", before == informer)}
		}
		return nil
	case "handler":
		handler := &handler{name: arguments[0], log: p.log, released: make(chan struct{})}
		handler.unblock()
		_, err := p.factory.ForResource(gvr(arguments[0])).Informer().AddEventHandler(handler)
		return outcome(err)
	case "start":
		p.factory.Start(p.context.Done())
		return nil
	case "wait-for-cache-sync":
		waitContext, stopWaiting := context.WithTimeout(context.Background(), 10*time.Second)
		defer stopWaiting()
		lines := []string{}
		for resource, synced := range p.factory.WaitForCacheSync(waitContext.Done()) {
			lines = append(lines, fmt.Sprintf("%s: %t", resource.Resource, synced))
		}
		slices.Sort(lines)
		return lines
	case "stop":
		p.cancel()
		return nil
	case "shutdown":
		p.factory.Shutdown()
		p.log.add("factory", "shut down")
		return nil
	}
	return unknown(command)
}

// A dynamicClient offers the calls of the factory's informers: list and watch.
type dynamicClient struct {
	piece *factoryPiece
}

type dynamicResource struct {
	dynamic.NamespaceableResourceInterface
	piece     *factoryPiece
	resource  string
	namespace string
}

func (c dynamicClient) Resource(resource schema.GroupVersionResource) dynamic.NamespaceableResourceInterface {
	return dynamicResource{piece: c.piece, resource: resource.Resource}
}

func (r dynamicResource) Namespace(namespace string) dynamic.ResourceInterface {
	r.namespace = namespace
	return r
}

func (r dynamicResource) List(context.Context, metav1.ListOptions) (*unstructured.UnstructuredList, error) {
	panic("the informers use watch-lists")
}

func (r dynamicResource) Watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	line := "watch-list"
	if r.namespace != "" {
		line += " namespace=" + r.namespace
	}
	if options.LabelSelector != "" {
		line += " labels=" + options.LabelSelector
	}
	r.piece.log.add("server of "+r.resource, "%s", line)
	watcher := watch.NewFakeWithChanSize(10, false)
	if !slices.Contains(r.piece.mute, r.resource) {
		thing := &unstructured.Unstructured{}
		thing.SetAPIVersion("v1")
		thing.SetKind("Thing")
		thing.SetNamespace("ns")
		thing.SetName("a")
		thing.SetResourceVersion("5")
		watcher.Add(thing)
		end := &unstructured.Unstructured{}
		end.SetAPIVersion("v1")
		end.SetKind("Thing")
		end.SetResourceVersion("10")
		end.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		watcher.Action(watch.Bookmark, end)
	}
	return watcher, nil
}
