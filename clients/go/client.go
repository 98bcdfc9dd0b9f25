package kubefan

import (
	"cmp"
	"context"
	"errors"
	"io"
	"runtime/debug"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"kubefan.dev/clients/go/internal/fallback"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

const (
	// With HTTP/2's default of 64 KiB a snapshot arrives at a quarter of the speed.
	streamWindowBytes = 4 << 20
	// More than one stream's window, so that a stream that is not read does not block the others.
	connectionWindowBytes = 16 << 20
	modulePath            = "kubefan.dev/clients/go"
	// retryAtMost is the wait of a call for a connection while the last attempt has failed.
	retryAtMost = time.Second
	// serviceConfig spreads clients over the replicas behind a name, each with one connection.
	serviceConfig = `{"loadBalancingConfig":[{"pick_first":{"shuffleAddressList":true}}]}`
)

// Client is a client of one kubefan. It may be used from several goroutines, which share the
// connection.
type Client struct {
	// dial makes a connection, and conn has the present one.
	dial           func() (*grpc.ClientConn, error)
	conn           atomic.Pointer[grpc.ClientConn]
	address        string
	token          *token
	connectTimeout time.Duration
	// fallback is nil without an apiserver.
	fallback *fallbackReads
}

// ObjectList is a complete list.
type ObjectList struct {
	// ResourceVersion is the version of the state. A watch may start from it. See
	// WatchItem.ResumeVersion.
	ResourceVersion string
	// Cluster is the identity of the cluster that the version is from, for WatchOptions.Cluster.
	Cluster string
	// Resource is the resource as kubefan resolved it.
	Resource *api.ResolvedResource
	// Objects are in key order: namespace, then name.
	Objects []*api.Object
}

// ReadOptions are the options of a list or a get.
type ReadOptions struct {
	// ResourceVersion: the state must not be older than this. kubefan waits up to 3 s for it. Empty
	// accepts any state.
	ResourceVersion string
	// Projection is the parts of each object that are sent.
	Projection Projection
	// Encoding is how objects are encoded: EncodingJSON or EncodingProtobuf. A Get also takes the
	// encoding of a watch, and returns the bytes that the watch has. A list is never compressed, so
	// kubefan refuses the others there.
	Encoding Encoding
}

// check refuses options that no read can have.
func (o ReadOptions) check(address string) error {
	return cmp.Or(o.Encoding.check(address, "ReadOptions.Encoding"), o.Projection.check(address))
}

// Connect connects to host:port, http://host:port, https://host:port, dns:host:port or unix:/path.
// It fails with an *Error if a file of the options cannot be read, or if there is no connection
// within ConnectTimeout. With an Apiserver, a kubefan that cannot be reached is no error. Call
// Close at the end.
func Connect(ctx context.Context, address string, options Options) (*Client, error) {
	client, err := ConnectLazy(address, options)
	if err != nil {
		return nil, err
	}
	// A token file that cannot be read is a mistake of the caller, which no server has to answer for.
	if _, err := client.token.value(); err != nil {
		_ = client.Close()
		return nil, &Error{Address: address, Code: codes.InvalidArgument, Message: err.Error()}
	}
	if err := client.reach(ctx); err != nil {
		if client.fallback != nil && ctx.Err() == nil && client.fallback.note(ctx, form{}, errorOf(err, address), 0) == verdictAway {
			// Reads go to the apiserver.
			return client, nil
		}
		_ = client.Close()
		return nil, err
	}
	return client, nil
}

// ConnectLazy is like Connect, but connects with the first call. The server may start later: a watch
// waits for it, and for a token file that is not there yet.
func ConnectLazy(address string, options Options) (*Client, error) {
	options = options.withDefaults()
	wrong := func(err error) error {
		return &Error{Address: address, Code: codes.InvalidArgument, Message: err.Error()}
	}
	where, err := parseAddress(address)
	if err != nil {
		return nil, wrong(err)
	}
	transport, err := transportOf(where, options)
	if err != nil {
		return nil, wrong(err)
	}
	token, err := newToken(options.Token, options.TokenFile)
	if err != nil {
		return nil, wrong(err)
	}
	dialOptions := append([]grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithUserAgent("kubefan-go/" + version()),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithInitialWindowSize(streamWindowBytes),
		grpc.WithInitialConnWindowSize(connectionWindowBytes),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(options.MessageBytesMax)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: options.KeepaliveInterval, Timeout: options.KeepaliveTimeout}),
	}, options.DialOptions...)
	made := &Client{
		dial:    func() (*grpc.ClientConn, error) { return grpc.NewClient(where.target, dialOptions...) },
		address: address, token: token, connectTimeout: options.ConnectTimeout,
	}
	conn, err := made.dial()
	if err != nil {
		return nil, wrong(err)
	}
	made.conn.Store(conn)
	if options.Apiserver != nil {
		made.fallback = newFallback(made, options, fallback.RealClock{})
	}
	return made, nil
}

