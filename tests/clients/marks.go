package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

const (
	// The label of the objects that a test marks with increasing numbers.
	markLabel = "mark"
	// Precision of the printed times.
	marksPrecision = 5 * time.Millisecond
)

// followMarks runs a dynamic informer of each resource until ctx ends. It prints how many have
// synced whenever the number changes, and each mark that all of them have seen, or a later one.
func followMarks(ctx context.Context, config *rest.Config, agent string, resources []string) error {
	client, err := dynamic.NewForConfig(as(config, agent))
	if err != nil {
		return err
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(client, 0)
	marks := make([]atomic.Uint64, len(resources))
	handles := make([]cache.ResourceEventHandlerRegistration, len(resources))
	for i, resource := range resources {
		parsed, _ := schema.ParseResourceArg(resource)
		if parsed == nil {
			return fmt.Errorf("%q is not RESOURCE.VERSION.GROUP", resource)
		}
		informer := factory.ForResource(*parsed).Informer()
		if err := informer.SetTransform(dropManagedFields); err != nil {
			return err
		}
		observe := func(object any) {
			accessor, err := meta.Accessor(object)
			if err != nil {
				return
			}
			if number, err := strconv.ParseUint(accessor.GetLabels()[markLabel], 10, 64); err == nil {
				marks[i].Store(max(number, marks[i].Load()))
			}
		}
		handles[i], err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    observe,
			UpdateFunc: func(_, object any) { observe(object) },
		})
		if err != nil {
			return err
		}
	}
	start := time.Now()
	factory.Start(ctx.Done())
	ticker := time.NewTicker(marksPrecision)
	defer ticker.Stop()
	var reached uint64
	synced := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		count := 0
		for _, handle := range handles {
			if handle.HasSynced() {
				count++
			}
		}
		if count > synced {
			synced = count
			if err := printJSON(map[string]any{"synced": synced, "seconds": time.Since(start).Seconds()}); err != nil {
				return err
			}
		}
		loaded := make([]uint64, len(marks))
		for i := range marks {
			loaded[i] = marks[i].Load()
		}
		if least := slices.Min(loaded); least > reached {
			reached = least
			if err := printJSON(map[string]any{"reached": reached}); err != nil {
				return err
			}
		}
	}
}
