// The Go runner of the script in clients/conformance: it reads commands as lines of JSON, and
// writes the client's reports as lines of JSON. clients/conformance/README.md describes the lines.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	kubefan "kubefan.dev/clients/go"
	"kubefan.dev/clients/go/apiserver"
	"kubefan.dev/clients/go/informers"
)

const syncAtMost = 60 * time.Second

// line is an object of JSON.
type line map[string]any

// command has the fields of all commands.
type command struct {
	ID                  int      `json:"id"`
	Op                  string   `json:"op"`
	As                  string   `json:"as"`
	Of                  string   `json:"of"`
	Client              string   `json:"client"`
	Address             string   `json:"address"`
	Lazy                bool     `json:"lazy"`
	CAFile              string   `json:"ca_file"`
	ServerName          string   `json:"server_name"`
	Token               string   `json:"token"`
	TokenFile           string   `json:"token_file"`
	ConnectTimeoutMs    int      `json:"connect_timeout_ms"`
	KeepaliveIntervalMs int      `json:"keepalive_interval_ms"`
	KeepaliveTimeoutMs  int      `json:"keepalive_timeout_ms"`
	Resource            string   `json:"resource"`
	Namespace           string   `json:"namespace"`
	Name                string   `json:"name"`
	LabelSelector       string   `json:"label_selector"`
	FieldSelector       string   `json:"field_selector"`
	ResourceVersion     string   `json:"resource_version"`
	Cluster             string   `json:"cluster"`
	TimeoutMs           int      `json:"timeout_ms"`
	BookmarkIntervalMs  int      `json:"bookmark_interval_ms"`
	Fields              []string `json:"fields"`
	MetadataOnly        bool     `json:"metadata_only"`
	DropManagedFields   bool     `json:"drop_managed_fields"`
	OnlyChanges         bool     `json:"only_changes"`
	Encoding            string   `json:"encoding"`
	OnExpired           string   `json:"on_expired"`
	OnLag               string   `json:"on_lag"`
	Quiet               bool     `json:"quiet"`
	Fallback            string   `json:"fallback"`
	Apiserver           string   `json:"apiserver"`
	ApiserverCAFile     string   `json:"apiserver_ca_file"`
	ApiserverToken      string   `json:"apiserver_token"`
	BudgetClients       int      `json:"budget_clients"`
	BudgetRate          float64  `json:"budget_rate"`
}

// running is the thing that a name stands for, and the function that ends it.
type running struct {
	informer     cache.SharedIndexInformer
	registration cache.ResourceEventHandlerRegistration
	stop         func()
}

type runner struct {
	clients map[string]*kubefan.Client
	running map[string]*running
}

var out sync.Mutex

// counts has the reports of quiet sources: the number of each item. out guards it.
var counts = map[string]map[string]int{}

func say(value line) {
	out.Lock()
	defer out.Unlock()
	if err := json.NewEncoder(os.Stdout).Encode(value); err != nil {
		log.Fatal(err)
	}
}

func report(from string, item line) {
	out.Lock()
	quiet, found := counts[from]
	if found {
		quiet[item["item"].(string)]++
	}
	out.Unlock()
	if !found {
		item["from"] = from
		say(item)
	}
}

func main() {
	say(line{"language": "go", "lacks": []string{"changes"}})
	r := &runner{clients: map[string]*kubefan.Client{}, running: map[string]*running{}}
	for decoder := json.NewDecoder(bufio.NewReader(os.Stdin)); ; {
		var c command
		if err := decoder.Decode(&c); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		done, err := r.run(c)
		switch {
		case err != nil:
			say(line{"id": c.ID, "error": shown(err)})
		case done == nil:
			say(line{"id": c.ID, "ok": line{}})
		default:
			say(line{"id": c.ID, "ok": done})
		}
	}
}

func shown(err error) line {
	var failure *kubefan.Error
	if errors.As(err, &failure) {
		return line{
			"code": failure.Code.String(), "reason": failure.Reason, "field": failure.Field,
			"expired": failure.IsExpired(), "retryable": failure.IsRetryable(), "message": failure.Error(),
		}
	}
	// Errors of an informer's lists and watches are those of the Kubernetes API.
	codes := map[string]func(error) bool{
		"PermissionDenied": apierrors.IsForbidden, "Unauthenticated": apierrors.IsUnauthorized,
		"NotFound": apierrors.IsNotFound, "Unavailable": apierrors.IsServiceUnavailable,
	}
	for code, is := range codes {
		if is(err) {
			return line{"code": code, "message": err.Error()}
		}
	}
	return line{"code": "Unknown", "message": err.Error()}
}

