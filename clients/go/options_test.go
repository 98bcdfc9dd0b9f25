package kubefan

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

func TestEveryDocumentedFormOfAddressIsAccepted(t *testing.T) {
	targets := map[string]string{
		"127.0.0.1:7443":          "dns:///127.0.0.1:7443",
		"[::1]:7443":              "dns:///[::1]:7443",
		"dns:kubefan.svc:7443":    "dns:///kubefan.svc:7443",
		"dns:///kubefan.svc:7443": "dns:///kubefan.svc:7443",
		"http://h:1":              "dns:///h:1",
		"https://h:1/":            "dns:///h:1",
		"unix:/run/k.sock":        "unix:/run/k.sock",
	}
	for address, target := range targets {
		got, err := parseAddress(address)
		if err != nil || got.target != target || got.tls != strings.HasPrefix(address, "https:") {
			t.Errorf("%s: %+v %v", address, got, err)
		}
	}
	wrongs := []string{
		"", "a b:c", "localhost:notaport", "https://h:99999", "dns:h:x", "h", "unix:", "ftp://h:1",
		"https://h", "http://h", "https://h/", "https://[::1]", "h:", "https://h:", "h:0", "dns:h",
	}
	for _, wrong := range wrongs {
		if got, err := parseAddress(wrong); err == nil {
			t.Errorf("%q became %+v", wrong, got)
		}
	}
}

func TestATokenOrACertificateIsNeverSentInTheClear(t *testing.T) {
	secrets := []Options{{Token: "secret"}, {TokenFile: "/does/not/exist"}, {CertFile: "c", KeyFile: "k"}, {CAFile: "ca"}, {ServerName: "h"}}
	for _, options := range secrets {
		for _, address := range []string{"127.0.0.1:1", "http://h:1", "dns:h:1"} {
			if _, err := ConnectLazy(address, options); err == nil || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s %+v: %v", address, options, err)
			}
		}
	}
	for address, options := range map[string]Options{
		"https://h:1": {Token: "secret"}, "unix:/k.sock": {Token: "secret"},
		"https://h:2": {TokenFile: ServiceAccountTokenFile},
	} {
		client, err := ConnectLazy(address, options)
		if err != nil {
			t.Errorf("%s: %v", address, err)
			continue
		}
		_ = client.Close()
	}
}

func TestAPodHasAnAddressATokenAndACAByDefault(t *testing.T) {
	if where, err := parseAddress(InClusterAddress); err != nil || !where.tls {
		t.Error(where, err)
	}
	for given, file := range map[string]string{"": "/etc/kubefan/ca.crt", "/other/ca.crt": "/other/ca.crt"} {
		options := InCluster(given)
		if options.CAFile != file || options.TokenFile != "/var/run/secrets/kubernetes.io/serviceaccount/token" {
			t.Error(given, options)
		}
	}
	// The CAs of the system do not take the place of a CA that is not mounted.
	missing := filepath.Join(t.TempDir(), "ca.crt")
	if _, err := ConnectLazy(InClusterAddress, InCluster(missing)); err == nil || !strings.Contains(err.Error(), missing) {
		t.Error(err)
	}
}

func TestATokenFileThatCannotBeReadIsTheErrorOfConnect(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "token")
	_, err := Connect(t.Context(), "https://127.0.0.1:1", Options{TokenFile: missing})
	var failure *Error
	if !errors.As(err, &failure) || failure.Code != codes.InvalidArgument || !strings.Contains(err.Error(), missing) {
		t.Fatal(err)
	}
}

func TestAReplacedTokenFileIsReadAfterTenSecondsAndAtOnceAfterARefusal(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	token, err := newToken("", file)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	token.now = func() time.Time { return now }
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	is := func(want string) {
		t.Helper()
		if got, err := token.value(); err != nil || got != want {
			t.Fatalf("%q %v, not %q", got, err, want)
		}
	}
	if _, err := token.value(); err == nil {
		t.Fatal("there is no file yet")
	}
	write("first\n")
	is("Bearer first")
	write("second")
	is("Bearer first")
	if !token.replacement("Bearer first") || token.replacement("Bearer second") {
		t.Fatal("the file has another token than the first")
	}
	is("Bearer second")
	write("third")
	token.expire("Bearer first")
	is("Bearer second")
	token.expire("Bearer second")
	is("Bearer third")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Minute)
	is("Bearer third")
	if _, err := newToken("very\nsecret", ""); err == nil || strings.Contains(err.Error(), "secret") {
		t.Fatal(err)
	}
}

func TestDelaysDoubleFrom800MillisecondsTo30SecondsAndStartAgainAfterTwoHealthyMinutes(t *testing.T) {
	backoff := newBackoff(BackoffOptions{})
	backoff.random = func() float64 { return 0 }
	now := time.Unix(0, 0)
	for _, want := range []int64{800, 1600, 3200, 6400, 12800, 25600, 30000, 30000} {
		delay := backoff.delay(now, 0)
		if delay.Milliseconds() != want {
			t.Fatal(delay, want)
		}
		now = now.Add(delay)
	}
	if delay := backoff.delay(now.Add(2*time.Minute), 0); delay.Milliseconds() != 800 {
		t.Fatal(delay)
	}
	backoff.random = func() float64 { return 1 }
	if delay := backoff.delay(now, time.Minute); delay != time.Minute {
		t.Fatal("the server asked for a minute", delay)
	}
}

func TestDelaysGrowByTheirFactor(t *testing.T) {
	backoff := newBackoff(BackoffOptions{Initial: time.Second, Factor: 1.5})
	backoff.random = func() float64 { return 0 }
	for _, want := range []int64{1000, 1500, 2250} {
		if delay := backoff.delay(time.Unix(0, 0), 0); delay.Milliseconds() != want {
			t.Fatal(delay, want)
		}
	}
}

func TestAServerNameReplacesTheHostOfTheAddress(t *testing.T) {
	made, err := transportOf(endpoint{tls: true}, Options{ServerName: "kubefan.example.com"})
	if err != nil {
		t.Fatal(err)
	}
	current, err := made.(*fileTLS).current()
	if err != nil {
		t.Fatal(err)
	}
	//lint:ignore SA1019 As in Info.
	if name := current.Info().ServerName; name != "kubefan.example.com" {
		t.Fatal(name)
	}
}
