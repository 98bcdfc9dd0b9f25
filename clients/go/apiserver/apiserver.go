// Package apiserver reads from a kube-apiserver while kubefan is away, for
// kubefan.Options.Apiserver. docs/clients-fallback.md says when that happens, and what a program
// sees.
package apiserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const (
	// readMax bounds a list or a get. kube-apiserver's own limit is a minute.
	readMax = 2 * time.Minute
	// watchMin is the shortest timeout of a watch, and the longest is twice that, as in client-go.
	watchMin = 5 * time.Minute
	// watchGrace is the time that the apiserver gets to end a watch after its timeout.
	watchGrace = 30 * time.Second
	// bodyMax is the longest answer that is no watch, in bytes.
	bodyMax = 512 << 20
)

const (
	acceptJSON         = "application/json"
	acceptMetadata     = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
	acceptMetadataList = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
)

// server is an apiserver.
type server struct {
	client *http.Client
	// base is the URL without a slash at its end.
	base string

	mu sync.Mutex
	// places has the resources that discovery has found, by their names.
	places map[string]place
}

// errPlain is the error of a configuration that would show its credentials to the network.
var errPlain = errors.New("the address of the apiserver is http://, which must not get credentials")

// New returns the apiserver of a configuration, such as that of rest.InClusterConfig. It has the
// credentials, the TLS options and the wrappers of the configuration. Credentials need https://. No
// request is sent yet.
func New(config *rest.Config) (kubefan.Apiserver, error) {
	own := rest.CopyConfig(config)
	// A limit for whole requests would end watches.
	own.Timeout = 0
	base, _, err := rest.DefaultServerUrlFor(own)
	if err != nil {
		return nil, fmt.Errorf("the address of the apiserver: %w", err)
	}
	if base.Scheme != "https" && hasCredentials(own) {
		return nil, errPlain
	}
	client, err := rest.HTTPClientFor(own)
	if err != nil {
		return nil, fmt.Errorf("the HTTP client of the apiserver: %w", err)
	}
	// The client may be a shared one.
	once := *client
	// client-go adds the token to each request, also to one that is redirected to another host.
	once.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &server{client: &once, base: strings.TrimSuffix(base.String(), "/"), places: map[string]place{}}, nil
}

// hasCredentials tells whether requests have a token or a password. A certificate is sent over TLS
// only.
func hasCredentials(config *rest.Config) bool {
	return config.BearerToken != "" || config.BearerTokenFile != "" || config.Username != "" ||
		config.Password != "" || config.AuthProvider != nil || config.ExecProvider != nil
}

// List returns the present state.
func (s *server) List(ctx context.Context, read kubefan.ApiserverRead) (*kubefan.ObjectList, error) {
	at, err := s.place(ctx, read)
	if err != nil {
		return nil, err
	}
	accept := acceptJSON
	if read.Projection.MetadataOnly {
		accept = acceptMetadataList
	}
	body, err := s.get(ctx, at.path(read.Target, "")+query(selection(read.Target)), accept, kubefan.ReasonResourceNotFound)
	if err != nil {
		return nil, err
	}
	return s.list(body, at, read.Projection)
}

