//! A client of one kubefan: the connection, and the calls that end by themselves (list, get,
//! list_resources).

use std::{
    fmt,
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use tonic::{
    Code, Request, Response, Status,
    codegen::http::{HeaderValue, header::AUTHORIZATION},
    metadata::{MetadataMap, MetadataValue},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use super::{addresses::Connector, projection::Projection};
use crate::{
    authorities,
    budget::{self, FallbackBudget, NamedBudget},
    error::{ClientError, root_cause},
    token::{SERVICE_ACCOUNT, Token},
    version,
};
use kubefan_common::encoding::Encoding;
use kubefan_common::names::Resolve;
use kubefan_common::proto::v1alpha1::{
    self, GetFreshnessRequest, GetFreshnessResponse, GetRequest, GetResponse, ListRequest, ListResourcesRequest,
    ListResponse, Object, ResolvedResource, ResourceStatus, Target, watch_service_client::WatchServiceClient,
};

/// With HTTP/2's default of 64 KiB a snapshot arrives at a quarter of the speed.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// More than one stream's window, so that a stream that is not read does not block the others.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Large frames need fewer system calls on both sides.
const FRAME_BYTES_MAX: u32 = 1 << 20;

/// The address of kubefan in its own cluster, as the chart installs it. The name has an address
/// for each replica.
pub const IN_CLUSTER_ADDRESS: &str = "https://kubefan-headless.kubefan.svc:7443";
/// Path at which a pod mounts `ca.crt` of the ConfigMap `kubefan-ca`.
const IN_CLUSTER_CA_FILE: &str = "/etc/kubefan/ca.crt";

/// A client certificate and its key, in PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The certificate, with those between it and the CA.
    pub certificate_file: PathBuf,
    /// Private key of the certificate.
    pub key_file: PathBuf,
}

/// Connection settings.
#[derive(Clone)]
pub struct ClientOptions {
    /// PEM file with the CA that signed kubefan's certificate. Replaces the system's CAs. Only for
    /// `https://` addresses.
    pub ca_file: Option<PathBuf>,
    /// PEM files with a client certificate and its key. Only for `https://` addresses.
    pub client_certificate: Option<ClientCertificate>,
    /// The name that kubefan's certificate must have, instead of the host of the address. Only for
    /// `https://` addresses.
    pub server_name: Option<String>,
    /// A bearer token, sent with each call. Only for `https://` addresses and Unix sockets.
    /// `token_file` takes precedence.
    pub token: Option<String>,
    /// A file with a bearer token, as [`Self::token`]. It is read again after 10 s, and at once
    /// when kubefan refuses the token or ends a stream because of it. A watch then resumes.
    pub token_file: Option<PathBuf>,
    /// Limit for establishing a connection. Default: 10 s.
    pub connect_timeout: Duration,
    /// Longest message accepted, in bytes. Default: 64 MiB. An event carries one object, and etcd
    /// limits a write to 1.5 MiB by default.
    pub message_bytes_max: usize,
    /// A silent connection gets an HTTP/2 PING after this. Default: 30 s.
    pub keepalive_interval: Duration,
    /// A PING without an answer for this long means that the connection is dead; a watch then
    /// reconnects. Default: 15 s.
    pub keepalive_timeout: Duration,
    /// Looks up the addresses of the server's name, anew for each connection. A connection uses a
    /// random one, and after a break another one if there is one. `None`: the system's resolver.
    pub resolver: Option<Arc<dyn Resolve>>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            ca_file: None,
            client_certificate: None,
            server_name: None,
            token: None,
            token_file: None,
            connect_timeout: Duration::from_secs(10),
            message_bytes_max: 64 << 20,
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(15),
            resolver: None,
        }
    }
}

impl ClientOptions {
    /// The options of a pod, for [`IN_CLUSTER_ADDRESS`]: the token of its service account, and
    /// kubefan's CA, which the pod mounts from the ConfigMap `kubefan-ca` as `/etc/kubefan/ca.crt`.
    pub fn in_cluster() -> Self {
        Self {
            ca_file: Some(IN_CLUSTER_CA_FILE.into()),
            token_file: Some(Path::new(SERVICE_ACCOUNT).join("token")),
            ..Self::default()
        }
    }
}

