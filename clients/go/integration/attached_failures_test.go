package integration

import (
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"kubefan.dev/clients/go/internal/cluster"
	"kubefan.dev/clients/go/transport"
)

// How an attached program goes on through each failure, beside informers without kubefan: the
// stores equal the apiserver's state, each event came once, and no write failed.

// alone is the budget that kubefan tells a program which has it for itself.
var alone = transport.Budget{Clients: 1, StartsPerSecond: 50}

// scene is an attached program, and informers that read straight.
type scene struct {
	*testing.T
	control *cluster.Cluster
	fan     *cluster.Kubefan
	traffic *traffic
	// attached and straight have the same informers.
	attached, straight *watcher
	manager            manager.Manager
	// load is that of the program, and directly that of a client without kubefan.
	load, directly         *load
	stopLoad, stopDirectly func()
	partition              *partition
	// struckAt is the time of the failure.
	struckAt time.Time
	// requests is what the apiserver had counted before.
	requests int
}

// fault is a failure of kubefan.
type fault struct {
	name   string
	strike func(*scene)
	// isBehindProxy: the program reaches kubefan through the scene's partition.
	isBehindProxy bool
}

var faults = []fault{
	{name: "kubefan is killed", strike: func(s *scene) { s.fan.Kill() }},
	{name: "kubefan hangs", strike: func(s *scene) { s.fan.Hang(s.T) }},
	{name: "kubefan is cut off", isBehindProxy: true, strike: func(s *scene) { s.partition.begin() }},
	{name: "a server answers 503", strike: func(s *scene) {
		s.fan.Kill()
		unavailable(s.T, s.control, s.fan.Address)
	}},
	{name: "kubefan has another CA", strike: func(s *scene) {
		s.fan.Kill()
		certificate, _ := otherCertificate(s.T)
		s.control.StartKubefan(s.T, s.fan.Address, "--resource", resourceNames(),
			"--tls-cert-file", certificate, "--tls-private-key-file", certificate)
	}},
}

// TestAnAttachedProgramGoesOn prints a table of the faults. With KUBEFAN_TEST_FAULTS=all each fault
// of kubefan also comes with a restart of the apiserver, otherwise only the first one.
func TestAnAttachedProgramGoesOn(t *testing.T) {
	control := cluster.Start(t)
	createCustomKinds(t, control)
	found := &table{}
	t.Cleanup(func() { found.print(t) })
	for _, each := range faults {
		t.Run(each.name, func(t *testing.T) {
			s := newScene(t, control, control.StartKubefan(t, "", fanArgs(control)...), control.CAFile, each.isBehindProxy)
			s.strike(func() { each.strike(s) })
			s.isWatchedAt(true)
			s.goesOn()
			if each.name == "kubefan is killed" {
				s.reports("while kubefan is away")
				s.comesBack()
			}
			s.endsEqual()
			s.hadEachEventOnce()
			found.add(s, each.name)
		})
		if os.Getenv("KUBEFAN_TEST_FAULTS") != "all" && each.name != "kubefan is killed" {
			continue
		}
		name := each.name + ", and the apiserver restarts"
		t.Run(name, func(t *testing.T) {
			s := newScene(t, control, control.StartKubefan(t, "", fanArgs(control)...), control.CAFile, each.isBehindProxy)
			s.loseApiserver(func() { each.strike(s) })
			s.regainApiserver()
			s.isWatchedAt(true)
			s.endsEqual()
			found.add(s, name)
		})
	}
	t.Run("the program has a wrong CA from the start", func(t *testing.T) {
		_, other := otherCertificate(t)
		s := newScene(t, control, control.StartKubefan(t, "", fanArgs(control)...), other, false)
		s.isWatchedAt(true)
		s.endsEqual()
		s.hadEachEventOnce()
		found.add(s, "the program has a wrong CA from the start")
	})
	for _, access := range []string{"authorized", "authorized-cache-only"} {
		t.Run("a cache is forbidden, "+access, func(t *testing.T) {
			allowAllBut(t, control, "configmaps", "kind0s")
			limited := control.KubeconfigOf(t, cluster.NobodyToken)
			fan := control.StartKubefanAs(t, limited, append(fanArgs(control), "--access", access)...)
			s := newScene(t, control, fan, control.CAFile, false)
			s.endsEqual()
			s.hadEachEventOnce()
			found.add(s, "a cache is forbidden, "+access)
		})
	}
	// After a restart the apiserver no longer has the versions of its watches, and answers 410.
	t.Run("the apiserver restarts", func(t *testing.T) {
		s := newScene(t, control, control.StartKubefan(t, "", fanArgs(control)...), control.CAFile, false)
		s.loseApiserver(func() {})
		s.readsGoOn()
		s.regainApiserver()
		s.endsEqual()
		found.add(s, "the apiserver restarts")
	})
}

