package transport

import (
	"errors"
	"net/url"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

const (
	// InClusterAddress is kubefan's Service, as docs/install.md makes it.
	InClusterAddress = "https://kubefan.kubefan.svc"
	// InClusterCAFile is where a pod mounts ca.crt of the ConfigMap "kubefan-ca".
	InClusterCAFile = "/etc/kubefan/ca.crt"
)

// Options are the settings of Attach. The zero value is for a pod: InClusterAddress,
// InClusterCAFile, and a fallback within the default Budget.
//
// The Proxy and the Dial of the configuration are also used for kubefan. A Dial that leads to the
// apiserver whatever it is asked for makes kubefan unreachable.
type Options struct {
	// Address is kubefan's data port: https://host:port, or http://host:port, to which no
	// credentials are sent. A path is put before that of each request. Default: InClusterAddress.
	Address string
	// CAFile is a PEM file with the CAs of kubefan's certificate. It is read again for each
	// connection. Default: InClusterCAFile without an Address; with one the CAs of the system.
	CAFile string
	// CAData has the CAs of kubefan's certificate instead of a file.
	CAData []byte
	// ServerName is the name that kubefan's certificate must have, instead of the host of the
	// address.
	ServerName string
	// Fallback decides about reads while kubefan is away.
	Fallback Fallback
	// Budget limits the fallback of all programs together. A budget in kubefan's answers replaces
	// it.
	Budget Budget
	// Logger gets a line for each change of the server that reads go to. Default: klog.
	Logger logr.Logger
}

// Fallback is what happens to reads while kubefan is away.
type Fallback int

const (
	// FallbackPaced sends them to the apiserver, within the budget.
	FallbackPaced Fallback = iota
	// FallbackNever lets them wait until kubefan is back, or until their context ends.
	FallbackNever
)

func (o Options) withDefaults() Options {
	if o.Address == "" {
		o.Address = InClusterAddress
		if o.CAFile == "" && len(o.CAData) == 0 {
			o.CAFile = InClusterCAFile
		}
	}
	if o.Logger.IsZero() {
		o.Logger = klog.Background()
	}
	return o
}

var errAddress = errors.New("not an address of kubefan's Kubernetes API; write it like https://host:port")

// url reads the address, and refuses options that do not fit it.
func (o Options) url() (*url.URL, error) {
	parsed, err := url.Parse(o.Address)
	if err != nil || parsed.Host == "" || parsed.User != nil || parsed.RawQuery != "" || parsed.Fragment != "" {
		return nil, errAddress
	}
	hasTLSOptions := o.CAFile != "" || len(o.CAData) > 0 || o.ServerName != ""
	switch {
	case parsed.Scheme == "http" && hasTLSOptions:
		return nil, errors.New("a CA and a server name need an https:// address")
	case parsed.Scheme != "http" && parsed.Scheme != "https":
		return nil, errAddress
	case o.CAFile != "" && len(o.CAData) > 0:
		return nil, errors.New("CAFile and CAData exclude each other")
	}
	parsed.Path = strings.TrimSuffix(parsed.Path, "/")
	return parsed, nil
}
