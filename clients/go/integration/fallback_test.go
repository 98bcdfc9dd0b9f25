package integration

import (
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/apiserver"
	"kubefan.dev/clients/go/internal/cluster"
)

// watchHistory has the events of a watch as words, and the sides of its client.
type watchHistory struct {
	mu     sync.Mutex
	events []string
	side   kubefan.Side
}

func (h *watchHistory) add(event string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event)
}

func (h *watchHistory) onSide(side kubefan.Side, _ string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.side = side
}

// until waits until the history has a number of events, and the client is on this side.
func (h *watchHistory) until(t *testing.T, what string, count int, side kubefan.Side) {
	t.Helper()
	begin, ticker := time.Now(), time.NewTicker(10*time.Millisecond)
	defer ticker.Stop()
	for range ticker.C {
		h.mu.Lock()
		isReached, got := len(h.events) >= count && h.side == side, len(h.events)
		h.mu.Unlock()
		if isReached {
			t.Logf("%s: after %.1f s", what, time.Since(begin).Seconds())
			return
		}
		if time.Since(begin) > 3*time.Minute {
			t.Fatalf("not in time: %s: %d of %d events", what, got, count)
		}
	}
}

func TestAWatchOverKubefansOutagesHasTheEventsOfAStraightWatch(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	fan := control.StartKubefan(t, "", "--resource", "configmaps")
	straight, err := apiserver.New(control.Config)
	if err != nil {
		t.Fatal(err)
	}
	seen := &watchHistory{}
	client := connect(t, fan.Address, kubefan.Options{
		Apiserver: straight, Budget: kubefan.Budget{Clients: 1, StartsPerSecond: 5}, OnSide: seen.onSide,
	})
	target := kubefan.Target{Resource: "configmaps", Namespace: "default"}
	list, err := client.List(t.Context(), target, kubefan.ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	maps := control.Client.CoreV1().ConfigMaps("default")
	from, err := maps.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	direct, err := maps.Watch(t.Context(), metav1.ListOptions{ResourceVersion: from.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Stop()
	watched := client.Watch(t.Context(), target, kubefan.WatchOptions{ResourceVersion: list.ResourceVersion, Cluster: list.Cluster})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for item, err := range watched.All() {
			if err != nil {
				return
			}
			if event := item.Event; item.Kind == kubefan.ItemEvent {
				seen.add(fmt.Sprint(event.GetType().String()[len("EVENT_TYPE_"):], " ", event.GetName(), " ", event.GetResourceVersion()))
			}
		}
	}()

	written := 0
	write := func(count int) {
		t.Helper()
		for range count {
			made := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("m-", written)}}
			if _, err := maps.Create(t.Context(), made, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if written%2 == 0 {
				if err := maps.Delete(t.Context(), made.Name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			written++
		}
	}
	total := func() int { return written + (written+1)/2 }
	write(20)
	seen.until(t, "events of kubefan", total(), kubefan.SideHealthy)
	fan.Kill()
	write(20)
	seen.until(t, "events of the apiserver after SIGKILL", total(), kubefan.SideAway)
	fan = control.StartKubefan(t, fan.Address, "--resource", "configmaps")
	write(20)
	seen.until(t, "events during the return", total(), kubefan.SideHealthy)
	// The watch leaves the apiserver within a minute: there are writes all the time.
	ticker := time.NewTicker(5 * time.Second)
	defer ticker.Stop()
	for range 13 {
		write(1)
		<-ticker.C
	}
	seen.until(t, "events after the return", total(), kubefan.SideHealthy)
	fan.Signal(syscall.SIGSTOP)
	write(20)
	seen.until(t, "events of the apiserver after SIGSTOP", total(), kubefan.SideAway)
	fan.Signal(syscall.SIGCONT)
	write(20)
	seen.until(t, "events during the second return", total(), kubefan.SideHealthy)

	var want []string
	for len(want) < total() {
		event := <-direct.ResultChan()
		if event.Type == watch.Bookmark {
			continue
		}
		object := event.Object.(*corev1.ConfigMap)
		want = append(want, fmt.Sprint(event.Type, " ", object.Name, " ", object.ResourceVersion))
	}
	watched.Close()
	<-ended
	if !slices.Equal(seen.events, want) {
		t.Errorf("%d events, not %d:\n%v\n%v", len(seen.events), len(want), seen.events, want)
	}
}
