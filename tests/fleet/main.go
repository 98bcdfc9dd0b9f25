// Command fleet is so many subscribers without kubefan between: informers of client-go with its defaults, each over a connection of
// its own, on all pods of a cluster. It prints "reached N" for every number N in the label "mark" of the pod "marker", once all have
// seen that number or a later one.
//
// Each informer keeps the metadata of the pods alone: that is done after decoding, so the apiserver serves what it would without it,
// and a thousand caches fit into the memory of one machine.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	markerName = "marker"
	markLabel  = "mark"
	// How exactly the moment is told at which the last informer has seen a mark.
	lookInterval = 5 * time.Millisecond
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "the cluster's `FILE`")
	informers := flag.Int("informers", 1, "how many")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	marks := make([]atomic.Uint64, *informers)
	for i := range marks {
		if err := start(ctx, config, &marks[i]); err != nil {
			log.Fatal(err)
		}
	}
	tell(ctx, marks)
}

// start runs one informer, which notes the last mark that it has seen.
func start(ctx context.Context, shared *rest.Config, mark *atomic.Uint64) error {
	config := rest.CopyConfig(shared)
	// Transports are shared by what they are configured with: a dialer of its own makes this one another.
	config.Dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	informer := coreinformers.NewPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{})
	if err := informer.SetTransform(metadataOnly); err != nil {
		return err
	}
	see := func(object any) {
		pod, ok := object.(*corev1.Pod)
		if !ok || pod.Name != markerName {
			return
		}
		if number, err := strconv.ParseUint(pod.Labels[markLabel], 10, 64); err == nil {
			mark.Store(max(number, mark.Load()))
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: see, UpdateFunc: func(_, object any) { see(object) }}
	if _, err := informer.AddEventHandler(handler); err != nil {
		return err
	}
	go informer.RunWithContext(ctx)
	return nil
}

// metadataOnly drops what is not looked at.
func metadataOnly(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	meta := metav1.ObjectMeta{
		Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID, ResourceVersion: pod.ResourceVersion, Labels: pod.Labels,
	}
	return &corev1.Pod{ObjectMeta: meta}, nil
}

// tell prints each mark that all informers have seen.
func tell(ctx context.Context, marks []atomic.Uint64) {
	told := uint64(0)
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		least := marks[0].Load()
		for i := range marks {
			if least = min(least, marks[i].Load()); least == told {
				break
			}
		}
		if least > told {
			told = least
			fmt.Println("reached", told)
		}
	}
}
