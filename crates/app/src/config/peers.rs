//! The section "Peers": how replicas find and authenticate each other.
//!
//! A port for peers without certificates would give everything cached to every client that finds
//! it, so both sides require the three files.

use std::{fmt, path::PathBuf, str::FromStr, time};

use rustls::pki_types::ServerName;
use serde::{Deserialize, Deserializer, de};

use super::{
    ByteSize, ConfigError, Duration, ListenAddress,
    rules::{any, optional, size, unusable, wait},
    section::section,
};

/// A DNS name that resolves to the addresses of all replicas, such as that of a headless Service,
/// and their port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeersName {
    /// A DNS name or an IP address. The peers' certificates are for it.
    pub host: String,
    /// The port that the peers listen on.
    pub port: u16,
}

/// A text that is not a name and a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} names no peers; write it like kubefan-peers.kubefan.svc:7445")]
pub struct InvalidPeers {
    text: String,
}

impl FromStr for PeersName {
    type Err = InvalidPeers;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.rsplit_once(':').and_then(|(host, port)| {
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            let port = port.parse().ok().filter(|port| *port > 0)?;
            let usable = !host.is_empty() && host.len() <= 253 && !host.contains(['/', '@', ' ', '[', ']']);
            usable.then(|| Self { host: host.to_owned(), port })
        });
        parts.ok_or_else(|| InvalidPeers { text: text.chars().take(256).collect() })
    }
}

impl fmt::Display for PeersName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// One name of all replicas, or a name for each, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeersNames(Vec<PeersName>);

impl PeersNames {
    /// The names. There is at least one.
    pub fn names(&self) -> &[PeersName] {
        &self.0
    }
}

impl From<PeersNames> for Vec<(String, u16)> {
    fn from(PeersNames(names): PeersNames) -> Self {
        names.into_iter().map(|PeersName { host, port }| (host, port)).collect()
    }
}

impl FromStr for PeersNames {
    type Err = InvalidPeers;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for PeersNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(PeersName::to_string).collect();
        f.write_str(&names.join(","))
    }
}

impl<'de> Deserialize<'de> for PeersNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The default of `tuning.rebalancePercent`.
const REBALANCE_PERCENT: u32 = 1;

/// Certificate, key and CA of a replica among its peers, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFiles {
    /// The certificate chain.
    pub cert_file: PathBuf,
    /// The private key.
    pub key_file: PathBuf,
    /// The CA that every peer's certificate is checked against.
    pub ca_file: PathBuf,
}

section! {
    heading: "Peers";
    /// The options for finding and serving other replicas, as given.
    options: PeerOptions;
    /// The settings for finding and serving other replicas.
    config: PeerConfig {
        /// Whether a start copies the caches of `peers`. If not, it lists.
        warm_start: bool, warm_start;
        /// Whether watches are moved to those of `peers` that have fewer.
        rebalance: bool, rebalancing;
        /// `Some` if kubefan serves peers or copies from them, with a certificate from files.
        files: Option<PeerFiles>, peer_files;
        /// The names, one of which the certificate of a replica that connects must have; empty for
        /// any.
        allowed_names: Vec<ServerName<'static>>, allowed_names;
    }

    /// Let other replicas copy the caches from here, over mutual TLS: IP:PORT or :PORT. Off unless
    /// given.
    peer_listen("ADDRESS"): ListenAddress => listen: Option<ListenAddress>, any;
    /// Start with a copy of another replica's caches, history included. The name resolves to the
    /// replicas, or there is a name for each, separated by commas. The copy is checked against the
    /// apiserver; if the check fails, and without this option, every start lists.
    peers("NAME:PORT"): PeersNames => peers: Option<PeersNames>, optional(any);
    /// This replica's certificate chain among its peers (PEM), for server and client
    /// authentication, with the name of --peers. It is read for each connection. Not needed with
    /// --tls-managed-secret: replicas then use certificates of its CA.
    peer_cert_file("FILE"): PathBuf;
    /// The private key of that certificate (PEM).
    peer_key_file("FILE"): PathBuf;
    /// The CA of the replicas' certificates (PEM). Every holder of one of its certificates with an
    /// allowed name can read everything cached.
    peer_ca_file("FILE"): PathBuf;
    /// Move watches to replicas that have fewer, if this one has more than 1.1 times its share:
    /// gRPC streams that resume from memory first, then watches over HTTP with bookmarks. The
    /// replicas of --peers tell each other how many they have.
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    rebalance("BOOL"): bool;

    [keys]
    /// The largest copy of one resource, from a replica or in --state-dir, uncompressed. Raise it
    /// if a large resource is listed at a start because its copy is refused.
    /// [default: half of --memory-max; 4Gi if there is no memory limit]
    limits.peer_transfer_bytes_max("SIZE"): ByteSize => transfer_bytes_max: Option<u64>, optional(size(1 << 20));
    /// Start by listing, even if --peers is given. Turn it on if you distrust the state of the
    /// other replicas.
    tuning.cold("BOOL"): bool;
    /// Serve only replicas whose certificate has this name: a DNS name or an IP address. Set it if
    /// the CA also signs certificates of other programs.
    /// [default: the name of --peers, otherwise any]
    tuning.peer_allowed_names("NAME"): Vec<String>;
    /// Move at most this part of a replica's watches in a second, from 1 to 10 percent. Raise it if
    /// evening out takes too long, lower it if moves disturb clients.
    tuning.rebalance_percent("PERCENT"): u32 = REBALANCE_PERCENT => rebalance_percent: u32, percent;
    /// The longest that copying a cache at the start may take, its check included; after that,
    /// kubefan lists. Lengthen it if copies of a large cluster do not end in time.
    // Within the patience of a rollout; the pods of a large cluster take some seconds.
    tuning.peer_timeout("DURATION"): Duration = Duration::from_secs(30) => timeout: time::Duration, wait;
}

