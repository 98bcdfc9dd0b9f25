//! Finds a replica that has the cache, and receives the cache from it.
//!
//! An old replica that hangs must not delay a new one for long: every peer has a time limit, and
//! the caller has one for all peers together. Peers are tried in random order, so that replicas
//! that start together do not all ask the same peer.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::{BoxFuture, join_all};
use hyper_util::rt::TokioIo;
use kubefan_common::proto::v1alpha1::peer_service_client::PeerServiceClient;
use rand::{Rng, seq::SliceRandom};
use tokio::{
    net::{TcpStream, UdpSocket, lookup_host},
    task::yield_now,
    time::{Instant, sleep, timeout},
};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tower::service_fn;
use tracing::info;

use super::{
    decode::{CHUNK_BYTES_MAX, Decoder, ReceivedCache},
    error::PeerError,
    identity::CacheIdentity,
    tls::PeerTls,
};

/// Time limit for a connection with its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit between two parts of a transfer.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which unreachable or missing peers are tried again. A network plugin may know the
/// address of a new pod only some seconds after it has started, and until then nothing answers.
const REACH_TIMEOUT: Duration = Duration::from_secs(6);
/// The delay between two tries: the first, and the longest.
const REACH_DELAY_MIN: Duration = Duration::from_millis(200);
const REACH_DELAY_MAX: Duration = Duration::from_secs(1);
/// The number of addresses tried. Further addresses would hardly fare better.
const ADDRESSES_MAX: usize = 16;

/// The peers that a look-up found.
pub struct FoundPeers {
    /// Addresses of the peers, without this replica's own if that is known.
    pub addresses: Vec<SocketAddr>,
    /// Error of a name that could not be resolved, so that some of the peers may be missing.
    pub failed: Option<PeerError>,
}

/// Finds peers and connects to them.
pub trait Dial: Send + Sync {
    /// Looks up the addresses of the peers.
    fn find(&self) -> BoxFuture<'_, FoundPeers>;

    /// Connects to one peer. Fails with [`PeerError::OwnAddress`] if the address is this replica's.
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>>;
}

/// Finds peers by DNS names and connects to them over mutual TLS.
pub struct DnsDial {
    names: Vec<(String, u16)>,
    tls: PeerTls,
    /// This replica's own port for peers.
    own_port: Option<u16>,
    /// The name that had each address when the names were last resolved. The certificate of a peer
    /// must be valid for it.
    found: Mutex<BTreeMap<SocketAddr, String>>,
}

impl DnsDial {
    /// Peers at every address of these names, each with a port; their certificates must be valid
    /// for their name.
    pub fn new(names: Vec<(String, u16)>, tls: PeerTls, own_port: Option<u16>) -> Self {
        Self { names, tls, own_port, found: Mutex::default() }
    }

    /// The addresses, each with its name, and the failure of a name. It hides no other name.
    async fn resolve(&self) -> (BTreeMap<SocketAddr, String>, Option<PeerError>) {
        let lookup = async |(host, port): &(String, u16)| match lookup_host((host.as_str(), *port)).await {
            Ok(found) => Ok(found.map(|address| (address, host.clone())).collect::<Vec<_>>()),
            Err(error) if is_no_such_name(&error.to_string()) => Ok(Vec::new()),
            Err(error) => Err(PeerError::Resolve { name: format!("{host}:{port}"), message: error.to_string() }),
        };
        let mut found = BTreeMap::new();
        let mut failed = None;
        for looked_up in join_all(self.names.iter().map(lookup)).await {
            match looked_up {
                Ok(addresses) => found.extend(addresses),
                Err(error) => failed = Some(error),
            }
        }
        (found, failed)
    }

    async fn dial(&self, address: SocketAddr) -> Result<Channel, PeerError> {
        let connect = |error: &dyn fmt::Display| PeerError::Connect(error.to_string());
        let name = self.found.lock().unwrap_or_else(PoisonError::into_inner).get(&address).cloned();
        // A look-up for another cache may have failed meanwhile. The next one may find it again.
        let name = name.ok_or_else(|| PeerError::Unreachable("no name has this address any more".to_owned()))?;
        if self.own_port == Some(address.port()) && is_own(address.ip()).await {
            return Err(PeerError::OwnAddress);
        }
        let stream = TcpStream::connect(address).await;
        let stream = stream.map_err(|error| PeerError::Unreachable(error.to_string()))?;
        let io = self.tls.connect(&name, stream).await?;
        let mut io = Some(TokioIo::new(io));
        let once = service_fn(move |_| {
            let io = io.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
            std::future::ready(io)
        });
        Endpoint::from_static("http://peer").connect_with_connector(once).await.map_err(|error| connect(&error))
    }
}

impl Dial for DnsDial {
    fn find(&self) -> BoxFuture<'_, FoundPeers> {
        Box::pin(async {
            let (found, failed) = self.resolve().await;
            let addresses = found.keys().copied().collect();
            *self.found.lock().unwrap_or_else(PoisonError::into_inner) = found;
            FoundPeers { addresses, failed }
        })
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>> {
        Box::pin(self.dial(address))
    }
}

/// Whether this host has the address: a packet to one's own address has it as its source too. No
/// packet is sent. A connection over TCP would show it as well, but the server here would count it
/// as an unknown peer if it ended without a handshake.
async fn is_own(address: IpAddr) -> bool {
    let any: IpAddr = if address.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let source = async {
        let socket = UdpSocket::bind((any, 0)).await?;
        // Any port: a datagram socket only looks up the route.
        socket.connect((address, 1)).await?;
        socket.local_addr()
    };
    source.await.is_ok_and(|source| source.ip() == address)
}

