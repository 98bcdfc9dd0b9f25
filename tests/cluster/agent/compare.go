package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// The resources that an agent may compare, with the type of their protobuf form.
var known = map[string]struct {
	group string
	typed runtime.Object
}{
	"configmaps":     {"", &corev1.ConfigMap{}},
	"endpointslices": {"discovery.k8s.io", &discoveryv1.EndpointSlice{}},
	"pods":           {"", &corev1.Pod{}},
	"services":       {"", &corev1.Service{}},
}

const (
	mediaJSON     = "json"
	mediaProtobuf = "protobuf"
)

// source is one way to the objects.
type source struct {
	config *rest.Config
	// Only pods of this node, if it is set.
	node string
}

// compared is a resource in one media type, read both ways.
type compared struct {
	resource, media string
	direct, through *record
}

func compare(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("compare", flag.ContinueOnError)
	kubefan := flags.String("kubefan", "https://kubefan.kubefan.svc", "`URL` of kubefan, or unix:PATH")
	caFile := flags.String("ca-file", "/etc/kubefan/ca.crt", "kubefan's CA")
	listen := flags.String("listen", ":8080", "address of the report")
	protobuf := flags.String("protobuf", "", "resources that are also read as protobuf, separated by commas")
	if err := flags.Parse(args); err != nil {
		return err
	}
	direct, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	through := rest.CopyConfig(direct)
	if path, isSocket := strings.CutPrefix(*kubefan, "unix:"); isSocket {
		// Callers of the socket are not distinguished, so they need no token.
		through = &rest.Config{Host: "http://localhost", Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}}
	} else {
		through.Host, through.CAFile = *kubefan, *caFile
	}
	for _, config := range []*rest.Config{direct, through} {
		config.QPS = -1
	}
	node := os.Getenv("NODE_NAME")
	if err := awaitServer(ctx, *kubefan); err != nil {
		return err
	}
	var all []*compared
	for _, resource := range flags.Args() {
		media := []string{mediaJSON}
		if strings.Contains(","+*protobuf+",", ","+resource+",") {
			media = append(media, mediaProtobuf)
		}
		for _, media := range media {
			pair := &compared{resource: resource, media: media, direct: &record{}, through: &record{}}
			if err := (source{direct, node}).follow(ctx, resource, media, pair.direct); err != nil {
				return err
			}
			counted := rest.CopyConfig(through)
			counted.Wrap(func(next http.RoundTripper) http.RoundTripper { return &origin{next, pair.through} })
			if err := (source{counted, node}).follow(ctx, resource, media, pair.through); err != nil {
				return err
			}
			all = append(all, pair)
		}
	}
	if len(all) == 0 {
		return errors.New("compare needs resources")
	}
	http.HandleFunc("/report", func(w http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(w).Encode(reportOf(all)); err != nil {
			fmt.Fprintln(os.Stderr, "agent: cannot answer:", err)
		}
	})
	http.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
		for _, pair := range all {
			if !pair.direct.isListed() || !pair.through.isListed() {
				http.Error(w, pair.resource+" is not listed: "+pair.through.lastFailure(), http.StatusServiceUnavailable)
				return
			}
		}
	})
	server := &http.Server{Addr: *listen, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// awaitServer returns when something accepts connections at the address of kubefan. A NetworkPolicy lets a
// pod out some time after its start. A reflector that is refused waits before it asks again, and for longer
// at its next failure, which would add to what a scenario measures.
func awaitServer(ctx context.Context, address string) error {
	network, host := "tcp", strings.TrimPrefix(address, "https://")+":443"
	if path, isSocket := strings.CutPrefix(address, "unix:"); isSocket {
		network, host = "unix", path
	}
	dialer := net.Dialer{Timeout: time.Second}
	for {
		connection, err := dialer.DialContext(ctx, network, host)
		if err == nil {
			return connection.Close()
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

func reportOf(all []*compared) []difference {
	var found []difference
	for _, pair := range all {
		pair.direct.lock.Lock()
		pair.through.lock.Lock()
		difference := compareRecords(pair.direct, pair.through)
		if fault := errors.Join(pair.direct.fault, pair.through.fault); fault != nil {
			difference.Differs = append(difference.Differs, fault.Error())
		}
		pair.through.lock.Unlock()
		pair.direct.lock.Unlock()
		difference.Resource, difference.Media = pair.resource, pair.media
		found = append(found, difference)
	}
	return found
}

// follow starts client-go's reflector for a resource. It ends with the context.
func (s source) follow(ctx context.Context, resource, media string, into *record) error {
	kind, exists := known[resource]
	if !exists {
		return fmt.Errorf("%q cannot be compared", resource)
	}
	into.state = map[string]uint64{}
	var selector string
	if resource == "pods" && s.node != "" {
		selector = "spec.nodeName=" + s.node
	}
	lists := &cache.ListWatch{}
	var expected any
	if media == mediaProtobuf {
		typed, err := s.typed(kind.group)
		if err != nil {
			return err
		}
		lists = cache.NewFilteredListWatchFromClient(typed, resource, metav1.NamespaceAll, func(o *metav1.ListOptions) { o.FieldSelector = selector })
		expected = kind.typed
	} else {
		untyped, err := dynamic.NewForConfig(s.config)
		if err != nil {
			return err
		}
		client := untyped.Resource(schema.GroupVersionResource{Group: kind.group, Version: "v1", Resource: resource})
		lists.ListWithContextFunc = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = selector
			return client.List(ctx, o)
		}
		lists.WatchFuncWithContext = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = selector
			return client.Watch(ctx, o)
		}
	}
	what := fmt.Sprintf("%s as %s from %s", resource, media, s.config.Host)
	reflector := cache.NewReflectorWithOptions(&notedRequests{lists, what, into}, expected, into, cache.ReflectorOptions{Name: what})
	go reflector.RunWithContext(ctx)
	return nil
}

func (s source) typed(group string) (rest.Interface, error) {
	config := rest.CopyConfig(s.config)
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf"
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	if group == "" {
		return clients.CoreV1().RESTClient(), nil
	}
	return clients.DiscoveryV1().RESTClient(), nil
}

// origin counts where kubefan has its answers from.
type origin struct {
	next http.RoundTripper
	into *record
}

func (o *origin) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := o.next.RoundTrip(request)
	if err != nil || response.StatusCode != http.StatusOK {
		return response, err
	}
	o.into.lock.Lock()
	defer o.into.lock.Unlock()
	if isOfCache(response.Header) {
		o.into.cached++
	} else {
		o.into.forwarded++
	}
	return response, nil
}

// isOfCache tells whether the cache of a kubefan has answered. With the parameter fwd kubefan has
// passed the request on (RFC 9211). Behind another kubefan, the mark is that one's.
func isOfCache(header http.Header) bool {
	for _, value := range header.Values("Cache-Status") {
		for member := range strings.SplitSeq(value, ",") {
			name, parameters, _ := strings.Cut(member, ";")
			if strings.TrimSpace(name) == "kubefan" {
				return !strings.Contains(parameters, "fwd")
			}
		}
	}
	return false
}

// notedRequests counts the requests that fail, and logs all of them: a log of the pod shows when each
// stream began again, and from which version.
type notedRequests struct {
	*cache.ListWatch
	what string
	into *record
}

func (n *notedRequests) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list, err := n.ListWatch.ListWithContext(ctx, o)
	n.note("list", o, err)
	return list, err
}

func (n *notedRequests) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	events, err := n.ListWatch.WatchWithContext(ctx, o)
	n.note("watch", o, err)
	return events, err
}

func (n *notedRequests) note(verb string, o metav1.ListOptions, err error) {
	now := time.Now().UTC().Format("15:04:05.000")
	if err == nil {
		fmt.Printf("%s %s: %s from %q\n", now, n.what, verb, o.ResourceVersion)
		return
	}
	n.into.fail(err)
	fmt.Printf("%s %s: %s from %q: %v\n", now, n.what, verb, o.ResourceVersion, err)
}
