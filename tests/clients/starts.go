package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

const (
	// Informers of one program do not start at the same moment, so each start needs its own proof
	// that the state is fresh.
	betweenStarts = 500 * time.Millisecond
	// Precision of a measured start.
	startPrecision = time.Millisecond
)

// measureStarts starts an informer of one resource of a built-in group several times, one after the
// other. It prints how long each took until its handler had the initial objects.
func measureStarts(ctx context.Context, config *rest.Config, agent, contentType, resource string, count int) error {
	config = as(config, agent)
	config.ContentType = contentType
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	parsed := schema.ParseGroupResource(resource)
	seconds := make([]float64, 0, count)
	for range count {
		took, objects, err := startOnce(ctx, client, parsed.WithVersion("v1"))
		if err != nil {
			return fmt.Errorf("after %v: %w", seconds, err)
		}
		seconds = append(seconds, took.Seconds())
		if err := printJSON(map[string]any{"start_seconds": took.Seconds(), "objects": objects}); err != nil {
			return err
		}
		time.Sleep(betweenStarts)
	}
	return printJSON(map[string]any{"starts": seconds})
}

// startOnce starts an informer, waits until its handler has the initial objects, and stops it.
func startOnce(ctx context.Context, client kubernetes.Interface, resource schema.GroupVersionResource) (time.Duration, int, error) {
	ctx, stop := context.WithCancel(ctx)
	factory := informers.NewSharedInformerFactory(client, 0)
	// Shutdown waits for the informer, which ends with its context.
	defer factory.Shutdown()
	defer stop()
	informer, err := factory.ForResource(resource)
	if err != nil {
		return 0, 0, err
	}
	handle, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{})
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	factory.Start(ctx.Done())
	ticker := time.NewTicker(startPrecision)
	defer ticker.Stop()
	for !handle.HasSynced() {
		select {
		case <-ctx.Done():
			return 0, 0, fmt.Errorf("not synced: %w", ctx.Err())
		case <-ticker.C:
		}
	}
	return time.Since(start), len(informer.Informer().GetStore().ListKeys()), nil
}
