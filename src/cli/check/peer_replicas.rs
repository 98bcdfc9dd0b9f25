//! The group "peers": whether the other replicas can be found and reached over mutual TLS.

use std::sync::Arc;

use tokio::net::TcpStream;

use kubefan_app::config::{PeersName, ServeConfig};
use kubefan_managed_tls::ManagedTls;
use kubefan_peer::tls::PeerTls;

use super::{
    network_step::{resolve, step},
    report::{Finding, Report},
};

/// The addresses that are tried.
const ADDRESSES_MAX: usize = 16;

/// Checks the replicas of `--peers`: kubefan would copy caches from them, and move watches to them.
/// Without `--peers` there is nothing to do, and nothing without a certificate: `managed` is that
/// of the cluster.
pub(super) async fn check(config: &ServeConfig, managed: Option<&Arc<ManagedTls>>, report: &mut Report) {
    let (Some(peers), Some(tls)) = (&config.peer.peers, kubefan_app::peers::tls(config, managed)) else { return };
    report.group("peers");
    for name in peers.names() {
        check_name(name, &tls, report).await;
    }
}

async fn check_name(PeersName { host, port }: &PeersName, tls: &PeerTls, report: &mut Report) {
    report.waits_for(&format!("DNS for {host}"));
    let addresses = match resolve(host, *port).await {
        Ok(addresses) => addresses,
        Err(message) => {
            let message = format!("{host} cannot be resolved: {message}");
            let remedy = "correct only if other replicas run: the first one has no peers, and lists";
            report.add(Finding::warning("DNS", message, remedy));
            return;
        }
    };
    for address in addresses.into_iter().take(ADDRESSES_MAX) {
        report.waits_for(&format!("the peer {address}"));
        let connection = match step(TcpStream::connect(address)).await {
            Ok(connection) => connection,
            Err(message) => {
                let remedy = "does a replica run there, and do the NetworkPolicies admit it?";
                report.add(Finding::warning(address.to_string(), format!("cannot be reached: {message}"), remedy));
                continue;
            }
        };
        report.add(match step(tls.connect(host, connection)).await {
            Ok(_) => Finding::ok(address.to_string(), "mutual TLS is set up"),
            Err(message) => Finding::error(
                address.to_string(),
                format!("mutual TLS failed: {message}"),
                format!("all replicas need certificates of one CA, for the name {host}"),
            ),
        });
    }
}
