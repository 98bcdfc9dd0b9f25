package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// limits are what a scenario allows beside that no event may be lost, repeated or reordered.
type limits struct {
	// Lateness of an event. Zero: any.
	late time.Duration
	// Lists after the first one. Negative: any.
	relists int
	// Fewest events of each resource and media type at each agent; of pods at all agents together, because
	// each has only those of its node.
	eachMin int
}

func collect(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("collect", flag.ContinueOnError)
	which := agents{}
	flags.StringVar(&which.namespace, "namespace", "agents", "namespace of the agents")
	flags.StringVar(&which.selector, "selector", "", "label selector of the agents")
	flags.StringVar(&which.exceptNode, "except-node", "", "node whose agents are not asked")
	flags.StringVar(&which.bootedNode, "booted-node", "", "node whose agents may have begun again")
	within := flags.Duration("within", 20*time.Second, "time until nothing is pending")
	minEvents := flags.Int("min-events", 1, "fewest compared events of all agents together")
	allowed := limits{}
	flags.DurationVar(&allowed.late, "late", 5*time.Second, "latest event that is allowed; 0: any")
	flags.IntVar(&allowed.relists, "relists", 0, "lists that are allowed after the first one of each stream; -1: any")
	flags.IntVar(&allowed.eachMin, "min-events-each", 3, "fewest compared events of each resource at each agent, or of pods at all agents together")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil).ClientConfig()
	if err != nil {
		return err
	}
	config.QPS = -1
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *within)
	defer cancel()
	// While objects change, some event is always on its way. So a problem counts if it is still there half
	// a second later.
	var text string
	var before, lasting []string
	events, polls := 0, 0
	var all map[string][]difference
	// Why the agents could not be asked the last time.
	var failure error
	for {
		found, err := which.reports(ctx, clients)
		if ctx.Err() == nil {
			failure = err
		}
		if err == nil {
			var problems []string
			text, problems, events = judge(found, allowed)
			lasting = slices.DeleteFunc(slices.Clone(problems), func(problem string) bool { return !slices.Contains(before, problem) })
			before = problems
			polls++
			all = found
			if polls > 1 && len(lasting) == 0 && events >= *minEvents {
				fmt.Print(text, summary(all, lasting))
				return nil
			}
		}
		select {
		case <-time.After(500 * time.Millisecond):
			continue
		case <-ctx.Done():
		}
		fmt.Print(text, summary(all, lasting))
		for _, problem := range lasting {
			fmt.Println("PROBLEM:", problem)
		}
		if failure != nil || polls < 2 {
			return fmt.Errorf("the agents cannot be judged: %w", cmp.Or(failure, ctx.Err()))
		}
		return fmt.Errorf("%d problems, %d events of at least %d", len(lasting), events, *minEvents)
	}
}

// agents says which pods are asked. There has to be one on each node, and it has to be as old as its
// pod: another one would know nothing of what came before.
type agents struct {
	namespace, selector    string
	exceptNode, bootedNode string
}

// reports returns the differences by pod.
func (a agents) reports(ctx context.Context, clients kubernetes.Interface) (map[string][]difference, error) {
	nodes, err := clients.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	pods, err := clients.CoreV1().Pods(a.namespace).List(ctx, metav1.ListOptions{LabelSelector: a.selector})
	if err != nil {
		return nil, err
	}
	all := map[string][]difference{}
	// The agents of each DaemonSet.
	counts := map[string]int{}
	for _, pod := range pods.Items {
		if pod.Spec.NodeName == a.exceptNode || pod.DeletionTimestamp != nil {
			continue
		}
		if pod.Status.Phase != corev1.PodRunning {
			return nil, fmt.Errorf("%s on %s is %s", pod.Name, pod.Spec.NodeName, pod.Status.Phase)
		}
		for _, container := range pod.Status.ContainerStatuses {
			if container.RestartCount > 0 && pod.Spec.NodeName != a.bootedNode {
				return nil, fmt.Errorf("%s on %s has begun again %d times", container.Name, pod.Spec.NodeName, container.RestartCount)
			}
		}
		// No port means the first one that the pod names.
		body, err := clients.CoreV1().Pods(a.namespace).ProxyGet("http", pod.Name, "", "report", nil).DoRaw(ctx)
		if err != nil {
			return nil, fmt.Errorf("%s does not report: %w", pod.Name, err)
		}
		var found []difference
		if err := json.Unmarshal(body, &found); err != nil {
			return nil, err
		}
		all[pod.Spec.NodeName+" "+pod.Name] = found
		counts[pod.Labels["app"]]++
	}
	if len(all) == 0 {
		return nil, errors.New("no agent is running")
	}
	expected := len(nodes.Items)
	if a.exceptNode != "" {
		expected--
	}
	for app, count := range counts {
		if count != expected {
			return nil, fmt.Errorf("%d of %d agents called %s are running", count, expected, app)
		}
	}
	return all, nil
}

