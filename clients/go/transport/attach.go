package transport

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"

	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"

	"kubefan.dev/clients/go/internal/fallback"
)

// Attach changes a configuration so that all clients made from it, and from its copies, read
// through the kubefan of the options. Everything else still goes to the apiserver of the
// configuration, which must not change afterwards: requests to another host are not those of this
// apiserver.
//
// No request is sent yet. It fails if the options or the client certificate are wrong. A program
// also starts without the file of kubefan's CA: kubefan is away until the file is there.
func Attach(config *rest.Config, options Options) error {
	return attach(config, options, environment{clock: fallback.RealClock{}, random: rand.Float64, timeouts: defaultTimeouts})
}

// environment is what a test replaces.
type environment struct {
	clock    fallback.Clock
	random   func() float64
	timeouts timeouts
}

func attach(config *rest.Config, options Options, in environment) error {
	options = options.withDefaults()
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return fmt.Errorf("the apiserver of the configuration: %w", err)
	}
	to, err := newConnection(config, options, in.clock, in.timeouts)
	if err != nil {
		return fmt.Errorf("kubefan at %s: %w", options.Address, err)
	}
	shared := &kubefan{
		router: router{base: base}, connection: to, gate: newGate(in.clock, in.random, options.Budget),
		waits: options.Fallback == FallbackNever, address: options.Address, logger: options.Logger, environment: in,
	}
	shared.health = fallback.NewHealth(context.Background(), to.probe)
	shared.monitor = &monitor{
		address: options.Address, fallback: "reads go to the apiserver", logger: options.Logger,
		clock: in.clock, random: in.random, isServing: shared.isServing, returned: shared.endDirectWatches,
		changed: make(chan struct{}),
	}
	if shared.waits {
		shared.monitor.fallback = "reads wait"
	}
	State.Set(options.Address, fallback.Healthy.String())
	config.Wrap(func(direct http.RoundTripper) http.RoundTripper {
		return &roundTripper{kubefan: shared, direct: direct}
	})
	return nil
}

// roundTripper sends reads to kubefan, and everything else on. There are several for one Attach:
// also client-go's transports of exec and port-forward are wrapped, by which no reads are sent.
type roundTripper struct {
	kubefan *kubefan
	direct  http.RoundTripper
}

var _ net.RoundTripperWrapper = (*roundTripper)(nil)

func (t *roundTripper) RoundTrip(request *http.Request) (*http.Response, error) {
	asked, isRead := t.kubefan.router.readOf(request)
	if !isRead {
		return t.direct.RoundTrip(request)
	}
	return t.kubefan.serve(request, asked, t.direct)
}

// WrappedRoundTripper is for what client-go looks for in a transport, such as its idle connections.
func (t *roundTripper) WrappedRoundTripper() http.RoundTripper { return t.direct }