/// Does not show the token.
impl fmt::Debug for ClientOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ClientOptions")
            .field("ca_file", &self.ca_file)
            .field("client_certificate", &self.client_certificate)
            .field("server_name", &self.server_name)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("token_file", &self.token_file)
            .field("connect_timeout", &self.connect_timeout)
            .field("message_bytes_max", &self.message_bytes_max)
            .field("keepalive_interval", &self.keepalive_interval)
            .field("keepalive_timeout", &self.keepalive_timeout)
            .field("resolver", &self.resolver.as_ref().map(|_| "…"))
            .finish()
    }
}

/// A complete list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObjectList {
    /// The resource version of the state. A watch may start from it.
    pub resource_version: String,
    /// The objects, in key order (namespace, then name).
    pub objects: Vec<Object>,
    /// The resource as kubefan resolved it.
    pub resource: Option<ResolvedResource>,
    /// The cluster that the resource version belongs to; pass it on as
    /// [`WatchOptions::cluster`](crate::WatchOptions::cluster). Empty if it is unknown.
    pub cluster: String,
}

/// Options of a list or get. Converts from a string: the resource version.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadOptions {
    /// The state must not be older than this resource version. Empty accepts any state. kubefan
    /// waits up to 3 s for the version and then answers `UNAVAILABLE`.
    pub resource_version: String,
    /// The parts of each object to send.
    pub projection: Projection,
    /// Encoding of objects: [`Encoding::Json`] or [`Encoding::Protobuf`]. A get also takes the
    /// encoding of a watch, and returns the bytes that the watch has; kubefan refuses it for a
    /// list, which is not compressed.
    pub encoding: Encoding,
}

impl ReadOptions {
    fn encoding(&self) -> i32 {
        v1alpha1::Encoding::from(self.encoding).into()
    }
}

impl<T: AsRef<str> + ?Sized> From<&T> for ReadOptions {
    fn from(resource_version: &T) -> Self {
        Self { resource_version: resource_version.as_ref().to_owned(), ..Self::default() }
    }
}

type Service = WatchServiceClient<Channel>;

/// A client of one kubefan. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Client {
    pub(super) service: Service,
    pub(super) address: String,
    pub(super) token: Arc<Token>,
    budget: NamedBudget,
}

impl Client {
    /// Connects to `host:port`, `http://…`, `https://…`, `unix:/path` or `dns:host:port`. If the
    /// name has several addresses, such as that of a headless Service, a random one is used, and
    /// each reconnect looks the name up again and prefers another address.
    ///
    /// # Errors
    /// [`ClientError::Address`] if the address, the CA file, the token or its file is invalid, or
    /// if others could read the token on the way; [`ClientError::Unreachable`] if there is no
    /// connection within [`ClientOptions::connect_timeout`].
    pub async fn connect(address: &str, options: &ClientOptions) -> Result<Self, ClientError> {
        let endpoint = endpoint(address, options).await?;
        let token = token(address, options)?;
        let wrong = |problem| ClientError::Address { address: address.to_owned(), problem };
        token.header().await.map_err(wrong)?;
        let channel = if is_unix(address) {
            endpoint.connect().await
        } else {
            endpoint.connect_with_connector(Connector::new(options.resolver.clone())).await
        };
        let channel = channel
            .map_err(|error| ClientError::Unreachable { address: address.to_owned(), message: root_cause(&error) })?;
        Ok(Self { token: Arc::new(token), ..Self::from_channel(channel, address, options) })
    }

