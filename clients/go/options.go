package kubefan

import (
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