func (r *runner) run(c command) (line, error) {
	ctx, cancel := context.WithTimeout(context.Background(), syncAtMost)
	defer cancel()
	if c.Quiet {
		out.Lock()
		counts[c.As] = map[string]int{}
		out.Unlock()
	}
	switch c.Op {
	case "connect":
		connect := kubefan.ConnectLazy
		if !c.Lazy {
			connect = func(address string, options kubefan.Options) (*kubefan.Client, error) {
				return kubefan.Connect(ctx, address, options)
			}
		}
		options := kubefan.Options{
			CAFile: c.CAFile, ServerName: c.ServerName, Token: c.Token, TokenFile: c.TokenFile,
			ConnectTimeout:    millis(c.ConnectTimeoutMs),
			KeepaliveInterval: millis(c.KeepaliveIntervalMs), KeepaliveTimeout: millis(c.KeepaliveTimeoutMs),
			Budget: kubefan.Budget{Clients: c.BudgetClients, StartsPerSecond: c.BudgetRate},
		}
		if c.Apiserver != "" {
			straight, err := apiserver.New(&rest.Config{
				Host: c.Apiserver, BearerToken: c.ApiserverToken,
				TLSClientConfig: rest.TLSClientConfig{CAFile: c.ApiserverCAFile},
			})
			if err != nil {
				return nil, err
			}
			options.Apiserver = straight
		}
		client, err := connect(c.Address, options)
		if err != nil {
			return nil, err
		}
		r.clients[c.As] = client
	case "list":
		list, err := r.clients[c.Client].List(ctx, target(c), readOptions(c))
		if err != nil {
			return nil, err
		}
		objects := []line{}
		for _, it := range list.Objects {
			objects = append(objects, object(it.GetNamespace(), it.GetName(), it.GetObject()))
		}
		return line{"version": list.ResourceVersion, "cluster": list.Cluster, "objects": objects}, nil
	case "get":
		got, err := r.clients[c.Client].Get(ctx, target(c), readOptions(c))
		if err != nil {
			return nil, err
		}
		it := got.GetObject()
		return line{"objects": []line{object(it.GetNamespace(), it.GetName(), it.GetObject())}}, nil
	case "list_resources":
		caches, err := r.clients[c.Client].ListResources(ctx)
		names := []string{}
		for _, it := range caches {
			names = append(names, it.GetResource().GetResource())
		}
		return line{"resources": names}, err
	case "watch":
		watch := r.clients[c.Client].Watch(context.Background(), target(c), watchOptions(c))
		ended := make(chan struct{})
		ctx, stop := context.WithCancel(context.Background())
		go func() {
			defer close(ended)
			follow(ctx, c.As, watch)
		}()
		r.running[c.As] = &running{stop: func() {
			stop()
			watch.Close()
			<-ended
		}}
	case "informer":
		made, err := r.informer(c)
		if err != nil {
			return nil, err
		}
		r.running[c.As] = made
	case "handler":
		informer := r.running[c.Of].informer
		registration, err := informer.AddEventHandler(handler(c.As))
		if err != nil {
			return nil, err
		}
		r.running[c.As] = &running{informer: informer, registration: registration, stop: func() {}}
	case "wait_for_sync":
		cache.WaitForCacheSync(ctx.Done(), r.running[c.As].registration.HasSynced)
	case "wait_until":
		store := r.running[c.As].informer.GetStore()
		return line{"reached": informers.WaitUntil(ctx, store, c.ResourceVersion) == nil}, nil
	case "store":
		objects := line{}
		for _, it := range r.running[c.As].informer.GetStore().List() {
			meta := it.(metav1.Object)
			objects[key(it)] = []string{meta.GetResourceVersion(), string(meta.GetUID())}
		}
		return line{"objects": objects}, nil
	case "counts":
		out.Lock()
		defer out.Unlock()
		return line{"counts": maps.Clone(counts[c.As])}, nil
	case "close":
		r.close(c.As)
	case "reset":
		for name := range r.running {
			r.close(name)
		}
		for name := range r.clients {
			r.close(name)
		}
		out.Lock()
		clear(counts)
		out.Unlock()
	default:
		return nil, fmt.Errorf("%s is no command", c.Op)
	}
	return nil, nil
}

func (r *runner) close(name string) {
	if it, found := r.running[name]; found {
		it.stop()
		delete(r.running, name)
	}
	if client, found := r.clients[name]; found {
		_ = client.Close()
		delete(r.clients, name)
	}
}

func (r *runner) informer(c command) (*running, error) {
	examples := map[string]runtime.Object{"configmaps": &corev1.ConfigMap{}, "pods": &corev1.Pod{}}
	example := examples[c.Resource]
	source := informers.NewListWatch(r.clients[c.Client], c.Resource, c.Namespace, example)
	source.Target, source.WatchOptions = target(c), watchOptions(c)
	source.OnError = func(err error) { report(c.As, line{"item": "error", "error": shown(err)}) }
	informer := cache.NewSharedIndexInformer(source, example, 0, cache.Indexers{})
	err := informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) { source.OnError(err) })
	if err != nil {
		return nil, err
	}
	registration, err := informer.AddEventHandler(handler(c.As))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		informer.RunWithContext(ctx)
	}()
	return &running{informer: informer, registration: registration, stop: func() {
		cancel()
		<-ended
		report(c.As, line{"item": "end"})
	}}, nil
}

