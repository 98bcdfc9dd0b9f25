package apiserver

import (
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/rest"
	kubefan "kubefan.dev/clients/go"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

// fake is an apiserver that answers as the test says.
type fake struct {
	mu       sync.Mutex
	requests []string
	answer   http.HandlerFunc
}

func (f *fake) ServeHTTP(writer http.ResponseWriter, request *http.Request) {
	f.mu.Lock()
	f.requests = append(f.requests, request.URL.String())
	f.mu.Unlock()
	if token := request.Header.Get("Authorization"); token != "Bearer own" {
		http.Error(writer, token, http.StatusUnauthorized)
		return
	}
	f.answer(writer, request)
}

func start(t *testing.T, answer http.HandlerFunc) (*fake, kubefan.Apiserver) {
	t.Helper()
	made := &fake{answer: answer}
	server := httptest.NewTLSServer(made)
	t.Cleanup(server.Close)
	client, err := New(&rest.Config{
		Host: server.URL + "/prefix", BearerToken: "own",
		TLSClientConfig: rest.TLSClientConfig{CAData: pem.EncodeToMemory(&pem.Block{
			Type: "CERTIFICATE", Bytes: server.Certificate().Raw,
		})},
	})
	if err != nil {
		t.Fatal(err)
	}
	return made, client
}

func says(text string) http.HandlerFunc {
	return func(writer http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(writer, text) }
}

const (
	item = `{"metadata":{"name":"a","namespace":"n","uid":"u","resourceVersion":"7"},"data":{"x":"\u003c"}}`
	list = `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[` + item + `]}`
)

func TestAListHasObjectsAsAWatchHasThemAndAllOfItsVersion(t *testing.T) {
	server, client := start(t, says(list))
	read := kubefan.ApiserverRead{Target: kubefan.Target{Resource: "configmaps", Namespace: "n", Name: "a", LabelSelector: "x=y"}}
	got, err := client.List(t.Context(), read)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(item, "{", `{"kind":"ConfigMap","apiVersion":"v1",`, 1)
	object := got.Objects[0]
	if got.ResourceVersion != "9.end" || string(object.GetObject()) != want || object.GetName() != "a" || object.GetUid() != "u" {
		t.Error(got)
	}
	if kind := got.Resource; kind.GetKind() != "ConfigMap" || kind.GetVersion() != "v1" || !kind.GetNamespaced() {
		t.Error(kind)
	}
	wanted := "/prefix/api/v1/namespaces/n/configmaps?fieldSelector=metadata.name%3Da&labelSelector=x%3Dy"
	if !slices.Equal(server.requests, []string{wanted}) {
		t.Error(server.requests)
	}
}

func TestCredentialsNeedTLS(t *testing.T) {
	for _, config := range []*rest.Config{
		{BearerToken: "own"}, {BearerTokenFile: "/token"}, {Username: "own", Password: "own"},
	} {
		config.Host = "http://localhost:1"
		if _, err := New(config); !errors.Is(err, errPlain) {
			t.Error(config, err)
		}
	}
	if _, err := New(&rest.Config{Host: "http://localhost:1"}); err != nil {
		t.Error(err)
	}
}

func TestARedirectDoesNotBringTheTokenToAnotherHost(t *testing.T) {
	asked := make(chan string, 10)
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, request *http.Request) {
		asked <- request.Header.Get("Authorization")
	}))
	t.Cleanup(other.Close)
	_, client := start(t, func(writer http.ResponseWriter, request *http.Request) {
		http.Redirect(writer, request, other.URL, http.StatusFound)
	})
	_, err := client.List(t.Context(), kubefan.ApiserverRead{Target: kubefan.Target{Resource: "pods"}})
	if err == nil || len(asked) > 0 {
		t.Error(err, len(asked))
	}
}