// comesBack starts kubefan again.
func (s *scene) comesBack() {
	back := time.Now()
	s.control.StartKubefan(s.T, s.fan.Address, fanArgs(s.control)...)
	s.struckAt = back
	s.isWatchedAt(false)
	s.goesOn()
}

func fanArgs(control *cluster.Cluster) []string {
	return []string{"--resource", resourceNames(), "--tls-cert-file", control.CertFile, "--tls-private-key-file", control.KeyFile}
}

// newScene starts a program that is attached to kubefan, and waits until it writes and is told of
// it.
func newScene(t *testing.T, control *cluster.Cluster, fan *cluster.Kubefan, caFile string, isBehindProxy bool) *scene {
	t.Helper()
	s := &scene{T: t, control: control, fan: fan, traffic: &traffic{apiserver: control.Config.Host}, struckAt: time.Now()}
	config := rest.CopyConfig(control.Config)
	config.Wrap(s.traffic.wrap)
	address := fan.Address
	if isBehindProxy {
		s.partition = startPartition(t, address)
		address = s.partition.address
	}
	if err := transport.Attach(config, transport.Options{Address: "https://" + address, CAFile: caFile, Budget: alone}); err != nil {
		t.Fatal(err)
	}
	s.attached, s.straight = watchAll(t, config), watchAll(t, control.Config)
	s.manager = startedManager(t, config)
	s.load, s.stopLoad = startLoad(t, config, "object")
	s.directly, s.stopDirectly = startLoad(t, control.Config, "direct")
	s.goesOn()
	s.requests = requestsOf(t, control)
	return s
}

// strike lets a failure happen.
func (s *scene) strike(failure func()) {
	s.struckAt = time.Now()
	failure()
}

// goesOn waits until the program has written each resource, and read.
func (s *scene) goesOn() {
	s.Helper()
	from, now := s.load.writes.Load(), time.Now()
	eventually(s.T, "the program writes and reads", func() string {
		_, reads := s.load.gap(now)
		if writes := s.load.writes.Load() - from; writes < int64(6*len(written)) || reads == 0 {
			return fmt.Sprint(writes, " writes and ", reads, " reads")
		}
		return ""
	})
}

// isWatchedAt waits until each resource is watched at the apiserver, or at kubefan.
func (s *scene) isWatchedAt(isApiserver bool) {
	s.Helper()
	eventually(s.T, "each resource is watched", func() string { return s.traffic.unwatched(isApiserver, s.struckAt) })
}

// loseApiserver lets kubefan fail too.
func (s *scene) loseApiserver(also func()) {
	s.load.isExcused.Store(true)
	s.strike(func() {
		also()
		s.control.KillAPIServer()
	})
}

func (s *scene) regainApiserver() {
	s.control.StartAPIServer(s.T)
	s.load.isExcused.Store(false)
	s.requests = 0
	s.goesOn()
}

// readsGoOn waits for answers of kubefan while the apiserver is away.
func (s *scene) readsGoOn() {
	s.Helper()
	eventually(s.T, "kubefan answers reads", func() string {
		if _, reads := s.load.gap(s.struckAt); reads < 20 {
			return fmt.Sprint(reads, " reads")
		}
		return ""
	})
}

