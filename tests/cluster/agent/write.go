package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// Objects that exist at the same time. Each is created, changed, and deleted when its number returns.
const writtenObjects = 20

// write creates, changes and deletes ConfigMaps, annotates the pods of a namespace, and once a second labels
// its Service, whose labels its EndpointSlice gets, until it is stopped or its time is over. Failed writes are counted: they do not matter, because all agents
// read what was written.
func write(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("write", flag.ContinueOnError)
	namespace := flags.String("namespace", "shop", "namespace of the objects")
	rate := flags.Int("rate", 20, "writes per second")
	most := flags.Duration("for", 5*time.Minute, "time after which it ends by itself")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *rate < 1 {
		return errors.New("--rate must be at least 1")
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil).ClientConfig()
	if err != nil {
		return err
	}
	config.QPS = -1
	// A write to an apiserver that is gone must not stop the next ones for long.
	config.Timeout = 2 * time.Second
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *most)
	defer cancel()
	ticker := time.NewTicker(time.Second / time.Duration(*rate))
	defer ticker.Stop()
	written, failed := 0, 0
	for step := 0; ; step++ {
		select {
		case <-ctx.Done():
			fmt.Printf("%d writes, %d failed\n", written, failed)
			return nil
		case <-ticker.C:
		}
		writes := []error{writeOne(ctx, clients, *namespace, step)}
		if step%*rate == 0 {
			writes = append(writes, labelService(ctx, clients, *namespace, step))
		}
		for _, err := range writes {
			if err != nil {
				failed++
			} else {
				written++
			}
		}
	}
}

func labelService(ctx context.Context, clients kubernetes.Interface, namespace string, step int) error {
	change := fmt.Appendf(nil, `{"metadata":{"labels":{"step":"%d"}}}`, step)
	_, err := clients.CoreV1().Services(namespace).Patch(ctx, "web", types.MergePatchType, change, metav1.PatchOptions{})
	return err
}

func writeOne(ctx context.Context, clients kubernetes.Interface, namespace string, step int) error {
	maps := clients.CoreV1().ConfigMaps(namespace)
	name := fmt.Sprintf("written-%d", step/4%writtenObjects)
	change := fmt.Appendf(nil, `{"metadata":{"annotations":{"step":"%d"}}}`, step)
	switch step % 4 {
	case 0:
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"step": fmt.Sprint(step)}}
		_, err := maps.Create(ctx, object, metav1.CreateOptions{})
		return err
	case 1:
		_, err := maps.Patch(ctx, name, types.MergePatchType, change, metav1.PatchOptions{})
		return err
	case 2:
		pods, err := clients.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil || len(pods.Items) == 0 {
			return err
		}
		pod := pods.Items[step/4%len(pods.Items)].Name
		_, err = clients.CoreV1().Pods(namespace).Patch(ctx, pod, types.MergePatchType, change, metav1.PatchOptions{})
		return err
	default:
		// Leaves the newest half.
		old := fmt.Sprintf("written-%d", (step/4+writtenObjects/2)%writtenObjects)
		return maps.Delete(ctx, old, metav1.DeleteOptions{})
	}
}

func sorted[V any](all map[string]V) []string { return slices.Sorted(maps.Keys(all)) }