    /// Like [`Self::connect`], but connects on the first call. The server may start later: a watch
    /// waits for it, and for a token file that is not there yet.
    ///
    /// # Errors
    /// [`ClientError::Address`] if the address, the CA file or the token is invalid, or if others
    /// could read the token on the way.
    pub async fn connect_lazy(address: &str, options: &ClientOptions) -> Result<Self, ClientError> {
        let endpoint = endpoint(address, options).await?;
        let token = token(address, options)?;
        let channel = if is_unix(address) {
            endpoint.connect_lazy()
        } else {
            endpoint.connect_with_connector_lazy(Connector::new(options.resolver.clone()))
        };
        Ok(Self { token: Arc::new(token), ..Self::from_channel(channel, address, options) })
    }

    /// Returns a client over an existing channel. `address` is only used in error messages.
    /// [`ClientOptions::message_bytes_max`] is the only option that applies. No token is sent,
    /// because the client cannot see whether others could read it on the channel.
    pub fn from_channel(channel: Channel, address: &str, options: &ClientOptions) -> Self {
        let service = WatchServiceClient::new(channel).max_decoding_message_size(options.message_bytes_max);
        Self { service, address: address.to_owned(), token: Arc::new(Token::None), budget: NamedBudget::default() }
    }

    /// The address, as the caller gave it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the budget of requests at the apiserver that kubefan named last, in the metadata of
    /// an answer. `None` if it has named none.
    pub fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.budget.last()
    }

    /// Notes the budget in the metadata of an answer.
    pub(super) fn note_budget(&self, metadata: &MetadataMap) {
        if let Some(Ok(value)) = metadata.get(budget::HEADER).map(MetadataValue::to_str) {
            self.budget.note(value);
        }
    }

    /// Lists, and returns the chunks as they arrive: about 256 KiB each, all at the same resource
    /// version, in key order. Only the first chunk has the resource and the cluster.
    ///
    /// # Errors
    /// The error status of the call. The stream can also end with an error.
    pub async fn list_chunks(
        &self,
        target: Target,
        options: ReadOptions,
    ) -> Result<impl Stream<Item = Result<ListResponse, ClientError>> + use<>, ClientError> {
        let encoding = options.encoding();
        let projection = options.projection.message(false);
        let (resource_version, _) = version::sent(&options.resource_version);
        let request = ListRequest { target: Some(target), resource_version, projection, encoding };
        let stream = self.call(request, |mut service, call| async move { service.list(call).await }).await?;
        let address = self.address.clone();
        Ok(stream.map(move |chunk| chunk.map_err(|status| ClientError::from_status(&status, &address))))
    }

    /// Lists, and returns all objects at once.
    ///
    /// # Errors
    /// The error status of the call, or [`ClientError::Protocol`] for a response without a resource
    /// version.
    pub async fn list(&self, target: Target, options: impl Into<ReadOptions>) -> Result<ObjectList, ClientError> {
        let mut chunks = self.list_chunks(target, options.into()).await?;
        let mut list = ObjectList::default();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            if list.resource_version.is_empty() {
                list.cluster = chunk.cluster;
            }
            list.resource_version = version::received(chunk.resource_version, chunk.version_is_complete);
            list.objects.extend(chunk.objects);
            list.resource = list.resource.or(chunk.resource);
        }
        if list.resource_version.is_empty() {
            return Err(self.protocol("a list without a resource version"));
        }
        Ok(list)
    }

    /// Gets one object. `target.name` is required, and so is `target.namespace` for namespaced
    /// resources. Selectors are not allowed.
    ///
    /// # Errors
    /// The error status of the call: `NOT_FOUND` with the reason `OBJECT_NOT_FOUND` if the object
    /// does not exist.
    pub async fn get(&self, target: Target, options: impl Into<ReadOptions>) -> Result<GetResponse, ClientError> {
        let options = options.into();
        let encoding = options.encoding();
        let projection = options.projection.message(false);
        let (resource_version, _) = version::sent(&options.resource_version);
        let request = GetRequest { target: Some(target), resource_version, projection, encoding };
        let response = self.call(request, |mut service, call| async move { service.get(call).await }).await?;
        if response.object.is_none() {
            return Err(self.protocol("a get without an object"));
        }
        Ok(response)
    }

    /// Returns the state of each cache, ordered by name.
    ///
    /// # Errors
    /// The error status of the call.
    pub async fn list_resources(&self) -> Result<Vec<ResourceStatus>, ClientError> {
        let list = |mut service: Service, call| async move { service.list_resources(call).await };
        Ok(self.call(ListResourcesRequest {}, list).await?.resources)
    }

    /// Returns the version that kubefan's cache of the target has reached, and how old the
    /// apiserver's proof of it is. With `prove`, the apiserver proves it first, which may take
    /// seconds. The name and the selectors of the target are ignored.
    ///
    /// # Errors
    /// The error status of the call: `UNAVAILABLE` if the version was not proved in time.
    pub async fn get_freshness(&self, target: Target, prove: bool) -> Result<GetFreshnessResponse, ClientError> {
        let request = GetFreshnessRequest { target: Some(target), prove };
        self.call(request, |mut service, call| async move { service.get_freshness(call).await }).await
    }

    /// Sends a request with the token; once more if kubefan refuses it and the file has another.
    async fn call<M: Clone, R, F>(&self, message: M, send: impl Fn(Service, Request<M>) -> F) -> Result<R, ClientError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let token = self.authorization().await?;
        let mut result = send(self.service.clone(), request(message.clone(), token.clone())).await;
        if let Err(status) = &result
            && status.code() == Code::Unauthenticated
            && let Some(other) = self.token.replacement(token.as_ref()).await
        {
            result = send(self.service.clone(), request(message, Some(other))).await;
        }
        let response = result.map_err(|status| self.error(&status))?;
        self.note_budget(response.metadata());
        Ok(response.into_inner())
    }

    /// The `authorization` of the next call; `None` without a token.
    pub(super) async fn authorization(&self) -> Result<Option<HeaderValue>, ClientError> {
        let unread = |message| ClientError::Unreachable { address: self.address.clone(), message };
        self.token.header().await.map_err(unread)
    }

    pub(super) fn error(&self, status: &tonic::Status) -> ClientError {
        ClientError::from_status(status, &self.address)
    }

    pub(super) fn protocol(&self, message: &str) -> ClientError {
        ClientError::Protocol { address: self.address.clone(), message: message.to_owned() }
    }
}

