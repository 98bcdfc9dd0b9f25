package main

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// record collects the calls of one informer.
type record struct {
	store cache.Store

	lock sync.Mutex
	// Each call of a handler as type, key and resourceVersion, in order.
	calls [][3]string
}

// report is the JSON form of a record, with the final content of the informer's store.
type report struct {
	Calls [][3]string    `json:"calls"`
	Store map[string]any `json:"store"`
}

// inform runs informers of every kind until each has seen an object with the name until, then
// prints their reports.
func inform(ctx context.Context, config *rest.Config, agent, contentType, group, until string) error {
	typedConfig := as(config, agent+"-typed")
	typedConfig.ContentType = contentType
	typed, err := kubernetes.NewForConfig(typedConfig)
	if err != nil {
		return err
	}
	untyped, err := dynamic.NewForConfig(as(config, agent+"-dynamic"))
	if err != nil {
		return err
	}
	bare, err := metadata.NewForConfig(as(config, agent+"-metadata"))
	if err != nil {
		return err
	}
	typedFactory := informers.NewSharedInformerFactory(typed, 0)
	dynamicFactory := dynamicinformer.NewDynamicSharedInformerFactory(untyped, 0)
	metadataFactory := metadatainformer.NewSharedInformerFactory(bare, 0)

	core := typedFactory.Core().V1()
	widgets := schema.GroupVersionResource{Group: group, Version: "v1", Resource: "widgets"}
	pods := schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	all := map[string]cache.SharedIndexInformer{
		"typed/pods":       core.Pods().Informer(),
		"typed/configmaps": core.ConfigMaps().Informer(),
		"typed/nodes":      core.Nodes().Informer(),
		"typed/events":     core.Events().Informer(),
		"dynamic/pods":     dynamicFactory.ForResource(pods).Informer(),
		"dynamic/widgets":  dynamicFactory.ForResource(widgets).Informer(),
		"metadata/pods":    metadataFactory.ForResource(pods).Informer(),
		"metadata/widgets": metadataFactory.ForResource(widgets).Informer(),
	}
	records := make(map[string]*record, len(all))
	synced := make([]cache.InformerSynced, 0, len(all))
	for name, informer := range all {
		seen := &record{store: informer.GetStore()}
		records[name] = seen
		handle, err := informer.AddEventHandler(seen)
		if err != nil {
			return err
		}
		// The handler's state: the informer's own HasSynced only says that its store is filled.
		synced = append(synced, handle.HasSynced)
	}

	start := time.Now()
	typedFactory.Start(ctx.Done())
	dynamicFactory.Start(ctx.Done())
	metadataFactory.Start(ctx.Done())
	if !waitFor(ctx, func() bool {
		for _, done := range synced {
			if !done() {
				return false
			}
		}
		return true
	}) {
		return fmt.Errorf("not synced: %w", ctx.Err())
	}
	if err := printJSON(map[string]any{"synced_seconds": time.Since(start).Seconds()}); err != nil {
		return err
	}
	missing := maps.Clone(records)
	ended := waitFor(ctx, func() bool {
		maps.DeleteFunc(missing, func(_ string, seen *record) bool { return seen.has(until) })
		return len(missing) == 0
	})
	if until != "" && !ended {
		return fmt.Errorf("not all informers received %q: %w", until, ctx.Err())
	}
	reports := make(map[string]report, len(records))
	for name, seen := range records {
		reports[name] = seen.report()
	}
	return printJSON(map[string]any{"informers": reports})
}

// waitFor polls until condition returns true. It returns false if ctx ends first.
func waitFor(ctx context.Context, condition func() bool) bool {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
	return true
}

func (r *record) add(kind string, object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
		kind += " (unseen)"
	}
	accessor, err := meta.Accessor(object)
	if err != nil {
		panic(err)
	}
	r.lock.Lock()
	defer r.lock.Unlock()
	key := cache.MetaObjectToName(accessor).String()
	r.calls = append(r.calls, [3]string{kind, key, accessor.GetResourceVersion()})
}

// OnAdd distinguishes initial objects from later ones.
func (r *record) OnAdd(object any, initial bool) {
	kind := "add"
	if initial {
		kind = "initial"
	}
	r.add(kind, object)
}

// OnUpdate records the new object.
func (r *record) OnUpdate(_, object any) {
	r.add("update", object)
}

// OnDelete records the last state.
func (r *record) OnDelete(object any) {
	r.add("delete", object)
}

// has reports whether a handler was called for an object with this name.
func (r *record) has(name string) bool {
	r.lock.Lock()
	defer r.lock.Unlock()
	for _, call := range r.calls {
		if name != "" && (call[1] == name || strings.HasSuffix(call[1], "/"+name)) {
			return true
		}
	}
	return false
}

func (r *record) report() report {
	r.lock.Lock()
	defer r.lock.Unlock()
	store := make(map[string]any)
	for _, object := range r.store.List() {
		if accessor, err := meta.Accessor(object); err == nil {
			store[cache.MetaObjectToName(accessor).String()] = object
		}
	}
	return report{Calls: r.calls, Store: store}
}
