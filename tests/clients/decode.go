package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// decodeTask is the argument of -decode: several lists and watches of ConfigMaps.
type decodeTask struct {
	CAFile string       `json:"ca_file"`
	Token  string       `json:"token"`
	Reads  []decodeRead `json:"reads"`
}

// decodeRead is one list or watch. Each report of it is a line of JSON.
type decodeRead struct {
	// Decoder is "net/http" or "client-go".
	Decoder string `json:"decoder"`
	Name    string `json:"read"`
	// URL is the whole request, for net/http.
	URL       string `json:"url"`
	Server    string `json:"server"`
	Namespace string `json:"namespace"`
	Version   string `json:"version"`
	IsList    bool   `json:"is_list"`
	// Seconds is the timeoutSeconds of a watch, if it is not 0.
	Seconds int64 `json:"seconds"`
}

// decode runs all reads at the same time, until each has ended.
func decode(ctx context.Context, argument string) error {
	var task decodeTask
	if err := json.Unmarshal([]byte(argument), &task); err != nil {
		return err
	}
	var ended sync.WaitGroup
	for _, read := range task.Reads {
		ended.Go(func() {
			err := fmt.Errorf("no decoder %q", read.Decoder)
			switch read.Decoder {
			case "net/http":
				err = read.overHTTP(ctx, task)
			case "client-go":
				err = read.overClientGo(ctx, task)
			}
			read.ended(err)
		})
	}
	ended.Wait()
	return nil
}

// overHTTP reads with net/http, which asks for gzip by itself and decompresses.
func (r decodeRead) overHTTP(ctx context.Context, task decodeTask) error {
	pem, err := os.ReadFile(task.CAFile)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+task.Token)
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	decoder := json.NewDecoder(response.Body)
	if r.IsList {
		var list corev1.ConfigMapList
		if err := decoder.Decode(&list); err != nil {
			return err
		}
		r.items(list.Items)
		_, err := io.ReadAll(response.Body)
		return err
	}
	for {
		var event struct {
			Type   string
			Object corev1.ConfigMap
		}
		err := decoder.Decode(&event)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		r.object(event.Type, &event.Object)
	}
}

// overClientGo reads with the typed client, which prefers protobuf.
func (r decodeRead) overClientGo(ctx context.Context, task decodeTask) error {
	config := &rest.Config{Host: r.Server, BearerToken: task.Token}
	config.CAFile = task.CAFile
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	configMaps := clients.CoreV1().ConfigMaps(r.Namespace)
	if r.IsList {
		list, err := configMaps.List(ctx, metav1.ListOptions{ResourceVersion: r.Version})
		if err != nil {
			return err
		}
		r.items(list.Items)
		return nil
	}
	options := metav1.ListOptions{ResourceVersion: r.Version}
	if r.Seconds > 0 {
		options.TimeoutSeconds = &r.Seconds
	}
	events, err := configMaps.Watch(ctx, options)
	if err != nil {
		return err
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		object, ok := event.Object.(*corev1.ConfigMap)
		if event.Type == watch.Error || !ok {
			return fmt.Errorf("%s %v", event.Type, event.Object)
		}
		r.object(string(event.Type), object)
	}
	return nil
}

func (r decodeRead) items(items []corev1.ConfigMap) {
	for i := range items {
		r.object("ITEM", &items[i])
	}
}

func (r decodeRead) object(kind string, object *corev1.ConfigMap) {
	digest := sha256.Sum256([]byte(object.Data["payload"]))
	r.report(map[string]any{
		"type": kind, "name": object.Name, "version": object.ResourceVersion, "digest": hex.EncodeToString(digest[:]),
	})
}

func (r decodeRead) ended(err error) {
	report := map[string]any{"end": "clean"}
	if err != nil {
		report = map[string]any{"end": "error", "error": err.Error()}
	}
	r.report(report)
}

// reports keeps the lines of concurrent reads apart.
var reports sync.Mutex

func (r decodeRead) report(report map[string]any) {
	reports.Lock()
	defer reports.Unlock()
	report["decoder"], report["read"] = r.Decoder, r.Name
	if err := printJSON(report); err != nil {
		os.Exit(1)
	}
}
