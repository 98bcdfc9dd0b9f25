//! The peers by the configuration: their TLS files, and where to find them.

use std::sync::Arc;

use crate::{
    config::ServeConfig,
    peer::{DnsDial, Peers, tls::PeerTls},
};

/// The size limit of a transfer if neither the configuration nor a memory budget sets one, in
/// bytes.
const TRANSFER_BYTES_MAX: u64 = 4 << 30;

/// The TLS files for peers. `None` if there are no peers.
pub fn tls(config: &ServeConfig) -> Option<PeerTls> {
    let files = config.peer.files.clone()?;
    let (cert_file, key_file, ca_file) = (files.cert_file, files.key_file, files.ca_file);
    Some(PeerTls { cert_file, key_file, ca_file, allowed_names: config.peer.allowed_names.clone() })
}

/// The peers that caches start from. `own_port` is the port where this replica serves peers, and
/// `memory_max` its memory budget in bytes.
pub(super) fn sources(config: &ServeConfig, own_port: Option<u16>, memory_max: Option<usize>) -> Option<Peers> {
    let (name, tls) = (config.peer.peers.clone()?, tls(config)?);
    let dial = DnsDial::new(name.host, name.port, tls, own_port);
    // During a transfer there is nothing else to release when memory is short.
    let half_of_memory = memory_max.map_or(TRANSFER_BYTES_MAX, |bytes| bytes as u64 / 2);
    Some(Peers::new(Arc::new(dial), config.peer.timeout, config.peer.transfer_bytes_max.unwrap_or(half_of_memory)))
}
