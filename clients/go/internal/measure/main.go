// One informer of all pods, over kubefan or straight, whose memory and CPU time are read from outside by
// tests/integration/languages/cost.rs, which also describes the lines that it reads and writes.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/informers"
)

var contentTypes = map[string]string{
	"straight-json":     apiruntime.ContentTypeJSON,
	"straight-protobuf": apiruntime.ContentTypeProtobuf,
}

func main() {
	// measure MODE ADDRESS CA_FILE TOKEN PATH...
	mode, address, caFile, token, paths := os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5:]
	input := bufio.NewReader(os.Stdin)
	fmt.Println("ready")
	expect(input, "start")
	example, source, err := source(mode, address, caFile, token, paths)
	if err != nil {
		log.Fatal(err)
	}
	informer := cache.NewSharedIndexInformer(source, example, 0, cache.Indexers{})
	// A handler that reads what a program would read.
	var read atomic.Int64
	use := func(object any) { read.Add(int64(len(object.(metav1.Object).GetLabels()))) }
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: use, UpdateFunc: func(_, object any) { use(object) },
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	go informer.RunWithContext(ctx)
	cache.WaitForCacheSync(ctx.Done(), registration.HasSynced)
	fmt.Println("synced", len(informer.GetStore().ListKeys()))
	version := expect(input, "until ")
	if err := informers.WaitUntil(ctx, informer.GetStore(), version); err != nil {
		log.Fatal(err)
	}
	fmt.Println("current", len(informer.GetStore().ListKeys()))
	expect(input, "settle")
	debug.FreeOSMemory()
	fmt.Println("settled")
	_, _ = io.Copy(io.Discard, input)
	runtime.KeepAlive(informer)
}

// expect reads a line with this start, and returns the rest.
func expect(input *bufio.Reader, start string) string {
	line, err := input.ReadString('\n')
	rest, found := strings.CutPrefix(strings.TrimSuffix(line, "\n"), start)
	if err != nil || !found {
		log.Fatalf("expected %q, got %q: %v", start, line, err)
	}
	return rest
}

func source(mode, address, caFile, token string, paths []string) (apiruntime.Object, cache.ListerWatcher, error) {
	if content, found := contentTypes[mode]; found {
		config := &rest.Config{
			Host: address, BearerToken: token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAFile: caFile},
			ContentConfig: rest.ContentConfig{ContentType: content},
		}
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return nil, nil, err
		}
		pods := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", "", fields.Everything())
		return &corev1.Pod{}, cache.ToListWatcherWithWatchListSemantics(pods, client), nil
	}
	var example apiruntime.Object = &corev1.Pod{}
	if mode == "kubefan-metadata" {
		example = &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	}
	client, err := kubefan.Connect(context.Background(), address, kubefan.Options{CAFile: caFile, Token: token})
	if err != nil {
		return nil, nil, err
	}
	made := informers.NewListWatch(client, "pods", "", example)
	made.OnError = func(err error) { log.Print(err) }
	switch mode {
	case "kubefan-json":
	case "kubefan-metadata":
		made.WatchOptions.Projection.DropManagedFields = true
	case "kubefan-fields":
		made.WatchOptions.Projection = kubefan.Projection{Fields: paths, DropManagedFields: true}
	default:
		return nil, nil, fmt.Errorf("%s is no mode", mode)
	}
	return example, made, nil
}
