package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"k8s.io/client-go/rest"
	clienttransport "k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"

	"kubefan.dev/clients/go/internal/fallback"
)

// timeouts bound the waits for kubefan.
type timeouts struct {
	// connect is for a TCP connection and its TLS handshake.
	connect time.Duration
	// answer is for the headers of an answer, with the connection. kubefan itself waits up to 5 s.
	answer time.Duration
	// silence is the time without a frame after which an HTTP/2 connection gets a PING.
	silence time.Duration
	// ping is for the answer to the PING. Without it the connection is lost.
	ping time.Duration
}

// defaultTimeouts find a kubefan that hangs within 8 s: 4.5 s until a watch is lost, and two
// connections that are not made.
var defaultTimeouts = timeouts{
	connect: 1500 * time.Millisecond, answer: 6 * time.Second, silence: 2500 * time.Millisecond, ping: 2 * time.Second,
}

const (
	// attemptsMax is how often a read is sent to kubefan until it has an answer.
	attemptsMax = 3
	// slowAttemptsMax is how many of them may take the time for a connection or longer.
	slowAttemptsMax = 2
)

// onlyIfCached is the directive of Cache-Control (RFC 9111, section 5.2.1.7) with which kubefan
// forwards no read, so that none needs kubefan and the apiserver. An older kubefan ignores it.
const onlyIfCached = "only-if-cached"

var errNoAnswer = errors.New("no answer in time")

// connection sends requests to kubefan. Its TLS configuration is its own: the CA and the name of
// kubefan's certificate, and the client certificate that the apiserver would see.
type connection struct {
	base  *url.URL
	clock fallback.Clock
	// transport sends a request as the caller's configuration says.
	transport http.RoundTripper
	// bare is the same without the wrappers of the caller.
	bare     *http.Transport
	timeouts timeouts
	rotation *rotation
}

// newConnection makes the connection to kubefan of a program whose configuration is for the
// apiserver.
func newConnection(config *rest.Config, options Options, clock fallback.Clock, waits timeouts) (*connection, error) {
	base, err := options.url()
	if err != nil {
		return nil, err
	}
	// It has the certificate of an exec plugin, and the dialer that ends connections when that
	// changes.
	caller, err := config.TransportConfig()
	if err != nil {
		return nil, err
	}
	dial := (&net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: waits.silence, Interval: waits.ping / 2, Count: 2,
	}}).DialContext
	if caller.DialHolder != nil {
		dial = caller.DialHolder.Dial
	}
	tracked := connrotation.NewDialer(dial)
	secured, err := tlsOf(caller, options)
	if err != nil {
		return nil, err
	}
	dialer := &dialer{dial: tracked.DialContext, tls: secured, roots: rootsOf(options), timeout: waits.connect}
	if secured.RootCAs, err = dialer.roots(); err != nil && options.CAFile == "" {
		return nil, err
	}
	if err != nil {
		// No CA of the system takes its place.
		secured.RootCAs = x509.NewCertPool()
		options.Logger.Error(err, "kubefan is away until its CA can be read", "kubefan", options.Address)
	}
	proxy := http.ProxyFromEnvironment
	if config.Proxy != nil {
		proxy = config.Proxy
	}
	bare := &http.Transport{
		Proxy: proxy, DialContext: dialer.plain, DialTLSContext: dialer.encrypted, TLSClientConfig: secured,
		TLSHandshakeTimeout: waits.connect, IdleConnTimeout: 90 * time.Second, DisableCompression: config.DisableCompression,
		Protocols: protocolsOf(base.Scheme),
		HTTP2: &http.HTTP2Config{
			SendPingTimeout: waits.silence, PingTimeout: waits.ping, WriteByteTimeout: waits.ping,
		},
	}
	made := &connection{base: base, clock: clock, transport: bare, bare: bare, timeouts: waits}
	if base.Scheme != "https" {
		made.transport = withoutCredentials{bare}
	}
	if config.WrapTransport != nil {
		made.transport = config.WrapTransport(made.transport)
	}
	if caller.TLS.CertFile != "" && len(caller.TLS.CertData) == 0 {
		made.rotation = &rotation{certificate: secured.GetClientCertificate, closeAll: tracked.CloseAll}
	}
	return made, nil
}

// protocolsOf returns the protocols of a scheme. Over TLS the server chooses. Without it, kubefan
// speaks HTTP/2 too, whose PINGs find a connection that hangs.
func protocolsOf(scheme string) *http.Protocols {
	made := &http.Protocols{}
	made.SetHTTP1(scheme == "https")
	made.SetHTTP2(scheme == "https")
	made.SetUnencryptedHTTP2(scheme == "http")
	return made
}

