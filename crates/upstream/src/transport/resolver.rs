//! Looks up the names of an apiserver, another kubefan or a proxy, for both HTTP clients.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
    vec,
};

use futures::{FutureExt, TryFutureExt, future::BoxFuture};
use hyper_util::client::legacy::connect::dns::Name;
use kubefan_common::names::Names;
use reqwest::dns;
use tower::{BoxError, Service};

/// The system's resolver, and the addresses that it has found before.
#[derive(Clone)]
pub(super) struct Resolver {
    names: Arc<Names>,
    /// The host to look up in place of every name.
    host: Option<Arc<str>>,
}

impl Resolver {
    /// Resolves every name to its addresses.
    pub(super) fn new() -> Self {
        Self { names: Names::of_system(), host: None }
    }

    /// Resolves every name to the addresses of one host.
    pub(super) fn to(host: &str) -> Self {
        Self { host: Some(host.into()), ..Self::new() }
    }

    async fn resolve(self, name: String) -> io::Result<vec::IntoIter<SocketAddr>> {
        let host = self.host.as_deref().unwrap_or(&name);
        // Port 0 stands for the URL's port.
        Ok(self.names.look_up(host, 0).await?.into_iter())
    }
}

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        self.clone().resolve(name.as_str().to_owned()).boxed()
    }
}

impl dns::Resolve for Resolver {
    fn resolve(&self, name: dns::Name) -> dns::Resolving {
        let found = Self::resolve(self.clone(), name.as_str().to_owned());
        found.map_ok(|addresses| Box::new(addresses) as dns::Addrs).map_err(BoxError::from).boxed()
    }
}