/// A request with this token.
pub(super) fn request<M>(message: M, token: Option<HeaderValue>) -> Request<M> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        // As a header, which is already marked as sensitive.
        request.metadata_mut().as_mut().insert(AUTHORIZATION, token);
    }
    request
}

/// The token of the options, if no one else can read it on the way to `address`.
fn token(address: &str, options: &ClientOptions) -> Result<Token, ClientError> {
    let wrong = |problem: String| ClientError::Address { address: address.to_owned(), problem };
    let token = Token::of(options.token.as_deref(), options.token_file.as_deref()).map_err(wrong)?;
    let uri = endpoint_uri(address);
    match token {
        Token::Fixed(_) | Token::File(_) if !uri.starts_with("https:") && !uri.starts_with("unix:") => {
            let host = uri.split_once("://").map_or(&*uri, |(_, host)| host);
            Err(wrong(format!(
                "a token is sent only over TLS or to a Unix socket, because others could read it on the way; use \
                 https://{host} (kubefan serve --tls-cert-file), or leave the token out"
            )))
        }
        token => Ok(token),
    }
}

async fn endpoint(address: &str, options: &ClientOptions) -> Result<Endpoint, ClientError> {
    let wrong = |problem: String| ClientError::Address { address: address.to_owned(), problem };
    let uri = endpoint_uri(address);
    let endpoint = Endpoint::from_shared(Bytes::from(uri.clone().into_bytes())).map_err(|_| {
        wrong(
            "not an address of kubefan; write it like 127.0.0.1:7443, https://host:port, dns:host:port or unix:/path"
                .to_owned(),
        )
    })?;
    // No default port: kubefan has none of its own, and at the scheme's another server may listen.
    if !is_unix(address) && endpoint.uri().port_u16().is_none() {
        let host = endpoint.uri().host().unwrap_or_default();
        return Err(wrong(format!("the address has no port, or one that is not a number; write it like {host}:7443")));
    }
    let mut endpoint = endpoint
        .user_agent(concat!("kubefan/", env!("CARGO_PKG_VERSION")))
        .map_err(|error| wrong(root_cause(&error)))?
        .connect_timeout(options.connect_timeout)
        .http2_keep_alive_interval(options.keepalive_interval)
        .keep_alive_timeout(options.keepalive_timeout)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX);
    if uri.starts_with("https:") {
        let mut tls = ClientTlsConfig::new();
        tls = match &options.ca_file {
            Some(file) => tls.ca_certificate(Certificate::from_pem(authorities::read(file).await.map_err(wrong)?.0)),
            None => tls.with_enabled_roots(),
        };
        if let Some(ClientCertificate { certificate_file, key_file }) = &options.client_certificate {
            let read = async |file: &PathBuf| {
                let unread = |error| wrong(format!("client certificate {}: {error}", file.display()));
                tokio::fs::read(file).await.map_err(unread)
            };
            tls = tls.identity(Identity::from_pem(read(certificate_file).await?, read(key_file).await?));
        }
        if let Some(name) = &options.server_name {
            tls = tls.domain_name(name);
        }
        endpoint = endpoint.tls_config(tls).map_err(|error| wrong(root_cause(&error)))?;
    } else if options.ca_file.is_some() {
        return Err(wrong("a CA file needs an https:// address".to_owned()));
    } else if options.client_certificate.is_some() || options.server_name.is_some() {
        return Err(wrong("a client certificate and a server name need an https:// address".to_owned()));
    }
    Ok(endpoint)
}

