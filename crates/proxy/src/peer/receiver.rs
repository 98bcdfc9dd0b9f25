//! Finds a replica that has the cache, and takes it over.
//!
//! A new replica must not wait long for an old one that hangs: every peer has a time to answer in, and the caller has one for all of them.
//! Peers are tried in random order, so that replicas that start together do not all ask the same one.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use rand::{Rng, seq::SliceRandom};
use tokio::{
    net::{TcpStream, lookup_host},
    task::yield_now,
    time::timeout,
};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tower::service_fn;
use tracing::info;

use super::{CHUNK_BYTES_MAX, CacheIdentity, Decoder, PeerError, Restored, tls::PeerTls};
use kubefan_common::proto::v1alpha1::peer_service_client::PeerServiceClient;

/// How long a peer has to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long nothing may come.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Addresses that are tried; the others of a longer list are no better.
const ADDRESSES_MAX: usize = 16;

/// The way to the peers.
pub trait Dial: Send + Sync {
    /// Where they are, this replica left out where that is known.
    fn addresses(&self) -> BoxFuture<'_, Result<Vec<SocketAddr>, PeerError>>;

    /// A connection to one of them.
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>>;
}

/// Replicas by a name in DNS, over mutual TLS.
pub struct DnsDial {
    host: String,
    port: u16,
    tls: PeerTls,
    /// The port on which this replica serves peers.
    own_port: Option<u16>,
}

impl DnsDial {
    /// Peers at every address that `host` has; their certificates must be for that name.
    pub fn new(host: String, port: u16, tls: PeerTls, own_port: Option<u16>) -> Self {
        Self { host, port, tls, own_port }
    }

    fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    async fn dial(&self, address: SocketAddr) -> Result<Channel, PeerError> {
        let connect = |error: &dyn fmt::Display| PeerError::Connect(error.to_string());
        let stream = TcpStream::connect(address).await.map_err(|error| connect(&error))?;
        // Every address of a pod is its own.
        let local = stream.local_addr().map_err(|error| connect(&error))?;
        if local.ip() == address.ip() && self.own_port == Some(address.port()) {
            return Err(PeerError::Alone);
        }
        let io = self.tls.connect(&self.host, stream).await?;
        let mut io = Some(TokioIo::new(io));
        let once = service_fn(move |_| {
            let io = io.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
            std::future::ready(io)
        });
        Endpoint::from_static("http://peer").connect_with_connector(once).await.map_err(|error| connect(&error))
    }
}

impl Dial for DnsDial {
    fn addresses(&self) -> BoxFuture<'_, Result<Vec<SocketAddr>, PeerError>> {
        Box::pin(async {
            let found = lookup_host((self.host.as_str(), self.port)).await;
            let found = found.map_err(|error| match is_no_such_name(&error.to_string()) {
                true => PeerError::Alone,
                false => PeerError::Resolve { name: self.name(), message: error.to_string() },
            })?;
            let mut addresses: Vec<_> = found.collect();
            addresses.sort();
            addresses.dedup();
            match addresses.is_empty() {
                true => Err(PeerError::Alone),
                false => Ok(addresses),
            }
        })
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>> {
        Box::pin(self.dial(address))
    }
}

/// Whether a resolver says that the name has no addresses, which is what a headless Service has until the first replica is ready. The standard
/// library gives that as a text only: glibc's and musl's, which do not follow the locale here.
fn is_no_such_name(message: &str) -> bool {
    const SAID: [&str; 4] = [
        "Name or service not known",
        "No address associated with hostname",
        "Name does not resolve",
        "Name has no usable address",
    ];
    SAID.iter().any(|said| message.contains(said))
}

/// Replicas that a cache may be taken over from.
#[derive(Clone)]
pub struct Peers {
    dial: Arc<dyn Dial>,
    /// How long a warm start may take in all, its check included.
    pub peer_timeout: Duration,
    /// Content of one transfer, in bytes.
    pub peer_transfer_bytes_max: u64,
}

impl Peers {
    /// Peers that are reached by `dial`.
    pub fn new(dial: Arc<dyn Dial>, peer_timeout: Duration, peer_transfer_bytes_max: u64) -> Self {
        Self { dial, peer_timeout, peer_transfer_bytes_max }
    }

    /// Takes the cache from the first peer that gives it, each of them asked once, in random order. `decoder` makes what reads it.
    ///
    /// # Errors
    /// The last peer's; each one's is logged.
    pub async fn fetch(
        &self,
        wanted: &CacheIdentity,
        mut decoder: impl FnMut() -> Decoder,
        random: &mut impl Rng,
    ) -> Result<(SocketAddr, Restored), PeerError> {
        let mut addresses = self.dial.addresses().await?;
        addresses.shuffle(random);
        let mut last = PeerError::Alone;
        for address in addresses.into_iter().take(ADDRESSES_MAX) {
            match self.fetch_from(address, wanted, decoder()).await {
                Ok(restored) => return Ok((address, restored)),
                Err(PeerError::Alone) => {}
                Err(error) => {
                    info!(resource = %wanted.gvr, scope = wanted.scope.namespace(), peer = %address, %error, "no warm start from this peer");
                    last = error;
                }
            }
        }
        Err(last)
    }

    async fn fetch_from(
        &self,
        address: SocketAddr,
        wanted: &CacheIdentity,
        mut decoder: Decoder,
    ) -> Result<Restored, PeerError> {
        let stalled = |limit: Duration| PeerError::CutOff(format!("nothing came for {limit:?}"));
        let connecting = timeout(CONNECT_TIMEOUT, self.dial.connect(address));
        let channel =
            connecting.await.map_err(|_| PeerError::Connect(format!("none within {CONNECT_TIMEOUT:?}")))??;
        // Compressed by the sender where it helps; the longest chunk may have become a little longer by it.
        let mut client = PeerServiceClient::new(channel).max_decoding_message_size(CHUNK_BYTES_MAX + (1 << 20));
        // It may have to wait for others that are being served. Half of the time is left for another peer.
        let answer_timeout = self.peer_timeout / 2;
        let answer = timeout(answer_timeout, client.transfer(wanted.request())).await;
        let mut parts = answer.map_err(|_| stalled(answer_timeout))?.map_err(|status| refused(&status))?.into_inner();
        loop {
            let part = timeout(STALL_TIMEOUT, parts.message()).await.map_err(|_| stalled(STALL_TIMEOUT))?;
            let Some(part) = part.map_err(|status| PeerError::CutOff(status.message().to_owned()))? else { break };
            decoder.take(part)?;
            // A part takes a few milliseconds: other tasks get their turn.
            yield_now().await;
        }
        decoder.finish()
    }
}

fn refused(status: &Status) -> PeerError {
    match status.code() {
        Code::Unavailable if status.message().is_empty() => PeerError::Connect("it broke".to_owned()),
        _ => PeerError::Refused(status.message().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_addresses_means_alone_and_a_resolver_that_fails_does_not() {
        let lookup = |said: &str| is_no_such_name(&format!("failed to lookup address information: {said}"));
        assert!(lookup("Name or service not known") && lookup("No address associated with hostname"));
        assert!(lookup("Name does not resolve"), "musl's");
        assert!(!lookup("Temporary failure in name resolution") && !lookup("Try again"));
    }
}
