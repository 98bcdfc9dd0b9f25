// The program whose memory and CPU the measuring test reads: one shared informer of pods, over kubefan
// or straight. It prints "synced", reads a version from its input, and prints what it cost when its
// store has that version.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/informers"
)

// Cost is what a process has used.
type Cost struct {
	CPUMillis int64 `json:"cpu_ms"`
	HeapKiB   int64 `json:"heap_kib"`
	RSSKiB    int64 `json:"rss_kib"`
}

func main() {
	// measure MODE KUBEFAN KUBECONFIG
	source, err := source(os.Args[1], os.Args[2], os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	informer := cache.NewSharedIndexInformer(source, &corev1.Pod{}, 0, cache.Indexers{})
	ctx := context.Background()
	go informer.RunWithContext(ctx)
	cache.WaitForCacheSync(ctx.Done(), informer.HasSynced)
	report("synced", cost())
	input := bufio.NewReader(os.Stdin)
	version, err := input.ReadString('\n')
	if err != nil {
		log.Fatal(err)
	}
	if err := informers.WaitUntil(ctx, informer.GetStore(), strings.TrimSpace(version)); err != nil {
		log.Fatal(err)
	}
	report("done", cost())
	runtime.KeepAlive(informer)
}

func source(mode, address, kubeconfig string) (cache.ListerWatcher, error) {
	if content, found := strings.CutPrefix(mode, "straight-"); found {
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, err
		}
		config.ContentType = map[string]string{"json": "application/json", "protobuf": "application/vnd.kubernetes.protobuf"}[content]
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return nil, err
		}
		return cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", "", fields.Everything()), nil
	}
	client, err := kubefan.Connect(context.Background(), address, kubefan.Options{})
	if err != nil {
		return nil, err
	}
	made := informers.NewListWatch(client, "pods", "", &corev1.Pod{})
	switch mode {
	case "kubefan-zstd":
		made.WatchOptions.Encoding = kubefan.EncodingZstd
	case "kubefan-deltas":
		made.WatchOptions.Encoding = kubefan.EncodingZstdDelta
	case "kubefan-fields":
		made.WatchOptions.Projection.Fields = []string{"spec.nodeName", "status.phase", "metadata.name", "metadata.namespace"}
		made.WatchOptions.OnlyChanges = true
	}
	made.WatchOptions.BookmarkInterval = 1e9
	return made, nil
}

// cost reads the process's own figures, after the garbage was returned.
func cost() Cost {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		log.Fatal(err)
	}
	made := Cost{CPUMillis: (usage.Utime.Nano() + usage.Stime.Nano()) / 1e6}
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	made.HeapKiB = int64(memory.HeapAlloc >> 10)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		log.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "VmRSS: %d kB", &made.RSSKiB)
	}
	return made
}

func report(what string, cost Cost) {
	text, err := json.Marshal(cost)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(what, string(text))
}
