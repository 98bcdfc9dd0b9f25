package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// measure runs one informer of pods for a benchmark, which gives the orders of
// benches/informers/client.rs on stdin and reads CPU time and memory from outside.
func measure(ctx context.Context, config *rest.Config, contentType string) error {
	config = rest.CopyConfig(config)
	config.ContentType = contentType
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	informer := factory.Core().V1().Pods().Informer()
	var events, last atomic.Uint64
	count := func(object any) {
		events.Add(1)
		if accessor, err := meta.Accessor(object); err == nil {
			if version, err := strconv.ParseUint(accessor.GetResourceVersion(), 10, 64); err == nil {
				last.Store(version)
			}
		}
	}
	handle, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    count,
		UpdateFunc: func(_, object any) { count(object) },
		DeleteFunc: count,
	})
	if err != nil {
		return err
	}
	orders := bufio.NewScanner(os.Stdin)
	fmt.Println("ready")
	if !orders.Scan() {
		return orders.Err()
	}
	factory.Start(ctx.Done())
	if !waitFor(ctx, handle.HasSynced) {
		return ctx.Err()
	}
	initial := events.Load()
	fmt.Println("synced", len(informer.GetStore().ListKeys()))
	for orders.Scan() {
		order, argument, _ := strings.Cut(orders.Text(), " ")
		switch order {
		case "until":
			version, err := strconv.ParseUint(argument, 10, 64)
			if err != nil {
				return err
			}
			if !waitFor(ctx, func() bool { return last.Load() >= version }) {
				return ctx.Err()
			}
			fmt.Println("current", events.Load()-initial)
		case "collect":
			debug.FreeOSMemory()
			time.Sleep(time.Second)
			fmt.Println("collected")
		}
	}
	return orders.Err()
}