func handler(from string) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(it any, initial bool) {
			report(from, line{"item": "add", "key": key(it), "initial": initial, "version": version(it)})
		},
		UpdateFunc: func(old, it any) {
			report(from, line{"item": "update", "key": key(it), "version": version(it), "old": version(old)})
		},
		DeleteFunc: func(it any) {
			_, unknown := it.(cache.DeletedFinalStateUnknown)
			report(from, line{"item": "delete", "key": key(it), "unknown": unknown})
		},
	}
}

func key(it any) string {
	text, err := cache.DeletionHandlingMetaNamespaceKeyFunc(it)
	if err != nil {
		log.Fatal(err)
	}
	return text
}

func version(it any) string {
	return it.(interface{ GetResourceVersion() string }).GetResourceVersion()
}

func follow(ctx context.Context, from string, watch *kubefan.WatchStream) {
	for item, err := range watch.All() {
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			report(from, line{"item": "failed", "error": shown(err)})
			break
		}
		made := shownItem(item)
		made["resume"], made["cluster"] = item.ResumeVersion, item.Cluster
		report(from, made)
	}
	report(from, line{"item": "end"})
}

func shownItem(item kubefan.WatchItem) line {
	switch item.Kind {
	case kubefan.ItemEvent:
		event := item.Event
		made := object(event.GetNamespace(), event.GetName(), event.GetObject())
		made["item"], made["uid"], made["version"] = "event", event.GetUid(), event.GetResourceVersion()
		made["type"] = strings.TrimPrefix(event.GetType().String(), "EVENT_TYPE_")
		made["delete_reason"] = strings.TrimPrefix(event.GetDeleteReason().String(), "DELETE_REASON_")
		return made
	case kubefan.ItemSnapshotBegin:
		return line{"item": "snapshot_begin", "restarted_from": item.RestartedFrom}
	case kubefan.ItemSnapshotEnd:
		return line{"item": "snapshot_end", "count": item.ObjectCount}
	case kubefan.ItemGapBegin:
		return line{"item": "gap_begin", "reason": item.Reason}
	case kubefan.ItemDisconnected:
		return line{"item": "disconnected", "error": shown(item.Err)}
	case kubefan.ItemRestarted:
		return line{"item": "restarted", "error": shown(item.Err)}
	}
	marks := map[kubefan.ItemKind]string{
		kubefan.ItemGapEnd: "gap_end", kubefan.ItemCatchUpBegin: "catch_up_begin", kubefan.ItemCatchUpEnd: "catch_up_end",
		kubefan.ItemBookmark: "bookmark", kubefan.ItemReconnected: "reconnected",
	}
	return line{"item": marks[item.Kind]}
}

func object(namespace, name string, text []byte) line {
	return line{"key": strings.TrimPrefix(namespace+"/"+name, "/"), "object": string(text)}
}

func millis(count int) time.Duration { return time.Duration(count) * time.Millisecond }

func target(c command) kubefan.Target {
	return kubefan.Target{
		Resource: c.Resource, Namespace: c.Namespace, Name: c.Name,
		LabelSelector: c.LabelSelector, FieldSelector: c.FieldSelector,
	}
}

func projection(c command) kubefan.Projection {
	return kubefan.Projection{Fields: c.Fields, MetadataOnly: c.MetadataOnly, DropManagedFields: c.DropManagedFields}
}

func readOptions(c command) kubefan.ReadOptions {
	return kubefan.ReadOptions{ResourceVersion: c.ResourceVersion, Projection: projection(c)}
}

func watchOptions(c command) kubefan.WatchOptions {
	options := kubefan.WatchOptions{
		ResourceVersion: c.ResourceVersion, Cluster: c.Cluster, Timeout: millis(c.TimeoutMs),
		BookmarkInterval: millis(c.BookmarkIntervalMs), Projection: projection(c), OnlyChanges: c.OnlyChanges,
		Backoff: kubefan.BackoffOptions{Initial: millis(50), Max: millis(500)},
	}
	switch c.Encoding {
	case "zstd":
		options.Encoding = kubefan.EncodingZstd
	case "zstd-delta":
		options.Encoding = kubefan.EncodingZstdDelta
	}
	if c.OnExpired == "fail" {
		options.OnExpired = kubefan.OnExpiredFail
	}
	if c.Fallback == "never" {
		options.Fallback = kubefan.FallbackNever
	}
	if c.OnLag == "expire" {
		options.OnLag = kubefan.OnLagExpire
	}
	return options
}
