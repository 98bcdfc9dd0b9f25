package transport

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"kubefan.dev/clients/go/internal/fallback"
)

// How each part of client-go works through an attached configuration.

func TestExecAndPortForwardGoToTheApiserver(t *testing.T) {
	for name, request := range map[string]struct{ method, path, protocol string }{
		"exec over SPDY":       {"POST", "/api/v1/namespaces/a/pods/p/exec?command=ls", "SPDY/3.1"},
		"exec over websockets": {"GET", "/api/v1/namespaces/a/pods/p/exec?command=ls&watch=1", "websocket"},
		"port-forward":         {"POST", "/api/v1/namespaces/a/pods/p/portforward", "SPDY/3.1"},
	} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{})
			pair.apiserver.on(echoes)
			// As client-go's transport/spdy and transport/websocket do.
			secured, err := rest.TLSConfigFor(pair.config)
			if err != nil {
				t.Fatal(err)
			}
			upgrader := &http.Transport{TLSClientConfig: secured}
			defer upgrader.CloseIdleConnections()
			wrapped, err := rest.HTTPWrappersForConfig(pair.config, upgrader)
			if err != nil {
				t.Fatal(err)
			}
			asked, err := http.NewRequestWithContext(t.Context(), request.method, pair.config.Host+request.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			asked.Header.Set("Connection", "Upgrade")
			asked.Header.Set("Upgrade", request.protocol)
			response, err := wrapped.RoundTrip(asked)
			if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
				t.Fatal(response, err)
			}
			stream := response.Body.(io.ReadWriteCloser)
			defer stream.Close()
			if _, err := io.WriteString(stream, "hello\n"); err != nil {
				t.Fatal(err)
			}
			if got := firstLine(t, stream); got != "hello" {
				t.Error(got)
			}
			pair.wereAsked(nil, []string{request.method + " " + request.path})
		})
	}
}

// echoes switches protocols, and sends back what it gets.
func echoes(writer http.ResponseWriter, request *http.Request) {
	connection, buffered, err := http.NewResponseController(writer).Hijack()
	if err != nil {
		panic(err)
	}
	defer connection.Close()
	_, _ = fmt.Fprintf(connection, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", request.Header.Get("Upgrade"))
	_, _ = io.Copy(connection, buffered)
}

func TestTheTokenOfAnExecPluginGoesToBoth(t *testing.T) {
	runs := filepath.Join(t.TempDir(), "runs")
	pair := attached(t, setting{config: withPlugin(runs, map[string]string{"token": "of the plugin"})})
	pair.kubefan.on(says(http.StatusUnauthorized, "refused"))
	pair.expect(list, "200 apiserver")
	pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
	pair.expect(watch, "200 kubefan")
	for _, received := range slices.Concat(pair.kubefan.received(), pair.apiserver.received()) {
		if got := received.Header.Get("Authorization"); got != "Bearer of the plugin" {
			t.Error(got)
		}
	}
	if text, err := os.ReadFile(runs); err != nil || string(text) != "run\n" {
		t.Errorf("a refusal of kubefan starts the plugin again: %q %v", text, err)
	}
}

func TestTheCertificateOfAnExecPluginGoesToBoth(t *testing.T) {
	certificate, key := newAuthority(t, "clients").pair(t, "caller")
	runs := filepath.Join(t.TempDir(), "runs")
	pair := attached(t, setting{config: withPlugin(runs, map[string]string{
		"clientCertificateData": string(certificate), "clientKeyData": string(key),
	})})
	pair.expect(list, "200 kubefan")
	pair.expect(latest, "200 apiserver")
	haveCertificate(t, pair)
}

// withPlugin sets an exec plugin with this status, which notes its runs.
func withPlugin(runs string, status map[string]string) func(*rest.Config) {
	text, err := json.Marshal(map[string]any{
		"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status,
	})
	if err != nil {
		panic(err)
	}
	return func(config *rest.Config) {
		config.BearerToken = ""
		config.ExecProvider = &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
			Command: "sh", Args: []string{"-c", `echo run >> "$0"; printf %s "$1"`, runs, string(text)},
		}
	}
}

func TestTheTokenOfAFileIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	pair := attached(t, setting{config: func(config *rest.Config) { config.BearerToken, config.BearerTokenFile = "", file }})
	pair.expect(list, "200 kubefan")
	write("second")
	// client-go reads the file again after a minute, or for another client.
	renewed, err := rest.HTTPClientFor(pair.config)
	if err != nil {
		t.Fatal(err)
	}
	pair.client = renewed
	pair.expect(list, "200 kubefan")
	pair.expect(latest, "200 apiserver")
	tokens := []string{}
	for _, received := range slices.Concat(pair.kubefan.received(), pair.apiserver.received()) {
		tokens = append(tokens, received.Header.Get("Authorization"))
	}
	if !slices.Equal(tokens, []string{"Bearer first", "Bearer second", "Bearer second"}) {
		t.Error(tokens)
	}
}

