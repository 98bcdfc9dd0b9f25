package transport

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"kubefan.dev/clients/go/internal/leaks"
)

// waitAtMost bounds each wait of a test.
const waitAtMost = time.Minute

// authority signs certificates.
type authority struct {
	pem         []byte
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	made := &authority{}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	made.certificate, made.key, made.pem = made.sign(t, template)
	return made
}

// sign makes a certificate. The first one signs itself.
func (a *authority) sign(t *testing.T, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := template, key
	if a.certificate != nil {
		parent, signer = a.certificate, a.key
	}
	text, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(text)
	if err != nil {
		t.Fatal(err)
	}
	return parsed, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: text})
}

// pair returns a certificate for a server of this name, or for a client, and its key.
func (a *authority) pair(t *testing.T, name string) (certificate, key []byte) {
	t.Helper()
	_, private, certificate := a.sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	text, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return certificate, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: text})
}

// server is an HTTP server that records its requests.
type server struct {
	*httptest.Server
	authority *authority

	mu       sync.Mutex
	requests []*http.Request
	handler  http.HandlerFunc
	health   []byte
}

// protocol is what a server speaks.
type protocol string

const (
	http1 protocol = "HTTP/1.1 with TLS"
	http2 protocol = "HTTP/2 with TLS"
	plain protocol = "HTTP/2 without TLS"
)

// startServer starts a server that answers requests with the handler, and health checks as kubefan
// does.
func startServer(t *testing.T, name string, speaks protocol, handler http.HandlerFunc) *server {
	t.Helper()
	made := &server{handler: handler, health: healthServing}
	made.Server = httptest.NewUnstartedServer(http.HandlerFunc(made.serve))
	// A handler that aborts, and a handshake that fails, are part of some tests.
	made.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(made.Close)
	if speaks == plain {
		made.Config.Protocols = &http.Protocols{}
		made.Config.Protocols.SetUnencryptedHTTP2(true)
		made.Config.Protocols.SetHTTP1(true)
		made.Start()
		return made
	}
	made.authority = newAuthority(t, name+"-ca")
	certificate, key := made.authority.pair(t, name)
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	made.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequestClientCert}
	made.EnableHTTP2 = speaks == http2
	made.StartTLS()
	return made
}

func (s *server) serve(writer http.ResponseWriter, request *http.Request) {
	if request.URL.Path == healthPath {
		s.mu.Lock()
		health := s.health
		s.mu.Unlock()
		if health == nil {
			panic(http.ErrAbortHandler)
		}
		writer.Header().Set("Content-Type", "application/grpc")
		writer.Header().Set("Trailer", "Grpc-Status")
		_, _ = writer.Write(health)
		writer.Header().Set("Grpc-Status", "0")
		return
	}
	s.mu.Lock()
	s.requests = append(s.requests, request.Clone(context.Background()))
	handler := s.handler
	s.mu.Unlock()
	handler(writer, request)
}

// on replaces the handler. A nil one breaks each request, and the health.
func (s *server) on(handler http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handler, s.health = handler, healthServing
	if handler == nil {
		s.handler, s.health = func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, nil
	}
}

// hasHealth replaces the answer to health checks. Nil breaks them.
func (s *server) hasHealth(message []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.health = message
}

// asked returns the requests since the last call, as "METHOD path?query".
func (s *server) asked() (found []string) {
	for _, request := range s.received() {
		found = append(found, request.Method+" "+request.URL.RequestURI())
	}
	return found
}

func (s *server) received() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.requests
	s.requests = nil
	return found
}

// says is a handler that answers with a status, headers "name: value", and a body.
func says(status int, body string, headers ...string) http.HandlerFunc {
	return func(writer http.ResponseWriter, _ *http.Request) {
		for _, header := range headers {
			name, value, _ := strings.Cut(header, ": ")
			writer.Header().Set(name, value)
		}
		writer.WriteHeader(status)
		_, _ = io.WriteString(writer, body)
	}
}

const (
	hit = "Cache-Status: kubefan; hit"
	own = "Proxy-Status: kubefan; error=http_request_denied"
	// notCached is with 504.
	notCached = "Cache-Status: kubefan; detail=only-if-cached"
)

// watches is a handler that sends a line and keeps the watch open.
func watches(line string, headers ...string) http.HandlerFunc {
	return func(writer http.ResponseWriter, request *http.Request) {
		says(http.StatusOK, line+"\n", headers...)(writer, request)
		_ = http.NewResponseController(writer).Flush()
		<-request.Context().Done()
	}
}

