package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
)

// Interval at which the version of the store is read.
const versionsPrecision = 50 * time.Millisecond

// followVersions runs a dynamic informer of one resource until ctx ends, and prints each version that
// its store reaches: that of an event, or of a bookmark (KEP-5647).
func followVersions(ctx context.Context, config *rest.Config, agent, resource string) error {
	client, err := dynamic.NewForConfig(as(config, agent))
	if err != nil {
		return err
	}
	parsed, _ := schema.ParseResourceArg(resource)
	if parsed == nil {
		return fmt.Errorf("%q is not RESOURCE.VERSION.GROUP", resource)
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(client, 0)
	informer := factory.ForResource(*parsed).Informer()
	factory.Start(ctx.Done())
	ticker := time.NewTicker(versionsPrecision)
	defer ticker.Stop()
	var last string
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		version := informer.GetStore().LastStoreSyncResourceVersion()
		if version == last {
			continue
		}
		last = version
		if err := printJSON(map[string]any{"version": version}); err != nil {
			return err
		}
	}
}