// tlsOf returns the TLS configuration for kubefan, with the caller's client certificate.
func tlsOf(caller *clienttransport.Config, options Options) (*tls.Config, error) {
	asked := clienttransport.TLSConfig{
		ServerName: options.ServerName, NextProtos: []string{"h2", "http/1.1"},
		CertFile: caller.TLS.CertFile, CertData: caller.TLS.CertData, KeyFile: caller.TLS.KeyFile, KeyData: caller.TLS.KeyData,
		GetCertHolder: caller.TLS.GetCertHolder,
	}
	made, err := clienttransport.TLSConfigFor(&clienttransport.Config{TLS: asked})
	if err != nil {
		return nil, fmt.Errorf("the client certificate: %w", err)
	}
	return made, nil
}

// rootsOf returns the function that reads the CAs of kubefan's certificate. Nil: those of the
// system.
func rootsOf(options Options) func() (*x509.CertPool, error) {
	return func() (*x509.CertPool, error) {
		text := options.CAData
		if options.CAFile != "" {
			read, err := os.ReadFile(options.CAFile)
			if err != nil {
				return nil, fmt.Errorf("CA file: %w", err)
			}
			text = read
		} else if len(text) == 0 {
			return nil, nil
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("no certificate in the CA of kubefan %s", options.CAFile)
		}
		return pool, nil
	}
}

// dialer makes connections, and reads the CA for each of them, because it is renewed while a
// program runs. Through a proxy the CA is that of the start.
type dialer struct {
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	tls     *tls.Config
	roots   func() (*x509.CertPool, error)
	timeout time.Duration
}

func (d *dialer) plain(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	return d.dial(ctx, network, address)
}

func (d *dialer) encrypted(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	config := d.tls.Clone()
	var err error
	if config.RootCAs, err = d.roots(); err != nil {
		return nil, err
	}
	if config.ServerName == "" {
		if config.ServerName, _, err = net.SplitHostPort(address); err != nil {
			return nil, err
		}
	}
	plain, err := d.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	made := tls.Client(plain, config)
	if err := made.HandshakeContext(ctx); err != nil {
		_ = plain.Close()
		return nil, err
	}
	return made, nil
}

// ask sends a request with this path and query to kubefan. A connection that breaks before an
// answer, or cannot be made, is replaced: kubefan may have closed it a moment ago, and a Service
// with a replica that has died may choose another one. A 503 is asked for once more, because a
// replica that drains closes its connections and others may serve. Cancel the answer when it is not
// needed.
func (c *connection) ask(request *http.Request, path string) (*http.Response, context.CancelFunc, error) {
	c.rotation.check(c.clock.Now())
	slow := 0
	for attempt := 1; ; attempt++ {
		began := c.clock.Now()
		response, cancel, err := c.try(request, path)
		if c.clock.Now().Sub(began) >= c.timeouts.connect {
			slow++
		}
		isLast := attempt == attemptsMax || slow == slowAttemptsMax || errors.Is(err, errNoAnswer)
		isAgain := err != nil && !isLast || err == nil && attempt == 1 && isUnavailable(response)
		if !isAgain || request.Context().Err() != nil {
			return response, cancel, err
		}
		if err == nil {
			_ = response.Body.Close()
			cancel()
		}
	}
}

// isUnavailable tells whether an answer may be that of a replica that drains.
func isUnavailable(response *http.Response) bool {
	return response.StatusCode == http.StatusServiceUnavailable && authorOf(response.Header) != ofApiserver
}

func (c *connection) try(request *http.Request, path string) (*http.Response, context.CancelFunc, error) {
	ctx, cancel := context.WithCancelCause(request.Context())
	stop := c.clock.AfterFunc(c.timeouts.answer, func() { cancel(errNoAnswer) })
	response, err := c.transport.RoundTrip(c.addressed(request.Clone(ctx), path))
	stop()
	// The time may be up just after the headers.
	isLate := errors.Is(context.Cause(ctx), errNoAnswer)
	if isLate && err == nil {
		_ = response.Body.Close()
	}
	if isLate {
		err = errNoAnswer
	}
	if err != nil {
		cancel(nil)
		return nil, nil, err
	}
	return response, func() { cancel(nil) }, nil
}

// addressed changes the server of a request to kubefan.
func (c *connection) addressed(request *http.Request, path string) *http.Request {
	request.URL = &url.URL{
		Scheme: c.base.Scheme, Host: c.base.Host, Path: c.base.Path + path, RawQuery: request.URL.RawQuery,
	}
	request.Host = ""
	return request
}

// withoutCredentials sends requests without TLS, where others could read credentials. It is the
// innermost round tripper, because a wrapper of the configuration may add a token.
type withoutCredentials struct{ http.RoundTripper }

func (t withoutCredentials) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Header.Get("Authorization") != "" {
		request = request.Clone(request.Context())
		request.Header.Del("Authorization")
	}
	return t.RoundTripper.RoundTrip(request)
}