// pair is an apiserver with a kubefan, and a client that is attached to it.
type pair struct {
	*testing.T
	apiserver, kubefan *server
	config             *rest.Config
	client             *http.Client
	clock              *fakeClock
	logged             *lines
}

// setting changes what a test attaches.
type setting struct {
	speaks   protocol
	options  Options
	config   func(*rest.Config)
	timeouts timeouts
}

// attached returns a pair whose gate admits a start each microsecond of the fake time.
func attached(t *testing.T, with setting) *pair {
	t.Helper()
	leaks.Check(t)
	if with.speaks == "" {
		with.speaks = http2
	}
	made := &pair{T: t, clock: newFakeClock(), logged: &lines{}}
	made.clock.quick = time.Millisecond
	made.apiserver = startServer(t, "apiserver", http2, says(http.StatusOK, "apiserver"))
	made.kubefan = startServer(t, "kubefan", with.speaks, says(http.StatusOK, "kubefan", hit))
	made.config = &rest.Config{
		Host:            made.apiserver.URL,
		BearerToken:     "secret",
		TLSClientConfig: rest.TLSClientConfig{CAData: made.apiserver.authority.pem},
	}
	if with.config != nil {
		with.config(made.config)
	}
	options := with.options
	options.Address = made.kubefan.URL + options.Address
	if made.kubefan.authority != nil && options.CAFile == "" {
		options.CAData = made.kubefan.authority.pem
	}
	if options.Budget == (Budget{}) {
		options.Budget = Budget{Clients: 1, StartsPerSecond: rateMax}
	}
	options.Logger = funcr.New(func(_, args string) { made.logged.add(args) }, funcr.Options{})
	if with.timeouts == (timeouts{}) {
		with.timeouts = timeouts{connect: waitAtMost, answer: defaultTimeouts.answer, silence: waitAtMost, ping: waitAtMost}
	}
	in := environment{clock: made.clock, random: func() float64 { return 0 }, timeouts: with.timeouts}
	if err := attach(made.config, options, in); err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(made.config)
	if err != nil {
		t.Fatal(err)
	}
	made.client = client
	t.Cleanup(func() {
		utilnet.CloseIdleConnectionsFor(client.Transport)
		made.shared().connection.bare.CloseIdleConnections()
	})
	return made
}

// shared is the state of the attached clients.
func (p *pair) shared() *kubefan {
	return p.config.WrapTransport(http.DefaultTransport).(*roundTripper).kubefan
}

func (p *pair) do(ctx context.Context, method, path string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, p.config.Host+path, nil)
	if err != nil {
		p.Fatal(err)
	}
	return p.client.Do(request)
}

// read sends a GET and returns "status body".
func (p *pair) read(path string) string {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), waitAtMost)
	defer cancel()
	response, err := p.do(ctx, http.MethodGet, path)
	if err != nil {
		p.Fatal(path, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		p.Fatal(path, err)
	}
	return fmt.Sprint(response.StatusCode, " ", string(body))
}

// expect checks the answer to a GET.
func (p *pair) expect(path, want string) {
	p.Helper()
	if got := p.read(path); got != want {
		p.Fatalf("%s: %q, not %q", path, got, want)
	}
}

// wereAsked checks the requests since the last check.
func (p *pair) wereAsked(kubefan, apiserver []string) {
	p.Helper()
	if got := p.kubefan.asked(); !slices.Equal(got, kubefan) {
		p.Errorf("kubefan was asked %q, not %q", got, kubefan)
	}
	if got := p.apiserver.asked(); !slices.Equal(got, apiserver) {
		p.Errorf("the apiserver was asked %q, not %q", got, apiserver)
	}
}

// begunWatch opens a watch of kubefan, and reads its first event.
func begunWatch(t *testing.T, pair *pair) *http.Response {
	t.Helper()
	pair.kubefan.on(watches("event", hit))
	response, err := pair.do(t.Context(), http.MethodGet, watch)
	if err != nil {
		t.Fatal(err)
	}
	if got := firstLine(t, response.Body); got != "event" {
		t.Error(got)
	}
	return response
}

// lines are the lines that were logged.
type lines struct {
	mu    sync.Mutex
	lines []string
}

func (l *lines) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
}

func (l *lines) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.lines)
}

// firstLine reads a line of a watch.
func firstLine(t *testing.T, body io.Reader) string {
	t.Helper()
	text := []byte{}
	for one := make([]byte, 1); !bytes.HasSuffix(text, []byte("\n")); {
		if _, err := body.Read(one); err != nil {
			t.Fatal(string(text), err)
		}
		text = append(text, one...)
	}
	return strings.TrimSpace(string(text))
}