func (s *server) list(body []byte, at place, projection kubefan.Projection) (*kubefan.ObjectList, error) {
	var found struct {
		Kind       string `json:"kind"`
		APIVersion string `json:"apiVersion"`
		Metadata   struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(body, &found); err != nil || found.Metadata.ResourceVersion == "" {
		return nil, s.failure(fmt.Sprintf("a list that cannot be read: %v", cmp.Or(err, errNoVersion)))
	}
	kind := strings.TrimSuffix(found.Kind, "List")
	made := &kubefan.ObjectList{
		// A list has all events of its version.
		ResourceVersion: found.Metadata.ResourceVersion + ".end",
		Resource:        at.resolved(kind, found.APIVersion),
		Objects:         make([]*api.Object, 0, len(found.Items)),
	}
	for _, item := range found.Items {
		known, err := identityOf(item)
		if err != nil {
			return nil, s.failure(fmt.Sprintf("an item that cannot be read: %v", err))
		}
		content, err := project(withKind(item, known.Kind, kind, found.APIVersion), projection)
		if err != nil {
			return nil, s.failure(fmt.Sprintf("an item that cannot be read: %v", err))
		}
		made.Objects = append(made.Objects, known.object(content))
	}
	return made, nil
}

// Get returns one object.
func (s *server) Get(ctx context.Context, read kubefan.ApiserverRead) (*api.Object, error) {
	at, err := s.place(ctx, read)
	if err != nil {
		return nil, err
	}
	accept := acceptJSON
	if read.Projection.MetadataOnly {
		accept = acceptMetadata
	}
	body, err := s.get(ctx, at.path(read.Target, read.Target.Name), accept, kubefan.ReasonObjectNotFound)
	if err != nil {
		return nil, err
	}
	// The apiserver ends a document with a new line.
	body = trimmed(body)
	known, err := identityOf(body)
	if err == nil {
		body, err = project(body, read.Projection)
	}
	if err != nil {
		return nil, s.failure(fmt.Sprintf("an object that cannot be read: %v", err))
	}
	return known.object(body), nil
}

// Watch returns the events after a version.
func (s *server) Watch(ctx context.Context, read kubefan.ApiserverRead) (kubefan.ApiserverWatch, error) {
	at, err := s.place(ctx, read)
	if err != nil {
		return nil, err
	}
	timeout := time.Duration((1 + rand.Float64()) * float64(watchMin)).Round(time.Second)
	parameters := selection(read.Target)
	parameters.Set("watch", "true")
	parameters.Set("allowWatchBookmarks", "true")
	parameters.Set("resourceVersion", read.ResourceVersion)
	parameters.Set("timeoutSeconds", strconv.Itoa(int(timeout.Seconds())))
	accept := acceptJSON
	if read.Projection.MetadataOnly {
		accept = acceptMetadata
	}
	ctx, cancel := context.WithTimeout(ctx, timeout+watchGrace)
	response, err := s.send(ctx, at.path(read.Target, "")+query(parameters), accept, kubefan.ReasonResourceNotFound)
	if err != nil {
		cancel()
		return nil, err
	}
	hasSelector := read.Target.LabelSelector != "" || read.Target.FieldSelector != ""
	return &watch{
		server: s, body: response.Body, decoder: json.NewDecoder(response.Body), cancel: cancel,
		projection: read.Projection, hasSelector: hasSelector,
	}, nil
}

// selection has the selectors of a target as parameters.
func selection(target kubefan.Target) url.Values {
	fields := target.FieldSelector
	if target.Name != "" {
		fields = strings.Trim("metadata.name="+target.Name+","+fields, ",")
	}
	made := url.Values{}
	if target.LabelSelector != "" {
		made.Set("labelSelector", target.LabelSelector)
	}
	if fields != "" {
		made.Set("fieldSelector", fields)
	}
	return made
}

func query(parameters url.Values) string {
	if len(parameters) == 0 {
		return ""
	}
	return "?" + parameters.Encode()
}

// get returns the body of an answer. A 404 has the reason notFound.
func (s *server) get(ctx context.Context, path, accept, notFound string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readMax)
	defer cancel()
	response, err := s.send(ctx, path, accept, notFound)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, bodyMax))
	if err != nil {
		return nil, s.broken(err)
	}
	return body, nil
}

// send returns an answer that is no error.
func (s *server) send(ctx context.Context, path, accept, notFound string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+path, nil)
	if err != nil {
		return nil, s.failure(err.Error())
	}
	request.Header.Set("Accept", accept)
	response, err := s.client.Do(request)
	if err != nil {
		return nil, s.broken(err)
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	return nil, s.refusal(statusOf(response, body), notFound)
}
