package integration

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"kubefan.dev/clients/go/internal/cluster"
	"kubefan.dev/clients/go/transport"
)

// replicas is the number of kubefans that a herd loses at once.
const replicas = 3

// startsPerSecond is the budget of all agents together. Each replica tells its own agents a third.
const startsPerSecond = 51

// TestAHerdOfAgentsStaysWithinTheBudget runs as many agents as KUBEFAN_HERD says, each with an
// informer of the pods of one node. Then all replicas of kubefan end at once, and come back later.
// A tenth of the agents start in the outage, without a state. Each agent is a client of its own: it
// knows nothing of the others.
func TestAHerdOfAgentsStaysWithinTheBudget(t *testing.T) {
	count, err := strconv.Atoi(os.Getenv("KUBEFAN_HERD"))
	if err != nil {
		t.Skip("KUBEFAN_HERD is not set to the number of agents")
	}
	control := cluster.Start(t)
	fans := []*cluster.Kubefan{}
	args := []string{"--resource", "pods=protobuf", "--tls-cert-file", control.CertFile, "--tls-private-key-file", control.KeyFile,
		"--config", fanConfig(t)}
	for range replicas {
		fans = append(fans, control.StartKubefan(t, "", args...))
	}
	parallel(t, count, func(number int) error {
		made := pod(number)
		made.Spec.NodeName = fmt.Sprint("node-", number)
		_, err := control.Client.CoreV1().Pods("default").Create(t.Context(), made, metav1.CreateOptions{})
		return err
	})
	h := &herd{T: t, control: control, fans: fans}
	late := count / 10
	h.start(0, count-late)
	h.allAre("watch at kubefan", func(a *agent) bool { return a.isWatching(false, time.Time{}) })

	// The first agents were told that there are few. Each knows all when its watch was renewed.
	connected := time.Now()
	h.allAre("have renewed their watch", func(a *agent) bool { return a.isWatching(false, connected) })
	h.reports("the connection", time.Time{})
	struck := time.Now()
	h.cpuSince()
	for _, fan := range fans {
		fan.Kill()
	}
	h.start(count-late, count)
	h.allAre("have a state", func(a *agent) bool { return a.informer.HasSynced() })
	t.Logf("agents without a state have one after %v", time.Since(struck).Round(time.Millisecond))
	h.allAre("watch at the apiserver", func(a *agent) bool { return a.isWatching(true, struck) })
	h.reports("the outage", struck)

	back := time.Now()
	h.cpuSince()
	for _, fan := range fans {
		control.StartKubefan(t, fan.Address, args...)
	}
	h.allAre("watch at kubefan again", func(a *agent) bool { return a.isWatching(false, back) })
	h.reports("the return", back)
}

func fanConfig(t *testing.T) string {
	t.Helper()
	path := t.TempDir() + "/kubefan.yaml"
	text := fmt.Sprintf("apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nlimits:\n  fallbackStartsPerSecond: %d\n", startsPerSecond/replicas)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// herd is a fleet of agents.
type herd struct {
	*testing.T
	control *cluster.Cluster
	fans    []*cluster.Kubefan
	agents  []*agent
	cpu     time.Duration
}

// agent watches the pods of one node. It has a transport of its own.
type agent struct {
	informer cache.SharedIndexInformer
	mu       sync.Mutex
	// direct and fanned are the times of reads that the apiserver, and kubefan, have answered.
	direct, fanned []read
}

type read struct {
	at      time.Time
	isWatch bool
}

// start starts the agents with these numbers.
func (h *herd) start(from, to int) {
	h.Helper()
	for number := from; number < to; number++ {
		made := &agent{}
		config := rest.CopyConfig(h.control.Config)
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return recordedBy{next: next, agent: made, apiserver: config.Host}
		})
		address := "https://" + h.fans[number%replicas].Address
		options := transport.Options{
			Address: address, CAFile: h.control.CAFile,
			Budget: transport.Budget{Clients: 2000, StartsPerSecond: startsPerSecond},
		}
		if err := transport.Attach(config, options); err != nil {
			h.Fatal(err)
		}
		config.ContentType = "application/vnd.kubernetes.protobuf"
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			h.Fatal(err)
		}
		ofNode := fields.OneTermEqualSelector("spec.nodeName", fmt.Sprint("node-", number)).String()
		// client-go's own watches last for 5 to 10 minutes.
		lasts := int64(60 + number%60)
		source := cache.NewFilteredListWatchFromClient(client.CoreV1().RESTClient(), "pods", "", func(options *metav1.ListOptions) {
			options.FieldSelector = ofNode
			if options.TimeoutSeconds != nil {
				options.TimeoutSeconds = &lasts
			}
		})
		made.informer = cache.NewSharedIndexInformer(source, &corev1.Pod{}, 0, nil)
		h.agents = append(h.agents, made)
		go made.informer.RunWithContext(h.Context())
	}
}

