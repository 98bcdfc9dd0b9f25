//! The peers by the configuration: their TLS files and their addresses.

use std::sync::Arc;

use futures::StreamExt;
use kubefan_audit::AuditLog;
use kubefan_informers::{CacheCatalog, Registry};
use kubefan_managed_tls::ManagedTls;
use kubefan_peer::{
    DnsDial, LoadSource, Peers, TransferLog,
    tls::{PeerTls, PeerTlsFiles},
};
use kubefan_server::transport::listen::Listener;
use tonic::transport::server::Connected;

use super::{component::Shared, peer_records::PeerRecords};
use crate::config::ServeConfig;

/// The size limit of a transfer if neither the configuration nor a memory budget sets one, in
/// bytes.
const TRANSFER_BYTES_MAX: u64 = 4 << 30;

/// Returns the TLS files for peers. `None` if there are no peers, or if they use the managed
/// certificate.
pub fn files(config: &ServeConfig) -> Option<PeerTlsFiles> {
    let files = config.peer.files.clone()?;
    let cert_file = files.cert_file;
    let key_file = files.key_file;
    let ca_file = files.ca_file;
    Some(PeerTlsFiles { cert_file, key_file, ca_file, allowed_names: config.peer.allowed_names.clone() })
}

/// Returns the TLS credentials by which replicas prove their identity to each other: the files, or
/// else the managed certificate, which exists without peers too. `None` with neither.
pub fn tls(config: &ServeConfig, managed: Option<&Arc<ManagedTls>>) -> Option<PeerTls> {
    files(config).map(PeerTls::Files).or_else(|| Some(PeerTls::Managed(managed?.clone())))
}

/// Returns the peers whose caches this replica copies when it starts. `own_port` is the port where
/// it serves peers, and `memory_max` its memory budget in bytes.
pub(super) fn warm_start_peers(
    config: &ServeConfig,
    tls: Option<PeerTls>,
    own_port: Option<u16>,
    memory_max: Option<usize>,
) -> Option<Peers> {
    let names = config.peer.peers.clone().filter(|_| config.peer.warm_start)?;
    let tls = tls?;
    let dial = DnsDial::new(names.into(), tls, own_port);
    Some(Peers::new(Arc::new(dial), config.peer.timeout, transfer_bytes_max(config, memory_max)))
}

/// Returns the largest state of one cache that is copied from a peer or read from disk, in bytes.
pub(super) fn transfer_bytes_max(config: &ServeConfig, memory_max: Option<usize>) -> u64 {
    // During a transfer no other memory can be released when memory is short.
    let half_of_memory = memory_max.map_or(TRANSFER_BYTES_MAX, |bytes| bytes as u64 / 2);
    config.peer.transfer_bytes_max.unwrap_or(half_of_memory)
}

/// The port where peers copy caches, before it serves.
pub(super) struct PeerPort {
    pub(super) listener: Listener,
    pub(super) tls: PeerTls,
    /// The log of transfers.
    pub(super) log: AuditLog,
    /// The load of this replica, for requests of peers. `None` if they may not ask.
    pub(super) load: Option<LoadSource>,
}

impl PeerPort {
    /// Serves peers from the caches of `registry` until kubefan stops.
    pub(super) fn build(self, shared: Shared<'_>, registry: &Arc<Registry>) {
        let Self { listener, tls, log, load } = self;
        let log: Arc<dyn TransferLog> = Arc::new(PeerRecords(log));
        let caches = CacheCatalog(registry.clone());
        let incoming = listener.incoming(0).map(|accepted| {
            accepted.map(|io| {
                let address = io.connect_info().address.map(|address| address.ip());
                (io, address)
            })
        });
        let stop = shared.stops.stop.clone();
        tokio::spawn(kubefan_peer::server::serve(incoming, tls, caches, log, load, shared.metrics.clone(), stop));
    }
}
