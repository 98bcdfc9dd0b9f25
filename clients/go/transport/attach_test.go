package transport

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"

	"kubefan.dev/clients/go/internal/fallback"
)

func TestWrongOptionsAreRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, options := range []Options{
		{Address: "kubefan:7443"},
		{Address: "ftp://kubefan"},
		{Address: "https://"},
		{Address: "https://user:secret@kubefan"},
		{Address: "https://kubefan?a=b"},
		{Address: "http://kubefan", CAFile: file},
		{Address: "http://kubefan", ServerName: "name"},
		{Address: "https://kubefan", CAData: []byte("no certificate")},
		{Address: "https://kubefan", CAFile: file, CAData: []byte("x")},
	} {
		config := &rest.Config{Host: "https://apiserver"}
		if err := Attach(config, options); err == nil || config.WrapTransport != nil {
			t.Errorf("%+v is accepted: %v", options, err)
		}
	}
	if err := Attach(&rest.Config{Host: "a b"}, Options{Address: "https://kubefan"}); err == nil {
		t.Error("the apiserver has no address")
	}
}

func TestAProgramStartsWithoutTheCAOfKubefan(t *testing.T) {
	for name, text := range map[string]string{"no file": "", "no certificate": "no certificate"} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "ca.crt")
			write := func(text []byte) {
				if err := os.WriteFile(file, text, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if text != "" {
				write([]byte(text))
			}
			pair := attached(t, setting{options: Options{CAFile: file}})
			pair.expect(list, "200 apiserver")
			if lines := pair.logged.all(); len(lines) != 2 || !strings.Contains(lines[0], "until its CA can be read") {
				t.Error(lines)
			}
			write(pair.kubefan.authority.pem)
			pair.clock.advance(fallback.HoldMin + 2*fallback.ProbeEvery)
			pair.expect(list, "200 kubefan")
		})
	}
}

func TestAnAttachedConfigurationSendsNothingYet(t *testing.T) {
	config := &rest.Config{Host: "https://127.0.0.1:1"}
	if err := Attach(config, Options{Address: "https://127.0.0.1:2"}); err != nil {
		t.Fatal(err)
	}
	direct := &http.Transport{}
	wrapped, isWrapper := config.WrapTransport(direct).(net.RoundTripperWrapper)
	if !isWrapper || wrapped.WrappedRoundTripper() != direct {
		t.Error("client-go does not find its own transport")
	}
}

// counts records metrics.
type counts struct{ lines }

func (c *counts) Increment(_ context.Context, server, outcome string) { c.add(server + " " + outcome) }
func (c *counts) Set(_, state string)                                 { c.add(state) }
func (c *counts) Observe(context.Context, time.Duration)              { c.add("waited") }

func TestMetricsShowWhereReadsGoAndWhy(t *testing.T) {
	seen := &counts{}
	Register(RegisterOpts{Reads: seen, State: seen, Wait: seen})
	Register(RegisterOpts{Reads: noMetric{}})
	t.Cleanup(func() {
		Reads, State, Wait = noMetric{}, noMetric{}, noMetric{}
		registered = sync.Once{}
	})
	pair := attached(t, setting{})
	pair.expect(list, "200 kubefan")
	pair.kubefan.on(says(http.StatusForbidden, "refused"))
	pair.expect(list, "200 apiserver")
	pair.kubefan.on(says(http.StatusNotFound, "missing", own))
	pair.expect(nodes, "200 apiserver")
	pair.kubefan.on(nil)
	pair.expect(watch, "200 apiserver")
	pair.kubefan.on(says(http.StatusOK, "passed on"))
	pair.clock.advance(fallback.HoldMin + 2*fallback.ProbeEvery)
	for range passedOnMax {
		pair.expect(watch, "200 passed on")
	}
	pair.expect(watch, "200 apiserver")
	pair.expect(latest, "200 apiserver")
	want := []string{
		"healthy", "kubefan answered", "kubefan refused", "waited", "apiserver refused", "kubefan missing",
		"apiserver uncached", "kubefan unreachable", "away", "waited", "apiserver away", "returning", "healthy",
		"kubefan uncached", "kubefan uncached", "kubefan uncached", "apiserver uncached",
	}
	if got := seen.all(); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