type recordedBy struct {
	next      http.RoundTripper
	agent     *agent
	apiserver string
}

func (r recordedBy) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.next.RoundTrip(request)
	if err != nil || response.StatusCode != http.StatusOK {
		return response, err
	}
	made := read{at: time.Now(), isWatch: request.URL.Query().Has("watch")}
	r.agent.mu.Lock()
	defer r.agent.mu.Unlock()
	if "https://"+request.URL.Host == r.apiserver {
		r.agent.direct = append(r.agent.direct, made)
	} else {
		r.agent.fanned = append(r.agent.fanned, made)
	}
	return response, err
}

// isWatching tells whether a watch was opened since then.
func (a *agent) isWatching(isDirect bool, from time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	reads := a.fanned
	if isDirect {
		reads = a.direct
	}
	return slices.ContainsFunc(reads, func(each read) bool { return each.isWatch && each.at.After(from) })
}

func (h *herd) allAre(what string, is func(*agent) bool) {
	h.Helper()
	start := time.Now()
	eventuallyWithin(h.T, 10*time.Minute, "all agents "+what, func() string {
		missing := 0
		for _, each := range h.agents {
			if !is(each) {
				missing++
			}
		}
		if missing > 0 {
			return fmt.Sprint(missing, " do not")
		}
		return ""
	})
	h.Logf("all %d agents %s after %v", len(h.agents), what, time.Since(start).Round(time.Millisecond))
}

// cpuSince returns the CPU time of the apiserver since the last call.
func (h *herd) cpuSince() time.Duration {
	h.Helper()
	text, err := h.control.Client.RESTClient().Get().AbsPath("/metrics").DoRaw(h.Context())
	if err != nil {
		h.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, "process_cpu_seconds_total "); found {
			seconds, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				h.Fatal(err)
			}
			before := h.cpu
			h.cpu = time.Duration(seconds * float64(time.Second))
			return h.cpu - before
		}
	}
	h.Fatal("the apiserver does not tell its CPU time")
	return 0
}

// eventuallyWithin waits so long until the difference is empty.
func eventuallyWithin(t *testing.T, most time.Duration, what string, difference func() string) {
	t.Helper()
	last := ""
	err := wait.PollUntilContextTimeout(t.Context(), pollEvery, most, true, func(context.Context) (bool, error) {
		last = difference()
		return last == "", nil
	})
	if err != nil {
		t.Fatalf("%s: %s", what, last)
	}
}

// reports logs and checks the reads at the apiserver since then.
func (h *herd) reports(when string, from time.Time) {
	h.Helper()
	times := []time.Duration{}
	lists := 0
	for _, each := range h.agents {
		each.mu.Lock()
		for _, read := range each.direct {
			if read.at.After(from) {
				times = append(times, read.at.Sub(from))
				if !read.isWatch {
					lists++
				}
			}
		}
		each.mu.Unlock()
	}
	slices.Sort(times)
	most := func(window time.Duration) (most int) {
		for first, last := 0, 0; last < len(times); last++ {
			for times[last]-times[first] > window {
				first++
			}
			most = max(most, last-first+1)
		}
		return most
	}
	perSecond := []string{}
	for second, at := 0, 0; at < len(times); second += 10 {
		count := 0
		for ; at < len(times) && times[at] < time.Duration(second+10)*time.Second; at++ {
			count++
		}
		perSecond = append(perSecond, fmt.Sprint(count/10))
	}
	h.Logf("%s: %d reads at the apiserver, %d of them lists; most in 1 s %d, in 10 s %d, mean per second of each 10 s: %s; %v of CPU",
		when, len(times), lists, most(time.Second), most(10*time.Second), strings.Join(perSecond, " "), h.cpuSince().Round(time.Millisecond))
}