// endsEqual ends the writes. Then all stores must have the apiserver's state, and no write may have
// failed.
func (s *scene) endsEqual() {
	s.Helper()
	s.reports("in the end")
	s.stopLoad()
	s.stopDirectly()
	if err := s.load.failed.all(); err != nil {
		s.Error("a direct client's write would not have failed: ", err)
	}
	straight, err := dynamic.NewForConfig(s.control.Config)
	if err != nil {
		s.Fatal(err)
	}
	for _, each := range resources {
		eventually(s.T, "the store of "+each.Resource+" equals the apiserver's state", func() string {
			return s.differs(straight, each)
		})
	}
	pods := &corev1.PodList{}
	eventually(s.T, "the manager's cache equals the apiserver's state", func() string {
		if err := s.manager.GetCache().List(s.Context(), pods); err != nil {
			return err.Error()
		}
		want, err := s.control.Client.CoreV1().Pods("").List(s.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		mine, theirs := map[string]string{}, map[string]string{}
		for _, pod := range pods.Items {
			mine[pod.Name] = pod.ResourceVersion
		}
		for _, pod := range want.Items {
			theirs[pod.Name] = pod.ResourceVersion
		}
		return mapsDiffer(mine, theirs)
	})
}

// differs compares the names and versions of a store with a list.
func (s *scene) differs(straight dynamic.Interface, of schema.GroupVersionResource) string {
	list, err := straight.Resource(of).List(s.Context(), metav1.ListOptions{})
	if err != nil {
		return err.Error()
	}
	mine, theirs := map[string]string{}, map[string]string{}
	for _, object := range s.attached.informers[of].GetStore().List() {
		meta := object.(metav1.Object)
		mine[meta.GetNamespace()+"/"+meta.GetName()] = meta.GetResourceVersion()
	}
	for _, object := range list.Items {
		theirs[object.GetNamespace()+"/"+object.GetName()] = object.GetResourceVersion()
	}
	return mapsDiffer(mine, theirs)
}

func mapsDiffer(mine, theirs map[string]string) string {
	if maps.Equal(mine, theirs) {
		return ""
	}
	return fmt.Sprintf("%v and %v", mine, theirs)
}

// hadEachEventOnce compares the calls of the handlers with those of the informers that read
// straight.
func (s *scene) hadEachEventOnce() {
	s.Helper()
	for _, each := range written {
		eventually(s.T, "the events of "+each.Resource, func() string {
			return s.attached.histories[each].differs(s.straight.histories[each].calls)
		})
	}
}

// reports logs figures since the failure.
func (s *scene) reports(when string) {
	gap, reads := s.load.gap(s.struckAt)
	lateness := time.Duration(0)
	for _, each := range written {
		lateness = max(lateness, s.attached.histories[each].latest(s.straight.histories[each], s.struckAt))
	}
	last := time.Duration(0)
	for _, each := range s.traffic.since(s.struckAt) {
		if each.isDirect && each.status == http.StatusOK && each.kind == "resume" {
			last = max(last, each.at.Sub(s.struckAt))
		}
	}
	s.Logf("%s: %v after the failure, longest time without an answer %v (%d answers), last watch at the apiserver after %v, "+
		"latest event %v late, reads at the apiserver %v", when, time.Since(s.struckAt).Round(time.Millisecond),
		gap.Round(time.Millisecond), reads, last.Round(time.Millisecond), lateness.Round(time.Millisecond), s.traffic.counts(s.struckAt))
}

// unavailable starts a server in the place of kubefan.
func unavailable(t *testing.T, control *cluster.Cluster, address string) {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(control.CertFile, control.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	made := &http.Server{
		Handler: http.HandlerFunc(func(writer http.ResponseWriter, _ *http.Request) {
			http.Error(writer, "no server is available", http.StatusServiceUnavailable)
		}),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}},
		ErrorLog:  log.New(io.Discard, "", 0),
	}
	go func() { _ = made.ServeTLS(listener, "", "") }()
	t.Cleanup(func() { _ = made.Close() })
}

// otherCertificate returns a file with a certificate for loopback and its key, and one with its CA.
func otherCertificate(t *testing.T) (file, authority string) {
	t.Helper()
	chain, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	file, authority = t.TempDir()+"/pair.pem", t.TempDir()+"/ca.pem"
	for path, text := range map[string][]byte{file: append(chain, key...), authority: chain} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return file, authority
}

// allowAllBut lets kubefan, as the user without rights, read all resources but some.
func allowAllBut(t *testing.T, control *cluster.Cluster, forbidden ...string) {
	t.Helper()
	rules := []rbacv1.PolicyRule{}
	for _, each := range resources {
		if !strings.Contains(" "+strings.Join(forbidden, " ")+" ", " "+each.Resource+" ") {
			rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{each.Group}, Resources: []string{each.Resource}, Verbs: []string{"get", "list", "watch"}})
		}
	}
	reads := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reads-most"}, Rules: rules}
	if _, err := control.Client.RbacV1().ClusterRoles().Create(t.Context(), reads, metav1.CreateOptions{}); ignoreMissing(err) != nil {
		t.Fatal(err)
	}
	for _, role := range []string{reads.Name, "system:auth-delegator"} {
		bind(t, control.Client, role)
	}
}

func bind(t *testing.T, client kubernetes.Interface, role string) {
	t.Helper()
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubefan-" + strings.ReplaceAll(role, ":", "-")},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "nobody"}},
	}
	if _, err := client.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); ignoreMissing(err) != nil {
		t.Fatal(err)
	}
}
