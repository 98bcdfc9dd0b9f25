package integration

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

const (
	// waitAtMost bounds each wait of a test.
	waitAtMost = 5 * time.Minute
	pollEvery  = 50 * time.Millisecond
	// writers is how many write at the same time.
	writers = 16
)

// size is the number of pods and of updates: 10,000 and 5,000 with KUBEFAN_TEST_SCALE=full.
func size() (pods, updates int) {
	if os.Getenv("KUBEFAN_TEST_SCALE") == "full" {
		return 10_000, 5_000
	}
	return 300, 300
}

func pod(number int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("pod-%d", number), Namespace: "default",
			Labels:      map[string]string{"app": fmt.Sprintf("app-%d", number%3), "number": fmt.Sprint(number)},
			Annotations: map[string]string{"example.com/notes": strings.Repeat("some words about this pod ", 20)},
		},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{
				{Name: "main", Image: "registry.example/app:1.0", Command: []string{"/bin/app", "--verbose"}},
				{Name: "sidecar", Image: "registry.example/sidecar:2.1"},
			},
		},
	}
}

// parallel calls each with 0 to count-1, from several goroutines.
func parallel(t *testing.T, count int, each func(int) error) {
	t.Helper()
	var group sync.WaitGroup
	numbers := make(chan int)
	for range writers {
		group.Go(func() {
			for number := range numbers {
				if err := each(number); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for number := range count {
		numbers <- number
	}
	close(numbers)
	group.Wait()
}

func create(t *testing.T, client kubernetes.Interface, from, to int) {
	t.Helper()
	parallel(t, to-from, func(number int) error {
		_, err := client.CoreV1().Pods("default").Create(t.Context(), pod(from+number), metav1.CreateOptions{})
		return err
	})
}

// change makes updates to the pods: most change a label, some an app, one in 20 deletes and creates.
func change(t *testing.T, client kubernetes.Interface, pods, updates int) {
	t.Helper()
	api := client.CoreV1().Pods("default")
	parallel(t, updates, func(number int) error {
		// Each pod belongs to one writer at a time only by chance; an update of a pod that another writer
		// has deleted for a moment is left out.
		it := pod((number * 7919) % pods)
		if number%20 == 0 {
			if err := api.Delete(t.Context(), it.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
				return ignoreMissing(err)
			}
			_, err := api.Create(t.Context(), it, metav1.CreateOptions{})
			return ignoreMissing(err)
		}
		patch := fmt.Sprintf(`{"metadata":{"labels":{"app":"app-%d","change":"%d"}}}`, rand.IntN(3), number)
		_, err := api.Patch(t.Context(), it.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return ignoreMissing(err)
	})
}

// calls records the calls of a handler, by key.
type calls struct {
	mu    sync.Mutex
	byKey map[string][]string
	count map[string]int
}

func newCalls() *calls { return &calls{byKey: map[string][]string{}, count: map[string]int{}} }

func (c *calls) add(kind string, object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		kind, object = "unknown-"+kind, unknown.Obj
	}
	meta, err := apimeta.Accessor(object)
	if err != nil {
		panic(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	key := meta.GetNamespace() + "/" + meta.GetName()
	c.byKey[key] = append(c.byKey[key], kind+" "+meta.GetResourceVersion()+" "+string(meta.GetUID()))
	kind, _, _ = strings.Cut(kind, "-from-")
	c.count[kind]++
}

// String has the number of keys, and of calls of each kind.
func (c *calls) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Sprintf("%d keys, %v", len(c.byKey), c.count)
}

func (c *calls) OnAdd(object any, isInitial bool) {
	if isInitial {
		c.add("initial-add", object)
		return
	}
	c.add("add", object)
}

func (c *calls) OnUpdate(old, object any) {
	meta, err := apimeta.Accessor(old)
	if err != nil {
		panic(err)
	}
	c.add("update-from-"+meta.GetResourceVersion(), object)
}

func (c *calls) OnDelete(object any) { c.add("delete", object) }

// differs tells how the calls differ; empty if they do not.
func (c *calls) differs(other *calls) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	other.mu.Lock()
	defer other.mu.Unlock()
	keys := maps.Clone(c.byKey)
	maps.Copy(keys, other.byKey)
	for key := range keys {
		if mine, theirs := strings.Join(c.byKey[key], ", "), strings.Join(other.byKey[key], ", "); mine != theirs {
			return fmt.Sprintf("%s: [%s] and [%s]", key, mine, theirs)
		}
	}
	return ""
}

// eventually waits until the difference is empty, and fails with it otherwise.
func eventually(t *testing.T, what string, difference func() string) {
	t.Helper()
	last := ""
	err := wait.PollUntilContextTimeout(t.Context(), pollEvery, waitAtMost, true, func(context.Context) (bool, error) {
		last = difference()
		return last == "", nil
	})
	if err != nil {
		t.Fatalf("%s: %s", what, last)
	}
}

// storesDiffer compares whole objects; empty if the stores have the same.
func storesDiffer(mine, theirs cache.Store, equal func(a, b any) bool) string {
	if a, b := len(mine.ListKeys()), len(theirs.ListKeys()); a != b {
		return fmt.Sprintf("%d objects and %d", a, b)
	}
	for _, object := range mine.List() {
		other, found, _ := theirs.Get(object)
		if !found || !equal(object, other) {
			return fmt.Sprintf("%+v and %+v", object, other)
		}
	}
	return ""
}

// ignoreMissing: two writers may have met at one pod.
func ignoreMissing(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