func TestAClientCertificateGoesToBoth(t *testing.T) {
	certificate, key := newAuthority(t, "clients").pair(t, "caller")
	pair := attached(t, setting{config: func(config *rest.Config) { config.CertData, config.KeyData = certificate, key }})
	pair.expect(list, "200 kubefan")
	pair.expect(latest, "200 apiserver")
	haveCertificate(t, pair)
}

func haveCertificate(t *testing.T, pair *pair) {
	t.Helper()
	for _, received := range slices.Concat(pair.kubefan.received(), pair.apiserver.received()) {
		if peers := received.TLS.PeerCertificates; len(peers) != 1 || peers[0].Subject.CommonName != "caller" {
			t.Error(received.URL, peers)
		}
	}
}

func TestConnectionsWithAnOldClientCertificateAreClosed(t *testing.T) {
	now, closed := time.Unix(0, 0), 0
	current := "first"
	reads := 0
	certificates := &rotation{closeAll: func() { closed++ }, certificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		reads++
		if current == "" {
			return nil, os.ErrNotExist
		}
		return &tls.Certificate{Certificate: [][]byte{[]byte(current)}}, nil
	}}
	for _, step := range []struct {
		after  time.Duration
		file   string
		closed int
	}{
		{0, "first", 0}, {rotationCheckedEvery, "first", 0}, {1, "second", 0}, {rotationCheckedEvery, "second", 1},
		{rotationCheckedEvery, "second", 1}, {rotationCheckedEvery, "", 1}, {1, "", 1}, {rotationCheckedEvery, "third", 2},
	} {
		now, current = now.Add(step.after), step.file
		certificates.check(now)
		if closed != step.closed {
			t.Errorf("%+v: %d", step, closed)
		}
	}
	if reads != 6 {
		t.Error("the files are read ", reads, " times")
	}
}

func TestTheFilesOfAClientCertificateAreUsed(t *testing.T) {
	directory := t.TempDir()
	certificate, key := newAuthority(t, "clients").pair(t, "caller")
	config := &rest.Config{Host: "https://apiserver", TLSClientConfig: rest.TLSClientConfig{
		CertFile: filepath.Join(directory, "crt"), KeyFile: filepath.Join(directory, "key"),
	}}
	for file, text := range map[string][]byte{config.CertFile: certificate, config.KeyFile: key} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	made, err := newConnection(config, Options{Address: "https://kubefan"}, fallback.RealClock{}, defaultTimeouts)
	if err != nil {
		t.Fatal(err)
	}
	if found, err := made.rotation.certificate(nil); err != nil || len(found.Certificate) != 1 {
		t.Error(found, err)
	}
}

func TestTheCAOfKubefanIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(file, newAuthority(t, "old").pem, 0o600); err != nil {
		t.Fatal(err)
	}
	kubefan := startServer(t, "kubefan", http2, says(http.StatusOK, "kubefan", hit))
	made, err := newConnection(&rest.Config{}, Options{Address: kubefan.URL, CAFile: file}, fallback.RealClock{}, defaultTimeouts)
	if err != nil {
		t.Fatal(err)
	}
	defer made.bare.CloseIdleConnections()
	if made.probe(t.Context()) {
		t.Error("its certificate is of another CA")
	}
	if err := os.WriteFile(file, kubefan.authority.pem, 0o600); err != nil {
		t.Fatal(err)
	}
	if !made.probe(t.Context()) {
		t.Error("the new CA is not read")
	}
}

func TestTheCertificateOfKubefanMustHaveItsName(t *testing.T) {
	for name, want := range map[string]string{"another": "200 apiserver", "kubefan": "200 kubefan"} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{options: Options{ServerName: name}})
			pair.expect(list, want)
		})
	}
}