fn warm_start(options: &PeerOptions) -> Result<bool, ConfigError> {
    Ok(options.peers.is_some() && options.cold != Some(true))
}

fn percent(flag: &'static str, given: u32) -> Result<u32, ConfigError> {
    match given {
        1..=10 => Ok(given),
        _ => Err(unusable(flag, given, "must be from 1 to 10")),
    }
}

/// The replicas tell each other their load.
fn rebalancing(options: &PeerOptions) -> Result<bool, ConfigError> {
    Ok(options.rebalance == Some(true) && options.peers.is_some() && options.peer_listen.is_some())
}

/// Every replica has the name of `--peers`, because the others verify it when they connect.
fn allowed_names(options: &PeerOptions) -> Result<Vec<ServerName<'static>>, ConfigError> {
    let of_peers = || options.peers.iter().flat_map(PeersNames::names).map(|name| name.host.clone()).collect();
    let names = options.peer_allowed_names.clone().unwrap_or_else(of_peers);
    let parse = |name: String| {
        let parsed = ServerName::try_from(name.clone());
        parsed.map_err(|_| unusable("tuning.peerAllowedNames", name, "neither a DNS name nor an IP address"))
    };
    names.into_iter().map(parse).collect()
}

/// The three files. [`PeerOptions::check`] refuses fewer.
fn peer_files(options: &PeerOptions) -> Result<Option<PeerFiles>, ConfigError> {
    if let Some(address @ ListenAddress::Unix(_)) = &options.peer_listen {
        let problem = "other machines connect to it; give it an IP address and a port";
        return Err(unusable("--peer-listen", address, problem));
    }
    let [Some(cert_file), Some(key_file), Some(ca_file)] = options.files().map(|(_, file)| file.clone()) else {
        return Ok(None);
    };
    Ok(options.needed_by().map(|_| PeerFiles { cert_file, key_file, ca_file }))
}

impl PeerOptions {
    /// The option that needs a certificate.
    fn needed_by(&self) -> Option<&'static str> {
        match (&self.peer_listen, &self.peers) {
            (Some(_), _) => Some("--peer-listen"),
            (None, Some(_)) => Some("--peers"),
            (None, None) => None,
        }
    }

    fn files(&self) -> [(&'static str, &Option<PathBuf>); 3] {
        [
            ("--peer-cert-file", &self.peer_cert_file),
            ("--peer-key-file", &self.peer_key_file),
            ("--peer-ca-file", &self.peer_ca_file),
        ]
    }

    /// Refuses peers without a certificate. `is_managed`: they have one that kubefan makes.
    pub(super) fn check(&self, is_managed: bool) -> Result<(), ConfigError> {
        let Some(flag) = self.needed_by() else { return Ok(()) };
        let files = self.files();
        let has_some = files.iter().any(|(_, file)| file.is_some());
        match files.iter().find(|(_, file)| file.is_none()) {
            Some((missing, _)) if has_some || !is_managed => ConfigError::contradiction(format!(
                "{flag} needs {missing}: peers speak over mutual TLS only; or give --tls-managed-secret and none of the files"
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_a_name_and_a_port() {
        for text in ["kubefan-peers.kubefan.svc:7445", "127.0.0.1:1", "[::1]:7445", "a:1,[::1]:2,a:3"] {
            assert_eq!(text.parse::<PeersNames>().unwrap().to_string(), text);
        }
        for text in
            ["", "name", ":7445", "name:", "name:0", "name:70000", "https://name:7445", "a b:1", "a:1,", "a:1,b"]
        {
            assert!(text.parse::<PeersNames>().is_err(), "{text}");
        }
    }
}
