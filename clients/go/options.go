package kubefan

import (
	"cmp"
	"log/slog"
	"time"

	"google.golang.org/grpc"
)

// Settings with which a pod of the cluster connects.
const (
	// InClusterAddress is kubefan's Service for gRPC clients, as docs/install.md makes it: the name
	// has an address for each replica, and the client chooses.
	InClusterAddress = "https://kubefan-headless.kubefan.svc:7443"
	// InClusterCAFile is where a pod mounts ca.crt of the ConfigMap "kubefan-ca".
	InClusterCAFile = "/etc/kubefan/ca.crt"
	// ServiceAccountTokenFile is the token that Kubernetes mounts into a pod. The kubelet renews it.
	ServiceAccountTokenFile = "/var/run/secrets/kubernetes.io/serviceaccount/token"
)

const (
	defaultConnectTimeout    = 10 * time.Second
	defaultMessageBytesMax   = 64 << 20
	defaultKeepaliveInterval = 30 * time.Second
	defaultKeepaliveTimeout  = 15 * time.Second
)

// Options are the settings of a connection. The zero value is ready to use.
type Options struct {
	// CAFile is a PEM file with the CAs of kubefan's certificate. It replaces the system's CAs, and
	// is read again for each connection, so a new CA needs no restart. Only for https:// addresses.
	CAFile string
	// CertFile and KeyFile are PEM files with a client certificate and its key. They are read again
	// for each connection. Only for https:// addresses.
	CertFile string
	KeyFile  string
	// ServerName is the name that kubefan's certificate must have, instead of the host of the address.
	// Only for https:// addresses.
	ServerName string
	// Token is a bearer token, sent with each call. Only for https:// addresses and Unix sockets.
	// TokenFile takes precedence.
	Token string
	// TokenFile is a file with a bearer token. It is read again after 10 s, and at once when kubefan
	// refuses the token or ends a stream because of it. A watch then resumes.
	TokenFile string
	// ConnectTimeout limits the wait for a connection. Default: 10 s. After an attempt that failed, a
	// call waits at most 1 s for the next one.
	ConnectTimeout time.Duration
	// MessageBytesMax is the longest message accepted, in bytes. Default: 64 MiB.
	MessageBytesMax int
	// KeepaliveInterval is the silence after which a connection gets an HTTP/2 PING. Default: 30 s,
	// minimum: 10 s.
	KeepaliveInterval time.Duration
	// KeepaliveTimeout is the wait for the answer to a PING. Without it the connection counts as
	// dead, and a watch reconnects. Default: 15 s.
	KeepaliveTimeout time.Duration
	// DialOptions are added to those of the client, such as interceptors for metrics. Do not set
	// credentials here.
	DialOptions []grpc.DialOption

	// Apiserver, if set, is read from while kubefan is away, within the budget: see package
	// apiserver and docs/clients-fallback.md. The defaults become ConnectTimeout 3 s,
	// KeepaliveInterval 10 s and KeepaliveTimeout 4 s. kubefan's health is asked after 4 s of
	// silence on all streams, so that a kubefan that hangs is noticed within 8 s.
	Apiserver Apiserver
	// Budget limits the reads at the apiserver. A budget in kubefan's answers replaces it.
	Budget Budget
	// Logger gets a line for each change between kubefan and the apiserver. Default: slog.Default.
	Logger *slog.Logger
	// OnSide, if set, is called for each change of kubefan's state, with the reason. It must not
	// block, nor call the client.
	OnSide func(side Side, reason string)
	// OnStart, if set, is called for each start at the apiserver, with the time that it has waited.
	// It must not block.
	OnStart func(waited time.Duration)
}

// InCluster returns the options of a program in a pod, for InClusterAddress: the token of its
// service account, and the CA in caFile. Empty means InClusterCAFile, never the CAs of the system:
// for those, set only Options.TokenFile, to ServiceAccountTokenFile.
func InCluster(caFile string) Options {
	if caFile == "" {
		caFile = InClusterCAFile
	}
	return Options{CAFile: caFile, TokenFile: ServiceAccountTokenFile}
}

func (o Options) withDefaults() Options {
	if o.Apiserver != nil {
		o.ConnectTimeout = cmp.Or(o.ConnectTimeout, 3*time.Second)
		o.KeepaliveInterval = cmp.Or(o.KeepaliveInterval, 10*time.Second)
		o.KeepaliveTimeout = cmp.Or(o.KeepaliveTimeout, 4*time.Second)
	}
	if o.ConnectTimeout <= 0 {
		o.ConnectTimeout = defaultConnectTimeout
	}
	if o.MessageBytesMax <= 0 {
		o.MessageBytesMax = defaultMessageBytesMax
	}
	if o.KeepaliveInterval <= 0 {
		o.KeepaliveInterval = defaultKeepaliveInterval
	}
	if o.KeepaliveTimeout <= 0 {
		o.KeepaliveTimeout = defaultKeepaliveTimeout
	}
	return o
}