func TestAWatchHasEventsBookmarksAndErrors(t *testing.T) {
	object := strings.Replace(item, "{", `{"kind":"ConfigMap","apiVersion":"v1",`, 1)
	server, client := start(t, says(strings.Join([]string{
		`{"type":"ADDED","object":` + object + `}`,
		`{"type":"NEW","object":{}}`,
		`{"type":"DELETED","object":` + object + `}`,
		`{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"12"}}}`,
		`{"type":"ERROR","object":{"code":410,"message":"too old resource version: 1 (5)"}}`,
	}, "\n")+"\n"))
	watch, err := client.Watch(t.Context(), kubefan.ApiserverRead{
		Target: kubefan.Target{Resource: "widgets", Version: "v1", Group: "example.com"}, ResourceVersion: "1",
	})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	added, _, err := watch.Next()
	if err != nil || added.GetType() != api.EventType_EVENT_TYPE_ADDED || string(added.GetObject()) != object {
		t.Error(added, err)
	}
	deleted, _, err := watch.Next()
	if err != nil || deleted.GetDeleteReason() != api.DeleteReason_DELETE_REASON_OBJECT_DELETED {
		t.Error(deleted, err)
	}
	if event, bookmark, err := watch.Next(); event != nil || bookmark != "12" || err != nil {
		t.Error(event, bookmark, err)
	}
	if _, _, err := watch.Next(); !kubefan.IsExpired(err) {
		t.Error(err)
	}
	if _, _, err := watch.Next(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if asked := server.requests[0]; !strings.HasPrefix(asked, "/prefix/apis/example.com/v1/widgets?allowWatchBookmarks=true&resourceVersion=1&timeoutSeconds=") {
		t.Error(asked)
	}
}

func TestErrorsAreThoseThatKubefanWouldHave(t *testing.T) {
	for status, want := range map[int]string{
		400: "InvalidArgument INVALID_ARGUMENT false",
		401: "Unauthenticated UNAUTHENTICATED false",
		403: "PermissionDenied FORBIDDEN false",
		404: "NotFound OBJECT_NOT_FOUND false",
		410: "OutOfRange RESOURCE_VERSION_TOO_OLD false",
		429: "ResourceExhausted LIMIT_REACHED true",
		500: "Unavailable UPSTREAM_UNAVAILABLE true",
		504: "Unavailable UPSTREAM_UNAVAILABLE true",
	} {
		_, client := start(t, func(writer http.ResponseWriter, _ *http.Request) { writer.WriteHeader(status) })
		_, err := client.Get(t.Context(), kubefan.ApiserverRead{Target: kubefan.Target{Resource: "pods", Name: "a"}})
		failed := &kubefan.Error{}
		if !errors.As(err, &failed) {
			t.Fatal(err)
		}
		if got := fmt.Sprint(failed.Code, " ", failed.Reason, " ", failed.IsRetryable()); got != want {
			t.Error(status, got)
		}
	}
	_, client := start(t, func(writer http.ResponseWriter, _ *http.Request) {
		panic(http.ErrAbortHandler)
	})
	_, err := client.List(t.Context(), kubefan.ApiserverRead{Target: kubefan.Target{Resource: "pods"}})
	if failed := (&kubefan.Error{}); !errors.As(err, &failed) || failed.Code != codes.Unavailable || !failed.IsRetryable() {
		t.Error(err)
	}
}

func TestOnlyNamesThatAreNotKnownNeedDiscovery(t *testing.T) {
	server, client := start(t, func(writer http.ResponseWriter, request *http.Request) {
		answers := map[string]string{
			"/prefix/api": `{"items":[{"metadata":{},"versions":[{"version":"v1","resources":[
				{"resource":"pods","scope":"Namespaced","shortNames":["po"],"singularResource":"pod"}]}]}]}`,
			"/prefix/apis": `{"items":[{"metadata":{"name":"example.com"},"versions":[{"version":"v2","resources":[
				{"resource":"widgets","scope":"Cluster","shortNames":["wi"]}]}]}]}`,
		}
		answer, found := answers[request.URL.Path]
		if !found {
			answer = `{"kind":"List","metadata":{"resourceVersion":"1"}}`
		}
		_, _ = io.WriteString(writer, answer)
	})
	for _, it := range []struct {
		read kubefan.ApiserverRead
		want string
	}{
		{kubefan.ApiserverRead{Target: kubefan.Target{Resource: "deployments.apps"}}, "/apis/apps/v1/deployments"},
		{kubefan.ApiserverRead{Target: kubefan.Target{Resource: "nodes", Namespace: "n"}}, "/api/v1/nodes"},
		{kubefan.ApiserverRead{Target: kubefan.Target{Resource: "po"}}, "/api /api/v1/pods"},
		{kubefan.ApiserverRead{Target: kubefan.Target{Resource: "po"}}, "/api/v1/pods"},
		{kubefan.ApiserverRead{Target: kubefan.Target{Resource: "widgets.example.com", Namespace: "n"}}, "/api /apis /apis/example.com/v2/widgets"},
		{kubefan.ApiserverRead{Target: kubefan.Target{Resource: "wi"}}, "/api /apis /apis/example.com/v2/widgets"},
		{kubefan.ApiserverRead{
			Target:   kubefan.Target{Resource: "gi", Namespace: "n"},
			Resource: &api.ResolvedResource{Group: "g", Version: "v1", Resource: "gizmos", Namespaced: true},
		}, "/apis/g/v1/namespaces/n/gizmos"},
	} {
		server.requests = nil
		if _, err := client.List(t.Context(), it.read); err != nil {
			t.Error(err)
		}
		if got := strings.ReplaceAll(strings.Join(server.requests, " "), "/prefix", ""); got != it.want {
			t.Error(it.read.Target.Resource, got)
		}
	}
	_, err := client.List(t.Context(), kubefan.ApiserverRead{Target: kubefan.Target{Resource: "gadgets"}})
	if failed := (&kubefan.Error{}); !errors.As(err, &failed) || failed.Reason != kubefan.ReasonResourceNotFound {
		t.Error(err)
	}
}

const pod = `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"web","resourceVersion":"7","labels":{"app":"web"},"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"x\":1}\n","example.com/on":"yes"},"managedFields":[{"manager":"m"}]},"spec":{"nodeName":"n1","containers":[{"name":"a","image":"i:1"},{"name":"b"}],"volumes":[]},"status":{"phase":"Running"}}`

func TestAProjectionLeavesOutWhatKubefanWould(t *testing.T) {
	masked := func(paths ...string) kubefan.Projection { return kubefan.Projection{Fields: paths} }
	canonical := strings.NewReplacer(`"resourceVersion":"7",`, "", `,"managedFields":[{"manager":"m"}]`, "").Replace(pod)
	for _, it := range []struct {
		projection kubefan.Projection
		in, want   string
	}{
		{kubefan.Projection{}, pod, pod},
		{kubefan.Projection{DropManagedFields: true}, pod, canonical},
		{kubefan.Projection{DropLastApplied: true}, pod, strings.Replace(canonical, `"kubectl.kubernetes.io/last-applied-configuration":"{\"x\":1}\n",`, "", 1)},
		{kubefan.Projection{DropLastApplied: true}, `{"metadata":{"name":"a","annotations":{"kubectl.kubernetes.io/last-applied-configuration":"x"}}}`, `{"metadata":{"name":"a"}}`},
		{masked("status.phase", "spec.containers.image", "metadata.labels", "spec.nodeName"), pod,
			`{"metadata":{"labels":{"app":"web"}},"spec":{"nodeName":"n1","containers":[{"image":"i:1"},{}]},"status":{"phase":"Running"}}`},
		{masked(`metadata.annotations.example\.com/on`), pod, `{"metadata":{"annotations":{"example.com/on":"yes"}}}`},
		{masked("metadata.annotations.example", "spec.volumes.name", "kind.x"), pod, `{}`},
		{masked("a.b"), `{"a":[1,{"c":1},null,[{"b":1}],{"b":[]}]}`, `{"a":[{},{"b":[]}]}`},
		{masked("spec.nodeName", "spec"), `{"spec":{"x":1}}`, `{"spec":{"x":1}}`},
	} {
		got, err := project([]byte(it.in), it.projection)
		if err != nil || string(got) != it.want {
			t.Errorf("%+v: %s %v", it.projection, got, err)
		}
	}
	if _, err := project([]byte(pod), masked("a..b")); err == nil {
		t.Error("a path with an empty name is accepted")
	}
}