/// Whether the resolver's message means that the name has no addresses, as with a headless Service
/// before its first replica is ready. The standard library returns only a text: glibc's or musl's,
/// which is not localized here.
fn is_no_such_name(message: &str) -> bool {
    const MESSAGES: [&str; 4] = [
        "Name or service not known",
        "No address associated with hostname",
        "Name does not resolve",
        "Name has no usable address",
    ];
    MESSAGES.iter().any(|text| message.contains(text))
}

/// The replicas that a cache may be copied from.
#[derive(Clone)]
pub struct Peers {
    dial: Arc<dyn Dial>,
    /// Time limit for the whole warm start, including the comparison with upstream.
    pub peer_timeout: Duration,
    /// Limit for one transfer, in uncompressed bytes.
    pub peer_transfer_bytes_max: u64,
}

impl Peers {
    /// Peers found and reached by `dial`.
    pub fn new(dial: Arc<dyn Dial>, peer_timeout: Duration, peer_transfer_bytes_max: u64) -> Self {
        Self { dial, peer_timeout, peer_transfer_bytes_max }
    }

    /// Receives the cache from the first peer that sends all of it. The peers are asked in random
    /// order, and those that cannot be reached again for some seconds. `decoder` creates a decoder
    /// for each attempt.
    ///
    /// # Errors
    /// The last peer's error; the error of each peer that was reached is logged.
    pub async fn fetch(
        &self,
        wanted: &CacheIdentity,
        mut decoder: impl FnMut() -> Decoder,
        random: &mut impl Rng,
    ) -> Result<(SocketAddr, ReceivedCache), PeerError> {
        let started = Instant::now();
        let mut delay = REACH_DELAY_MIN;
        let mut given_up = BTreeSet::new();
        loop {
            let error = match self.fetch_once(wanted, &mut decoder, &mut given_up, random).await {
                Ok(received) => return Ok(received),
                Err(error) => error,
            };
            if !error.may_pass() || started.elapsed() + delay > REACH_TIMEOUT {
                return Err(error);
            }
            sleep(delay).await;
            delay = (2 * delay).min(REACH_DELAY_MAX);
        }
    }

    async fn fetch_once(
        &self,
        wanted: &CacheIdentity,
        decoder: &mut impl FnMut() -> Decoder,
        given_up: &mut BTreeSet<SocketAddr>,
        random: &mut impl Rng,
    ) -> Result<(SocketAddr, ReceivedCache), PeerError> {
        let FoundPeers { mut addresses, failed } = self.dial.find().await;
        addresses.retain(|address| !given_up.contains(address));
        addresses.shuffle(random);
        let mut last = failed.unwrap_or(PeerError::NoOtherReplica);
        for address in addresses.into_iter().take(ADDRESSES_MAX) {
            match self.fetch_from(address, wanted, decoder()).await {
                Ok(restored) => return Ok((address, restored)),
                Err(PeerError::OwnAddress) => _ = given_up.insert(address),
                // Another one may be reached in a moment.
                Err(error) if error.may_pass() => last = error,
                Err(error) => {
                    info!(resource = %wanted.gvr, scope = wanted.scope.namespace(), peer = %address, %error, "no warm start from this peer");
                    given_up.insert(address);
                    if !last.may_pass() {
                        last = error;
                    }
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
    ) -> Result<ReceivedCache, PeerError> {
        let stalled = |limit: Duration| PeerError::CutOff(format!("nothing arrived for {limit:?}"));
        let connecting = timeout(CONNECT_TIMEOUT, self.dial.connect(address));
        let channel =
            connecting.await.map_err(|_| PeerError::Unreachable(format!("no answer in {CONNECT_TIMEOUT:?}")))??;
        // The sender compresses chunks, which may make the largest chunk slightly larger.
        let mut client = PeerServiceClient::new(channel).max_decoding_message_size(CHUNK_BYTES_MAX + (1 << 20));
        // The peer may be serving other transfers first. Half of the time is left for another peer.
        let answer_timeout = self.peer_timeout / 2;
        let answer = timeout(answer_timeout, client.transfer(wanted.request())).await;
        let mut parts = answer.map_err(|_| stalled(answer_timeout))?.map_err(|status| refused(&status))?.into_inner();
        loop {
            let part = timeout(STALL_TIMEOUT, parts.message()).await.map_err(|_| stalled(STALL_TIMEOUT))?;
            let Some(part) = part.map_err(|status| PeerError::CutOff(status.message().to_owned()))? else { break };
            decoder.take(part)?;
            // Decoding a part takes a few milliseconds, so other tasks get a turn in between.
            yield_now().await;
        }
        decoder.finish()
    }
}

fn refused(status: &Status) -> PeerError {
    match status.code() {
        Code::Unavailable if status.message().is_empty() => PeerError::Connect("the connection broke".to_owned()),
        _ => PeerError::Refused(status.message().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_addresses_mean_no_peers_but_a_failed_look_up_does_not() {
        let lookup = |text: &str| is_no_such_name(&format!("failed to lookup address information: {text}"));
        assert!(lookup("Name or service not known") && lookup("No address associated with hostname"));
        assert!(lookup("Name does not resolve"), "musl's");
        assert!(!lookup("Temporary failure in name resolution") && !lookup("Try again"));
    }

    #[tokio::test]
    async fn this_hosts_addresses_are_its_own_and_no_others() {
        assert!(is_own(Ipv4Addr::LOCALHOST.into()).await);
        // For documentation (RFC 5737), so no host has it.
        assert!(!is_own(Ipv4Addr::new(192, 0, 2, 1).into()).await);
    }
}
