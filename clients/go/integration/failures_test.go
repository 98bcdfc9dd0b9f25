package integration

import (
	"context"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	kubefan "kubefan.dev/clients/go"
	kubefaninformers "kubefan.dev/clients/go/informers"
	"kubefan.dev/clients/go/internal/cluster"
)

func TestATokenOverTLSReadsAndAnotherUserIsForbidden(t *testing.T) {
	leaks(t)
	control := cluster.Start(t)
	create(t, control.Client, 0, 2)
	fan := control.StartKubefan(t, "", "--resource", "pods", "--tls-cert-file", control.CertFile, "--tls-private-key-file", control.KeyFile)
	address := "https://" + fan.Address
	admin := connect(t, address, kubefan.Options{CAFile: control.CAFile, TokenFile: control.TokenFile})
	list, err := admin.List(t.Context(), kubefan.Target{Resource: "pods"}, kubefan.ReadOptions{})
	if err != nil || len(list.Objects) != 2 {
		t.Fatal(list, err)
	}
	one, err := admin.Get(t.Context(), kubefan.Target{Resource: "pods", Namespace: "default", Name: "pod-1"}, kubefan.ReadOptions{})
	if err != nil || one.GetObject().GetName() != "pod-1" {
		t.Fatal(one, err)
	}
	nobody := connect(t, address, kubefan.Options{CAFile: control.CAFile, Token: cluster.NobodyToken})
	source := kubefaninformers.NewListWatch(nobody, "pods", "", &corev1.Pod{})
	if _, err := source.List(metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	if _, err := source.Watch(metav1.ListOptions{ResourceVersion: list.ResourceVersion}); !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	if _, err := kubefan.Connect(t.Context(), address, kubefan.Options{Token: "x"}); err == nil {
		t.Fatal("the certificate is of no CA of the system")
	}
	unknown := connect(t, address, kubefan.Options{CAFile: control.CAFile, Token: "unknown"})
	if _, err := kubefaninformers.NewListWatch(unknown, "pods", "", &corev1.Pod{}).List(metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Fatal(err)
	}
}

func TestAnExpiredVersionIsExpiredForClientGoToo(t *testing.T) {
	leaks(t)
	control := cluster.Start(t)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	source := kubefaninformers.NewListWatch(connect(t, fan.Address, kubefan.Options{}), "pods", "", &corev1.Pod{})
	if _, err := source.Watch(metav1.ListOptions{ResourceVersion: "99999999"}); !apierrors.IsResourceExpired(err) {
		t.Fatal(err)
	}
	if _, err := source.List(metav1.ListOptions{ResourceVersion: "99999999"}); !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		t.Fatal(err)
	}
	if _, err := source.Watch(metav1.ListOptions{LabelSelector: "a in"}); !apierrors.IsBadRequest(err) {
		t.Fatal(err)
	}
	missing := kubefaninformers.NewListWatch(connect(t, fan.Address, kubefan.Options{}), "secrets", "", &corev1.Secret{})
	if _, err := missing.List(metav1.ListOptions{}); !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}

// Kills kubefan and the apiserver at random, for KUBEFAN_SOAK_SECONDS, while pods change.
func TestStoresAreEqualAfterKubefanAndTheApiserverWereKilledAtRandom(t *testing.T) {
	seconds, _ := strconv.Atoi(os.Getenv("KUBEFAN_SOAK_SECONDS"))
	if seconds == 0 {
		seconds = 5
	}
	leaks(t)
	control := cluster.Start(t)
	const pods = 200
	create(t, control.Client, 0, pods)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	address := fan.Address
	client := connect(t, address, kubefan.Options{})
	var broken atomic.Int64
	var over []cache.SharedIndexInformer
	for _, encoding := range []kubefan.Encoding{kubefan.EncodingJSON, kubefan.EncodingZstdDelta} {
		source := kubefaninformers.NewListWatch(client, "pods", "", &corev1.Pod{})
		source.OnError = func(error) { broken.Add(1) }
		source.WatchOptions.Encoding = encoding
		source.WatchOptions.BookmarkInterval = time.Second
		made, _ := informer(t, source)
		over = append(over, made)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(seconds)*time.Second)
	defer cancel()
	writing := make(chan int)
	go func() {
		defer close(writing)
		limited := rest.CopyConfig(control.Config)
		limited.Timeout = time.Second
		writer, err := kubernetes.NewForConfig(limited)
		if err != nil {
			return
		}
		count := 0
		for ticker := time.NewTicker(5 * time.Millisecond); ctx.Err() == nil; {
			it := pod(rand.IntN(pods))
			switch it.Annotations["round"] = strconv.Itoa(count); rand.IntN(4) {
			case 0:
				_ = writer.CoreV1().Pods("default").Delete(ctx, it.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
			case 1:
				_, _ = writer.CoreV1().Pods("default").Create(ctx, it, metav1.CreateOptions{})
			default:
				it.Labels["round"] = strconv.Itoa(count)
				_, _ = writer.CoreV1().Pods("default").Update(ctx, it, metav1.UpdateOptions{})
			}
			count++
			select {
			case <-ticker.C:
			case <-ctx.Done():
				ticker.Stop()
			}
		}
		writing <- count
	}()
	kills, heap := 0, []uint64{}
	for ctx.Err() == nil {
		select {
		case <-time.After(time.Duration(500+rand.IntN(2500)) * time.Millisecond):
		case <-ctx.Done():
			continue
		}
		kills++
		if rand.IntN(3) == 0 {
			control.KillAPIServer()
			control.StartAPIServer(t)
		} else {
			fan.Kill()
			fan = control.StartKubefan(t, address, "--resource", "pods")
		}
		runtime.GC()
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		heap = append(heap, memory.HeapAlloc>>10)
	}
	written := <-writing
	last, err := control.Client.CoreV1().Pods("default").Create(t.Context(), pod(pods), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	straight, _ := informer(t, cache.NewListWatchFromClient(control.Client.CoreV1().RESTClient(), "pods", "", fields.Everything()))
	for i, it := range over {
		limited, stop := context.WithTimeout(t.Context(), waitAtMost)
		if err := kubefaninformers.WaitUntil(limited, it.GetStore(), last.ResourceVersion); err != nil {
			t.Fatal(err)
		}
		stop()
		equal := func(a, b any) bool {
			a, b = a.(*corev1.Pod).DeepCopy(), b.(*corev1.Pod).DeepCopy()
			a.(*corev1.Pod).ManagedFields, b.(*corev1.Pod).ManagedFields = nil, nil
			return equality.Semantic.DeepEqual(a, b)
		}
		if difference := storesDiffer(straight.GetStore(), it.GetStore(), equal); difference != "" {
			t.Errorf("store %d: %s", i, difference)
		}
	}
	t.Logf("%d s: %d writes, %d kills, %d broken connections; stores equal; heap after each kill, KiB: %v", seconds, written, kills, broken.Load(), heap)
}