func TestTheTLSOptionsOfTheApiserverAreNotThoseOfKubefan(t *testing.T) {
	for name, row := range map[string]struct {
		config func(*rest.Config)
		want   string
	}{
		"a server name": {func(config *rest.Config) { config.ServerName = "apiserver" }, "200 kubefan"},
		"protocols":     {func(config *rest.Config) { config.NextProtos = []string{"http/1.1"} }, "200 kubefan"},
		"no check of the certificate": {func(config *rest.Config) {
			config.TLSClientConfig = rest.TLSClientConfig{Insecure: true}
		}, "200 apiserver"},
	} {
		t.Run(name, func(t *testing.T) {
			options := Options{}
			if row.want == "200 apiserver" {
				options.CAFile = filepath.Join(t.TempDir(), "other-ca.crt")
				if err := os.WriteFile(options.CAFile, newAuthority(t, "other").pem, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			pair := attached(t, setting{config: row.config, options: options})
			pair.expect(latest, "200 apiserver")
			pair.expect(list, row.want)
		})
	}
}

func TestACustomTransportIsForTheApiserver(t *testing.T) {
	custom := &http.Transport{}
	defer custom.CloseIdleConnections()
	pair := attached(t, setting{config: func(config *rest.Config) {
		custom.TLSClientConfig = tlsFor(t, config)
		config.Transport, config.TLSClientConfig = custom, rest.TLSClientConfig{}
	}})
	pair.expect(list, "200 kubefan")
	pair.expect(latest, "200 apiserver")
}

func tlsFor(t *testing.T, config *rest.Config) *tls.Config {
	t.Helper()
	made, err := rest.TLSConfigFor(config)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestAWrapperOfTheConfigurationSeesBoth(t *testing.T) {
	seen := &lines{}
	pair := attached(t, setting{config: func(config *rest.Config) {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripperFunc(func(request *http.Request) (*http.Response, error) {
				seen.add(request.URL.Path)
				return next.RoundTrip(request)
			})
		})
	}})
	pair.expect(list, "200 kubefan")
	pair.expect("/version", "200 apiserver")
	if got := seen.all(); !slices.Equal(got, []string{latest, "/version"}) {
		t.Error(got)
	}
}

func TestATokenOfAWrapperIsSentOnlyOverTLS(t *testing.T) {
	for _, speaks := range []protocol{http2, plain} {
		t.Run(string(speaks), func(t *testing.T) {
			pair := attached(t, setting{speaks: speaks, config: func(config *rest.Config) {
				config.BearerToken = ""
				config.Wrap(func(next http.RoundTripper) http.RoundTripper {
					return roundTripperFunc(func(request *http.Request) (*http.Response, error) {
						request = request.Clone(request.Context())
						request.Header.Set("Authorization", "Bearer of the wrapper")
						return next.RoundTrip(request)
					})
				})
			}})
			pair.expect(list, "200 kubefan")
			token := pair.kubefan.received()[0].Header.Get("Authorization")
			if isSent := token != ""; isSent != (speaks != plain) {
				t.Errorf("%q", token)
			}
		})
	}
}

type roundTripperFunc func(*http.Request) (*http.Response, error)

func (f roundTripperFunc) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// podsAPI serves pods as an apiserver does. Its watches have the events of a channel.
func podsAPI(events <-chan string, headers ...string) http.HandlerFunc {
	return func(writer http.ResponseWriter, request *http.Request) {
		query := request.URL.Query()
		write := func(text string) {
			_, _ = io.WriteString(writer, text)
			_ = http.NewResponseController(writer).Flush()
		}
		says(http.StatusOK, "", append(headers, "Content-Type: application/json")...)(writer, request)
		switch {
		case !query.Has("watch"):
			write(`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[]}`)
			return
		case query.Get("sendInitialEvents") == "true":
			write(podEvent("ADDED", "state", 5))
			write(`{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"5",` +
				`"annotations":{"k8s.io/initial-events-end":"true"}}}}` + "\n")
		}
		for {
			select {
			case event := <-events:
				write(event)
			case <-request.Context().Done():
				return
			}
		}
	}
}

func podEvent(kind, name string, version int) string {
	return fmt.Sprintf(`{"type":%q,"object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":%q,"namespace":"a","resourceVersion":"%d"}}}`+"\n", kind, name, version)
}

// added are the names of the pods that a handler has been told of.
type added struct {
	*testing.T
	names chan string
}

func (a added) OnAdd(object any, _ bool) { a.names <- object.(*corev1.Pod).Name }
func (a added) OnUpdate(any, any)        {}
func (a added) OnDelete(any)             {}

func (a added) isTold(want string) {
	a.Helper()
	select {
	case got := <-a.names:
		if got != want {
			a.Fatal(got, want)
		}
	case <-time.After(waitAtMost):
		a.Fatal("never told of ", want)
	}
}

func TestAnInformerResumesFromItsVersionOnBothSides(t *testing.T) {
	pair := attached(t, setting{})
	fromKubefan, fromApiserver := make(chan string, 1), make(chan string, 1)
	pair.kubefan.on(podsAPI(fromKubefan, hit))
	pair.apiserver.on(podsAPI(fromApiserver))
	clientset, err := kubernetes.NewForConfig(pair.config)
	if err != nil {
		t.Fatal(err)
	}
	source := cache.NewListWatchFromClient(clientset.CoreV1().RESTClient(), "pods", "", fields.Everything())
	informer := cache.NewSharedIndexInformer(source, &corev1.Pod{}, 0, cache.Indexers{})
	told := added{t, make(chan string, 10)}
	if _, err := informer.AddEventHandler(told); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := sync.WaitGroup{}
	ended.Go(func() { informer.RunWithContext(ctx) })
	defer ended.Wait()
	defer cancel()

	told.isTold("state")
	pair.wereWatchedOnce(pair.kubefan, "")
	// client-go lists after a watch without an event that was shorter than a second.
	fromKubefan <- podEvent("ADDED", "second", 6)
	told.isTold("second")
	pair.kubefan.on(nil)
	pair.kubefan.CloseClientConnections()
	fromApiserver <- podEvent("ADDED", "moved", 7)
	told.isTold("moved")
	pair.wereWatchedOnce(pair.apiserver, "6")

	pair.kubefan.asked()
	pair.kubefan.on(podsAPI(fromKubefan, hit))
	pair.clock.advance(fallback.HoldMin + 2*fallback.ProbeEvery)
	pair.clock.advance(directWatchesEndWithin)
	fromKubefan <- podEvent("ADDED", "returned", 8)
	told.isTold("returned")
	pair.wereWatchedOnce(pair.kubefan, "7")
	if asked := pair.apiserver.asked(); len(asked) > 0 {
		t.Error(asked)
	}
}

// wereWatchedOnce checks that the only request to a server is a watch: from this version, or with
// the state if that is empty.
func (p *pair) wereWatchedOnce(server *server, version string) {
	p.Helper()
	received := server.received()
	if len(received) == 1 {
		query := received[0].URL.Query()
		if query.Has("watch") && query.Get("resourceVersion") == version && query.Has("sendInitialEvents") == (version == "") {
			return
		}
	}
	p.Errorf("not one watch from version %q:", version)
	for _, each := range received {
		p.Error(each.Method, each.URL)
	}
}

func TestTheHTTPClientOfControllerRuntimeReadsThroughKubefan(t *testing.T) {
	ctrllog.SetLogger(logr.Discard())
	pair := attached(t, setting{})
	pair.kubefan.on(podsAPI(nil, hit))
	pair.apiserver.on(podsAPI(nil))
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	reader, err := ctrlcache.New(pair.config, ctrlcache.Options{HTTPClient: pair.client, Scheme: scheme.Scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := sync.WaitGroup{}
	ended.Go(func() { _ = reader.Start(ctx) })
	defer ended.Wait()
	defer cancel()
	if !reader.WaitForCacheSync(ctx) {
		t.Fatal("the cache has not started")
	}
	pods := &corev1.PodList{}
	if err := reader.List(ctx, pods); err != nil || len(pods.Items) != 1 {
		t.Error(pods.Items, err)
	}
	pair.wereWatchedOnce(pair.kubefan, "")
	direct, err := client.New(pair.config, client.Options{HTTPClient: pair.client, Scheme: scheme.Scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	if err := direct.List(ctx, pods); err != nil {
		t.Error(err)
	}
	created := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "a"}}
	pair.apiserver.on(says(http.StatusCreated, `{"kind":"Pod","apiVersion":"v1"}`, "Content-Type: application/json"))
	if err := direct.Create(ctx, created); err != nil {
		t.Error(err)
	}
	pair.wereAsked(nil, []string{"GET /api/v1/pods", "POST /api/v1/namespaces/a/pods"})
}

func TestAConnectionThatIsSilentIsLost(t *testing.T) {
	frozen := make(chan struct{})
	reach := &net.Dialer{}
	pair := attached(t, setting{
		// The answers to the PINGs before are not late on a busy machine.
		timeouts: timeouts{connect: waitAtMost, answer: waitAtMost, silence: time.Second / 2, ping: 10 * time.Second},
		config: func(config *rest.Config) {
			config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				made, err := reach.DialContext(ctx, network, address)
				if err != nil || strings.HasSuffix(config.Host, address) {
					return made, err
				}
				return &freezing{Conn: made, frozen: frozen, closed: make(chan struct{})}, nil
			}
		},
	})
	response := begunWatch(t, pair)
	defer response.Body.Close()
	close(frozen)
	if _, err := response.Body.Read(make([]byte, 1)); err != io.ErrUnexpectedEOF {
		t.Error(err)
	}
}

// freezing is a connection whose other side hangs from some time on.
type freezing struct {
	net.Conn
	frozen <-chan struct{}
	closed chan struct{}
	once   sync.Once
}

func (f *freezing) Read(into []byte) (int, error) {
	count, err := f.Conn.Read(into)
	select {
	case <-f.frozen:
		<-f.closed
		return 0, net.ErrClosed
	default:
		return count, err
	}
}

func (f *freezing) Close() error {
	f.once.Do(func() { close(f.closed) })
	return f.Conn.Close()
}