// Close ends the connection and with it all watches of kubefan. With an Apiserver it also ends
// those at the apiserver, and the reads that wait for a start: each watch returns context.Canceled.
func (c *Client) Close() error {
	if c.fallback != nil {
		c.fallback.monitor.Close()
		// No other connection follows.
		c.fallback.redialing.Lock()
		defer c.fallback.redialing.Unlock()
	}
	return c.Conn().Close()
}

// Address is the one that the caller gave to Connect.
func (c *Client) Address() string { return c.address }

// Conn is the connection, for calls that this package does not have, such as gRPC health. With an
// Apiserver, a client whose kubefan hangs replaces its connection.
func (c *Client) Conn() *grpc.ClientConn { return c.conn.Load() }

func (c *Client) service() api.WatchServiceClient { return api.NewWatchServiceClient(c.Conn()) }

// List returns the state at one version.
func (c *Client) List(ctx context.Context, target Target, options ReadOptions) (*ObjectList, error) {
	list := &ObjectList{}
	err := c.ListChunks(ctx, target, options, func(chunk *api.ListResponse) error {
		if list.ResourceVersion == "" {
			list.Cluster, list.Resource = chunk.GetCluster(), chunk.GetResource()
		}
		list.ResourceVersion = chunk.GetResourceVersion()
		list.Objects = append(list.Objects, chunk.GetObjects()...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// ListChunks is like List, but calls each with one chunk of about 256 KiB at a time, all at the same
// version, as ObjectList.ResourceVersion has it. Only the first chunk has the resource and the
// cluster. An error of each ends the list.
func (c *Client) ListChunks(
	ctx context.Context, target Target, options ReadOptions, each func(*api.ListResponse) error,
) error {
	if err := options.check(c.address); err != nil {
		return err
	}
	version, _ := sentVersion(options.ResourceVersion)
	request := &api.ListRequest{
		Target: target.message(), ResourceVersion: version, Projection: options.Projection.message(false),
		Encoding: options.Encoding.message(),
	}
	read := &eitherRead{form: formOf("list", target)}
	read.send = func(ctx context.Context) error {
		ctx, answered, cancel := c.answerLimit(ctx)
		defer cancel()
		stream, err := c.service().List(ctx, request)
		if err != nil {
			return c.limitedError(ctx, err)
		}
		for count := 0; ; count++ {
			chunk, err := stream.Recv()
			if count == 0 {
				answered()
				c.learn(stream.Header())
			}
			err = c.limitedError(ctx, err)
			switch {
			case errors.Is(err, io.EOF) && count > 0:
				return nil
			case errors.Is(err, io.EOF):
				return c.protocol("a list without a resource version")
			case err != nil:
				return err
			case chunk.GetResourceVersion() == "":
				return c.protocol("a list without a resource version")
			}
			chunk.ResourceVersion = receivedVersion(chunk.GetResourceVersion(), chunk.GetVersionIsComplete())
			c.remember(target, chunk.GetResource())
			read.isPartial = true
			if err := each(chunk); err != nil {
				return err
			}
		}
	}
	read.direct = func(ctx context.Context) error {
		list, err := c.fallback.apiserver.List(ctx, c.fallback.read(target, options.Projection))
		if err != nil {
			return err
		}
		return each(&api.ListResponse{
			ResourceVersion: list.ResourceVersion, Objects: list.Objects, Resource: list.Resource,
		})
	}
	return c.readEither(ctx, read)
}

// Get returns one object. Target.Name is required, and so is Target.Namespace for namespaced
// resources.
func (c *Client) Get(ctx context.Context, target Target, options ReadOptions) (*api.GetResponse, error) {
	if err := options.check(c.address); err != nil {
		return nil, err
	}
	version, _ := sentVersion(options.ResourceVersion)
	request := &api.GetRequest{
		Target: target.message(), ResourceVersion: version, Projection: options.Projection.message(false),
		Encoding: options.Encoding.message(),
	}
	var response *api.GetResponse
	read := &eitherRead{form: formOf("get", target)}
	read.send = func(ctx context.Context) (err error) {
		ctx, _, cancel := c.answerLimit(ctx)
		defer cancel()
		var header metadata.MD
		response, err = c.service().Get(ctx, request, grpc.Header(&header))
		c.learn(header, err)
		if err == nil && response.GetObject() == nil {
			err = c.protocol("a get without an object")
		}
		return c.limitedError(ctx, err)
	}
	read.direct = func(ctx context.Context) error {
		object, err := c.fallback.apiserver.Get(ctx, c.fallback.read(target, options.Projection))
		response = &api.GetResponse{Object: object}
		return err
	}
	if err := c.readEither(ctx, read); err != nil {
		return nil, err
	}
	return response, nil
}

// ListResources returns the state of each cache, ordered by name.
func (c *Client) ListResources(ctx context.Context) ([]*api.ResourceStatus, error) {
	var response *api.ListResourcesResponse
	err := c.call(ctx, func(ctx context.Context) (err error) {
		response, err = c.service().ListResources(ctx, &api.ListResourcesRequest{})
		return err
	})
	return response.GetResources(), err
}

// call sends a request with the token; once more if kubefan refuses it and the file has another.
func (c *Client) call(ctx context.Context, send func(context.Context) error) error {
	for attempt := 0; ; attempt++ {
		authorized, sent, err := c.authorize(ctx)
		if err != nil {
			return err
		}
		err = c.connection(ctx)
		if err == nil {
			err = send(authorized)
		}
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		failed := errorOf(err, c.address)
		if failed.Code != codes.Unauthenticated || attempt > 0 || !c.token.replacement(sent) {
			return failed
		}
	}
}

// authorize adds the token to a call. An unreadable file may be readable later.
func (c *Client) authorize(ctx context.Context) (authorized context.Context, sent string, err error) {
	sent, err = c.token.value()
	if err != nil {
		return nil, "", &Error{Address: c.address, Code: codes.Unavailable, Message: err.Error()}
	}
	if sent == "" {
		return ctx, "", nil
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", sent), sent, nil
}

func (c *Client) protocol(problem string) *Error {
	return protocolError(problem, c.address)
}

// reach waits for a connection, and returns why there is none.
func (c *Client) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.connectTimeout)
	defer cancel()
	if c.awaitConnection(ctx) {
		return nil
	}
	// The call fails with the error of the connection.
	_, err := grpc_health_v1.NewHealthClient(c.Conn()).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil && errorOf(err, c.address).Code != codes.Unimplemented {
		return errorOf(err, c.address)
	}
	return nil
}

// awaitConnection makes one attempt to connect, without the channel's own delay: the caller has a
// delay of its own. It returns whether there is a connection. A channel that has failed stays so
// until it has a connection (gRFC A62), so the end of a further attempt does not show: it gets at
// most retryAtMost, and continues in the background.
func (c *Client) awaitConnection(ctx context.Context) bool {
	conn, atMost := c.Conn(), c.connectTimeout
	if conn.GetState() == connectivity.TransientFailure {
		atMost = min(atMost, retryAtMost)
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	conn.ResetConnectBackoff()
	for tried := false; ; {
		state := conn.GetState()
		switch state {
		case connectivity.Ready:
			return true
		case connectivity.Idle:
			// The attempt may have failed before the next look.
			tried = true
			conn.Connect()
		case connectivity.Connecting:
			tried = true
		case connectivity.TransientFailure, connectivity.Shutdown:
			if tried || state == connectivity.Shutdown {
				return false
			}
			tried = true
		}
		if !conn.WaitForStateChange(ctx, state) {
			return false
		}
	}
}

// version is the version of this module in the program; "unknown" if it was built from a folder.
func version() string {
	info, found := debug.ReadBuildInfo()
	if !found {
		return "unknown"
	}
	for _, module := range info.Deps {
		if module.Path == modulePath && module.Replace == nil && module.Version != "" {
			return module.Version
		}
	}
	return "unknown"
}
