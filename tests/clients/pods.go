package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// podCalls collects the calls of one informer's handler.
type podCalls struct {
	lock sync.Mutex
	// Each call as type, key, old and new resourceVersion, in order.
	calls [][4]string
	// The name of the pod that marks the end, and whether it was added and deleted.
	marker         string
	added, deleted bool
}

// recordPods runs one informer of all pods until the pod marker was created and deleted. It prints
// when the informer has synced, when it has the marker, and at the end all calls and the store.
func recordPods(ctx context.Context, config *rest.Config, agent, marker string) error {
	client, err := dynamic.NewForConfig(as(config, agent))
	if err != nil {
		return err
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(client, 0)
	informer := factory.ForResource(schema.GroupVersionResource{Version: "v1", Resource: "pods"}).Informer()
	if err := informer.SetTransform(dropManagedFields); err != nil {
		return err
	}
	seen := &podCalls{marker: marker}
	handle, err := informer.AddEventHandler(seen)
	if err != nil {
		return err
	}
	start := time.Now()
	factory.Start(ctx.Done())
	if !waitFor(ctx, handle.HasSynced) {
		return fmt.Errorf("not synced: %w", ctx.Err())
	}
	if err := printJSON(map[string]any{"synced_seconds": time.Since(start).Seconds()}); err != nil {
		return err
	}
	if !waitFor(ctx, func() bool { return seen.has(&seen.added) }) {
		return fmt.Errorf("%q did not appear: %w", marker, ctx.Err())
	}
	if err := printJSON(map[string]any{"marker": marker}); err != nil {
		return err
	}
	if !waitFor(ctx, func() bool { return seen.has(&seen.deleted) }) {
		return fmt.Errorf("%q was not deleted: %w", marker, ctx.Err())
	}
	seen.lock.Lock()
	defer seen.lock.Unlock()
	return printJSON(map[string]any{"calls": seen.calls, "store": informer.GetStore().List()})
}

// dropManagedFields is the informer's transform.
func dropManagedFields(object any) (any, error) {
	if accessor, err := meta.Accessor(object); err == nil {
		accessor.SetManagedFields(nil)
	}
	return object, nil
}

func (p *podCalls) has(what *bool) bool {
	p.lock.Lock()
	defer p.lock.Unlock()
	return *what
}

func (p *podCalls) add(kind string, old, object any) {
	accessor, err := meta.Accessor(object)
	if err != nil {
		panic(err)
	}
	var oldVersion string
	if old != nil {
		before, err := meta.Accessor(old)
		if err != nil {
			panic(err)
		}
		oldVersion = before.GetResourceVersion()
	}
	p.lock.Lock()
	defer p.lock.Unlock()
	key := cache.MetaObjectToName(accessor).String()
	p.calls = append(p.calls, [4]string{kind, key, oldVersion, accessor.GetResourceVersion()})
	if accessor.GetName() == p.marker {
		p.added = true
		p.deleted = kind == "delete" || kind == "delete (unseen)"
	}
}

// OnAdd distinguishes initial objects from later ones.
func (p *podCalls) OnAdd(object any, initial bool) {
	kind := "add"
	if initial {
		kind = "initial"
	}
	p.add(kind, nil, object)
}

// OnUpdate records both states.
func (p *podCalls) OnUpdate(old, object any) {
	p.add("update", old, object)
}

// OnDelete records the last state.
func (p *podCalls) OnDelete(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		p.add("delete (unseen)", nil, unknown.Obj)
		return
	}
	p.add("delete", nil, object)
}
