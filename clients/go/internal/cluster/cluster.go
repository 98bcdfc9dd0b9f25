// Package cluster runs a real control plane and a real kubefan on loopback, for tests.
package cluster

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
)

const (
	readyAtMost = 3 * time.Minute
	// askAtMost bounds each question whether a program is ready.
	askAtMost = 10 * time.Second
	// pollInterval is how often a program that starts is asked whether it is ready.
	pollInterval = 50 * time.Millisecond
	adminToken   = "token-of-admin"
	// NobodyToken is the token of a user without rights.
	NobodyToken = "token-of-nobody"
)

// Cluster is etcd and kube-apiserver. They end with the test.
type Cluster struct {
	Config *rest.Config
	Client *kubernetes.Clientset
	// CAFile, CertFile and KeyFile are those of the apiserver; the certificate is for loopback.
	CAFile, CertFile, KeyFile string
	// TokenFile has the administrator's token.
	TokenFile string
	// Kubeconfig is the administrator's. kubefan reads with it.
	Kubeconfig string

	dir     string
	assets  string
	kubefan string
	args    []string

	mu        sync.Mutex
	apiserver *process
}

type process struct {
	command *exec.Cmd
	done    chan struct{}
}

// Start starts a control plane from the programs in KUBEFAN_TEST_ASSETS. Without that variable and
// KUBEFAN, the path of kubefan, the test is skipped.
func Start(t testing.TB) *Cluster {
	t.Helper()
	made := &Cluster{assets: os.Getenv("KUBEFAN_TEST_ASSETS"), kubefan: os.Getenv("KUBEFAN"), dir: t.TempDir()}
	if made.assets == "" || made.kubefan == "" {
		t.Skip("needs KUBEFAN, the path of kubefan, and KUBEFAN_TEST_ASSETS, the folder of etcd and kube-apiserver")
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(made.logs())
		}
	})
	made.credentials(t)
	ports := freePorts(t, 3)
	etcd, peer, secure := ports[0], ports[1], ports[2]
	etcdURL := fmt.Sprintf("http://127.0.0.1:%d", etcd)
	peerURL := fmt.Sprintf("http://127.0.0.1:%d", peer)
	started := made.run(t, filepath.Join(made.assets, "etcd"), "etcd.log",
		"--data-dir="+filepath.Join(made.dir, "etcd"), "--listen-client-urls="+etcdURL, "--advertise-client-urls="+etcdURL,
		"--listen-peer-urls="+peerURL, "--initial-advertise-peer-urls="+peerURL, "--initial-cluster=default="+peerURL,
		"--unsafe-no-fsync", "--log-level=warn")
	t.Cleanup(started.kill)
	made.args = []string{
		"--etcd-servers=" + etcdURL, fmt.Sprintf("--secure-port=%d", secure), "--cert-dir=" + made.dir,
		"--client-ca-file=" + made.CAFile, "--tls-cert-file=" + made.CertFile, "--tls-private-key-file=" + made.KeyFile,
		"--token-auth-file=" + filepath.Join(made.dir, "users.csv"),
		"--service-account-key-file=" + made.KeyFile, "--service-account-signing-key-file=" + made.KeyFile,
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
		"--disable-admission-plugins=ServiceAccount", "--authorization-mode=RBAC", "--profiling=false",
	}
	made.Config = &rest.Config{
		Host: fmt.Sprintf("https://127.0.0.1:%d", secure), BearerToken: adminToken, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: made.CAFile},
	}
	client, err := kubernetes.NewForConfig(made.Config)
	if err != nil {
		t.Fatal(err)
	}
	made.Client = client
	made.Kubeconfig = made.KubeconfigOf(t, adminToken)
	made.StartAPIServer(t)
	t.Cleanup(made.KillAPIServer)
	return made
}

// KubeconfigOf writes a kubeconfig with this token.
func (c *Cluster) KubeconfigOf(t testing.TB, token string) string {
	t.Helper()
	return c.write(t, token+".kubeconfig", fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: test\n"+
		"clusters: [{ name: test, cluster: { server: '%s', certificate-authority: '%s' } }]\n"+
		"contexts: [{ name: test, context: { cluster: test, user: user } }]\n"+
		"users: [{ name: user, user: { token: %s } }]\n", c.Config.Host, c.CAFile, token))
}

// StartAPIServer starts kube-apiserver, again with the same data, and waits until it is ready.
func (c *Cluster) StartAPIServer(t testing.TB) {
	t.Helper()
	started := c.run(t, filepath.Join(c.assets, "kube-apiserver"), "kube-apiserver.log", c.args...)
	c.mu.Lock()
	c.apiserver = started
	c.mu.Unlock()
	c.until(t, "kube-apiserver is ready", started, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), askAtMost)
		defer cancel()
		// The apiserver makes this namespace after it says that it is ready.
		for _, path := range []string{"/readyz", "/api/v1/namespaces/default"} {
			if _, err := c.Client.RESTClient().Get().AbsPath(path).DoRaw(ctx); err != nil {
				return false
			}
		}
		return true
	})
}

