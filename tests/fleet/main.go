// Command fleet runs many subscribers without kubefan, for comparison: client-go informers with
// default settings, each over its own connection, on all pods of a cluster. The pod "marker" has a
// number in its label "mark". The command prints "reached N" once all informers have seen N or a
// later number.
//
// Each informer keeps only the metadata of the pods. The rest is dropped after decoding, so the
// apiserver's work does not change, and a thousand caches fit into the memory of one machine.
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
	// Precision of the reported time at which the last informer has seen a mark.
	pollInterval = 5 * time.Millisecond
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig `FILE` of the cluster")
	informers := flag.Int("informers", 1, "number of informers")
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
	report(ctx, marks)
}

// start runs one informer, which stores the last mark that it has seen.
func start(ctx context.Context, shared *rest.Config, mark *atomic.Uint64) error {
	config := rest.CopyConfig(shared)
	// client-go shares transports between equal configurations. A dialer of its own gives this
	// informer its own connection.
	config.Dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	informer := coreinformers.NewPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{})
	if err := informer.SetTransform(metadataOnly); err != nil {
		return err
	}
	observe := func(object any) {
		pod, ok := object.(*corev1.Pod)
		if !ok || pod.Name != markerName {
			return
		}
		if number, err := strconv.ParseUint(pod.Labels[markLabel], 10, 64); err == nil {
			mark.Store(max(number, mark.Load()))
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: observe, UpdateFunc: func(_, object any) { observe(object) }}
	if _, err := informer.AddEventHandler(handler); err != nil {
		return err
	}
	go informer.RunWithContext(ctx)
	return nil
}

// metadataOnly drops everything but the metadata that is used.
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

// report prints each mark that all informers have seen.
func report(ctx context.Context, marks []atomic.Uint64) {
	reported := uint64(0)
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		least := marks[0].Load()
		for i := range marks {
			if least = min(least, marks[i].Load()); least == reported {
				break
			}
		}
		if least > reported {
			reported = least
			fmt.Println("reached", reported)
		}
	}
}
