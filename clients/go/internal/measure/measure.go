// Package measure runs one informer of all pods, whose memory and CPU time are read from outside by
// tests/integration/languages/cost.rs, which also describes the lines that it reads and writes.
// There are two programs, because a program that reads over kubefan need not link the clients of
// all groups.
package measure

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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	"kubefan.dev/clients/go/informers"
)

// Arguments are those of both programs: MODE ADDRESS CA_FILE TOKEN PATH...
type Arguments struct {
	Mode, Address, CAFile, Token string
	Paths                        []string
}

// Run measures the informer of a source, which is made when the test says so.
func Run(source func(Arguments) (apiruntime.Object, cache.ListerWatcher, error)) {
	input := bufio.NewReader(os.Stdin)
	fmt.Println("ready")
	expect(input, "start")
	example, made, err := source(Arguments{
		Mode: os.Args[1], Address: os.Args[2], CAFile: os.Args[3], Token: os.Args[4], Paths: os.Args[5:],
	})
	if err != nil {
		log.Fatal(err)
	}
	informer := cache.NewSharedIndexInformer(made, example, 0, cache.Indexers{})
	// A handler that reads the same fields as a real program.
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
