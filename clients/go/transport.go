package kubefan

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// endpoint is where an address leads.
type endpoint struct {
	// target is the name that the gRPC library resolves.
	target string
	tls    bool
	unix   bool
}

var errAddress = errors.New("not an address of kubefan; write it like 127.0.0.1:7443, https://host:port, " +
	"dns:host:port or unix:/path")

// parseAddress reads host:port, http://…, https://…, dns:host:port and unix:/path. A port is
// required: the defaults of http and https are not those of kubefan's gRPC, so they would lead to
// another server.
func parseAddress(address string) (endpoint, error) {
	if path, found := strings.CutPrefix(address, "unix:"); found {
		if path == "" {
			return endpoint{}, errAddress
		}
		return endpoint{target: address, unix: true}, nil
	}
	made := endpoint{}
	host := address
	if name, found := strings.CutPrefix(address, "dns:"); found {
		host = strings.TrimLeft(name, "/")
	} else if strings.Contains(address, "://") {
		parsed, err := url.Parse(address)
		if err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || strings.Trim(parsed.Path, "/") != "" {
			return endpoint{}, errAddress
		}
		made.tls, host = parsed.Scheme == "https", parsed.Host
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil || name == "" || strings.ContainsAny(host, " /") {
		return endpoint{}, errAddress
	}
	if number, err := strconv.ParseUint(port, 10, 16); err != nil || number == 0 {
		return endpoint{}, errors.New("the part after the host is not a port; write it like 127.0.0.1:7443")
	}
	made.target = "dns:///" + host
	return made, nil
}

// transportOf returns the credentials of the connection, and refuses options that would send a
// secret where others can read it.
func transportOf(where endpoint, options Options) (credentials.TransportCredentials, error) {
	if !where.tls {
		switch {
		case options.CAFile != "":
			return nil, errors.New("a CA file needs an https:// address")
		case options.CertFile != "" || options.KeyFile != "":
			return nil, errors.New("a client certificate needs an https:// address")
		case options.ServerName != "":
			return nil, errors.New("a server name needs an https:// address")
		case (options.Token != "" || options.TokenFile != "") && !where.unix:
			return nil, errors.New("a token is sent only over TLS or to a Unix socket, because others could read it on " +
				"the way; use an https:// address (kubefan serve --tls-cert-file), or leave the token out")
		}
		return insecure.NewCredentials(), nil
	}
	if (options.CertFile == "") != (options.KeyFile == "") {
		return nil, errors.New("a client certificate needs both CertFile and KeyFile")
	}
	made := &fileTLS{options: options, serverName: options.ServerName}
	// A file that cannot be read is a mistake, which is best told now.
	if _, err := made.current(); err != nil {
		return nil, err
	}
	return made, nil
}

// fileTLS reads its files for each handshake, because certificates are renewed while a program runs.
type fileTLS struct {
	options    Options
	serverName string
}

func (f *fileTLS) current() (credentials.TransportCredentials, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: f.serverName}
	if file := f.options.CAFile; file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("CA file: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("CA file %s: no certificate in it", file)
		}
	}
	if file := f.options.CertFile; file != "" {
		pair, err := tls.LoadX509KeyPair(file, f.options.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("client certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

func (f *fileTLS) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	current, err := f.current()
	if err != nil {
		return nil, nil, err
	}
	return current.ClientHandshake(ctx, authority, conn)
}

func (f *fileTLS) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these are the credentials of a client")
}

func (f *fileTLS) Info() credentials.ProtocolInfo {
	//lint:ignore SA1019 gRPC still takes the authority from it, as from its own credentials.
	return credentials.ProtocolInfo{SecurityProtocol: "tls", ServerName: f.serverName}
}

func (f *fileTLS) Clone() credentials.TransportCredentials {
	return &fileTLS{options: f.options, serverName: f.serverName}
}

func (f *fileTLS) OverrideServerName(name string) error {
	f.serverName = name
	return nil
}