// KillAPIServer ends kube-apiserver by SIGKILL.
func (c *Cluster) KillAPIServer() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.apiserver != nil {
		c.apiserver.kill()
		c.apiserver = nil
	}
}

// Kubefan is a running kubefan.
type Kubefan struct {
	// Address is host:port of its data port.
	Address string
	process *process
}

// StartKubefan runs kubefan serve, waits until it serves, and ends it with the test. An empty
// address means a free port.
func (c *Cluster) StartKubefan(t testing.TB, address string, args ...string) *Kubefan {
	t.Helper()
	return c.startKubefan(t, address, "/readyz", append(args, "--kubeconfig", c.Kubeconfig))
}

// StartKubefanAs runs kubefan serve as the user of a kubeconfig, and waits only until it runs:
// without a right to read a resource it does not get ready.
func (c *Cluster) StartKubefanAs(t testing.TB, kubeconfig string, args ...string) *Kubefan {
	t.Helper()
	return c.startKubefan(t, "", "/livez", append(args, "--kubeconfig", kubeconfig))
}

func (c *Cluster) startKubefan(t testing.TB, address, ready string, args []string) *Kubefan {
	t.Helper()
	ports := freePorts(t, 2)
	if address == "" {
		address = fmt.Sprintf("127.0.0.1:%d", ports[0])
	}
	admin := fmt.Sprintf("127.0.0.1:%d", ports[1])
	started := c.run(t, c.kubefan, "kubefan.log", append([]string{"serve", "--listen", address, "--admin-listen", admin}, args...)...)
	t.Cleanup(started.kill)
	c.until(t, "kubefan is ready", started, func() bool {
		response, err := (&http.Client{Timeout: askAtMost}).Get("http://" + admin + ready)
		if err != nil {
			return false
		}
		defer func() { _ = response.Body.Close() }()
		return response.StatusCode == http.StatusOK
	})
	return &Kubefan{Address: address, process: started}
}

// Kill ends kubefan by SIGKILL.
func (k *Kubefan) Kill() { k.process.kill() }

// Signal sends a signal to kubefan.
func (k *Kubefan) Signal(signal os.Signal) { _ = k.process.command.Process.Signal(signal) }

func (c *Cluster) credentials(t testing.TB) {
	t.Helper()
	// The second certificate is the one that signed the first.
	chain, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, []string{"localhost"})
	if err != nil {
		t.Fatal(err)
	}
	authority := chain
	for rest := chain; len(rest) > 0; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if parsed, err := x509.ParseCertificate(block.Bytes); err == nil && parsed.IsCA {
			authority = pem.EncodeToMemory(block)
		}
	}
	c.CAFile = c.write(t, "ca.pem", string(authority))
	c.CertFile, c.KeyFile = c.write(t, "server.pem", string(chain)), c.write(t, "server-key.pem", string(key))
	c.TokenFile = c.write(t, "token", adminToken+"\n")
	c.write(t, "users.csv", adminToken+",admin,admin,system:masters\n"+NobodyToken+",nobody,nobody\n")
}

func (c *Cluster) write(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(c.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// run starts a program whose output goes to a file.
func (c *Cluster) run(t testing.TB, program, log string, args ...string) *process {
	t.Helper()
	file, err := os.OpenFile(filepath.Join(c.dir, log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(program, args...)
	command.Stdout, command.Stderr = file, file
	command.SysProcAttr = endsWithParent()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	made := &process{command: command, done: make(chan struct{})}
	go func() {
		defer close(made.done)
		_ = command.Wait()
		_ = file.Close()
	}()
	return made
}

func (p *process) kill() {
	_ = p.command.Process.Kill()
	<-p.done
}

// until waits for a program to get ready, and fails with the end of its log if it ends instead.
func (c *Cluster) until(t testing.TB, what string, program *process, is func() bool) {
	t.Helper()
	ticker, limit := time.NewTicker(pollInterval), time.After(readyAtMost)
	defer ticker.Stop()
	for !is() {
		select {
		case <-ticker.C:
		case <-program.done:
			t.Fatal("not to be: ", what, ": it ended\n", c.logs())
		case <-limit:
			t.Fatal("not in time: ", what, "\n", c.logs())
		}
	}
}

func (c *Cluster) logs() string {
	var ends []string
	for _, name := range []string{"etcd.log", "kube-apiserver.log", "kubefan.log"} {
		text, _ := os.ReadFile(filepath.Join(c.dir, name))
		ends = append(ends, name, string(text[max(0, len(text)-2000):]))
	}
	return strings.Join(ends, "\n")
}

// freePorts returns ports that were free a moment ago, all different.
func freePorts(t testing.TB, count int) []int {
	t.Helper()
	var ports []int
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		// At the end: a port that is free again could be the next one.
		defer func() { _ = listener.Close() }()
		ports = append(ports, listener.Addr().(*net.TCPAddr).Port)
	}
	return ports
}