fn is_unix(address: &str) -> bool {
    address.starts_with("unix:")
}

/// Converts a gRPC address to a URI. A name is resolved at every connect.
fn endpoint_uri(address: &str) -> String {
    if address.starts_with("unix:") || address.contains("://") && !address.starts_with("dns:") {
        return address.to_owned();
    }
    let host = address.strip_prefix("dns:").map_or(address, |name| name.trim_start_matches('/'));
    format!("http://{host}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_documented_form_of_address_is_accepted() {
        let cases = [
            ("127.0.0.1:7443", "http://127.0.0.1:7443"),
            ("[::1]:7443", "http://[::1]:7443"),
            ("dns:kubefan.svc:7443", "http://kubefan.svc:7443"),
            ("dns:///kubefan.svc:7443", "http://kubefan.svc:7443"),
            ("https://h:1", "https://h:1"),
            ("unix:/run/k.sock", "unix:/run/k.sock"),
        ];
        for (address, uri) in cases {
            assert_eq!(endpoint_uri(address), uri);
            assert!(Client::connect_lazy(address, &ClientOptions::default()).await.is_ok(), "{address}");
        }
    }

    #[tokio::test]
    async fn the_error_names_an_invalid_address_and_an_unreachable_server() {
        let error = Client::connect("a b:c", &ClientOptions::default()).await.unwrap_err();
        assert!(error.to_string().starts_with("\"a b:c\": not an address of kubefan"), "{error}");
        for address in ["localhost", "https://h", "dns:h", "localhost:notaport", "https://h:99999", "dns:h:x"] {
            let error = Client::connect_lazy(address, &ClientOptions::default()).await.unwrap_err();
            assert!(error.to_string().contains("has no port"), "{error}");
        }
        // Bound but not listening: no other process can take the port meanwhile.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = socket.local_addr().unwrap().to_string();
        let error = Client::connect(&address, &ClientOptions::default()).await.unwrap_err();
        assert_eq!(error.to_string(), format!("cannot reach kubefan at {address}: Connection refused"));
        let options = ClientOptions { ca_file: Some("/does/not/exist.pem".into()), ..ClientOptions::default() };
        let error = Client::connect("https://127.0.0.1:1", &options).await.unwrap_err();
        assert!(error.to_string().contains("CA file /does/not/exist.pem"), "{error}");
    }
}