// judge returns a line per stream, what is wrong, and how many events were compared.
func judge(all map[string][]difference, allowed limits) (text string, problems []string, events int) {
	var lines strings.Builder
	ofPods := map[string]int{}
	for _, pod := range sorted(all) {
		for _, found := range all[pod] {
			fmt.Fprintf(&lines, "%s %s %s: %d events, %d lost, %d repeated, %d reordered, %d unknown; %d lists more, %d replaced; later by %.3f s (median), %.3f s (most); %d answers of the cache, %d passed on, %d errors\n",
				pod, found.Resource, found.Media, found.Events, len(found.Lost), len(found.Repeated), len(found.Reordered), len(found.Unknown),
				found.Relists, found.Replaced, found.LateMedian.Seconds(), found.LateMost.Seconds(), found.Cached, found.Forwarded, found.Errors)
			events += found.Events
			if found.Resource == "pods" {
				ofPods[found.Media] += found.Events
			} else if found.Events < allowed.eachMin {
				// Without the number, because a problem counts only if it stays the same.
				problems = append(problems, fmt.Sprintf("%s %s %s: fewer than %d events", pod, found.Resource, found.Media, allowed.eachMin))
			}
			for _, problem := range found.problems(allowed) {
				problems = append(problems, pod+" "+found.Resource+" "+found.Media+": "+problem)
			}
		}
	}
	for _, media := range sorted(ofPods) {
		if ofPods[media] < allowed.eachMin {
			problems = append(problems, fmt.Sprintf("pods %s: fewer than %d events at all agents together", media, allowed.eachMin))
		}
	}
	return lines.String(), problems, events
}

// summary returns a line about all streams, which `run` puts into its table. Events that were on their way
// are not counted as lost.
func summary(all map[string][]difference, lasting []string) string {
	var lost, wrong, streams, events, relists int
	var late time.Duration
	for _, problem := range lasting {
		switch {
		case strings.Contains(problem, ": lost: "):
			lost++
		case strings.Contains(problem, ": repeated: "), strings.Contains(problem, ": reordered: "), strings.Contains(problem, ": unknown: "), strings.Contains(problem, ": differs: "):
			wrong++
		}
	}
	for _, found := range all {
		for _, stream := range found {
			streams++
			events += stream.Events
			relists = max(relists, stream.Relists)
			late = max(late, stream.LateMost)
		}
	}
	return fmt.Sprintf("in all: %d streams, %d events, %d lost, %d wrong, latest by %.2f s, most lists more %d\n", streams, events, lost, wrong, late.Seconds(), relists)
}

// problems returns what is wrong with a stream, each event and object by itself.
func (d difference) problems(allowed limits) []string {
	var found []string
	for what, named := range map[string][]string{"lost": d.Lost, "repeated": d.Repeated, "reordered": d.Reordered, "unknown": d.Unknown, "differs": d.Differs} {
		for _, name := range named {
			found = append(found, what+": "+name)
		}
	}
	if d.Cached == 0 {
		found = append(found, fmt.Sprintf("no answer is of a cache, and %d were passed on", d.Forwarded))
	}
	if allowed.late > 0 && d.LateMost > allowed.late {
		found = append(found, fmt.Sprintf("%s came %.3f s late", d.Latest, d.LateMost.Seconds()))
	}
	if allowed.relists >= 0 && d.Relists > allowed.relists {
		found = append(found, fmt.Sprintf("%d lists after the first one; last error: %s", d.Relists, d.LastError))
	}
	slices.Sort(found)
	return found
}
