//! What replicas need to find and to trust each other.
//!
//! A port for peers without certificates would give everything cached to whoever finds it, so the three files go with either side.

use std::{fmt, path::PathBuf, str::FromStr, time};

use serde::{Deserialize, Deserializer, de};

use super::{ConfigError, ListenAddress, ServeOptions};

/// Where peers are: a name whose addresses are the replicas, as a headless Service's, and their port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeersName {
    /// A DNS name or an IP address; the peers' certificates are for it.
    pub host: String,
    /// The port on which they listen.
    pub port: u16,
}

/// A text that names no peers.
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

impl<'de> Deserialize<'de> for PeersName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Certificate, key and CA of a replica among its peers, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFiles {
    /// The certificate chain.
    pub cert_file: PathBuf,
    /// The private key.
    pub key_file: PathBuf,
    /// What every peer's certificate is checked against.
    pub ca_file: PathBuf,
}

/// Peers, both ways.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerConfig {
    /// Where peers are served; `None`: nowhere.
    pub listen: Option<ListenAddress>,
    /// Whom caches are taken over from; `None`: every start is a cold one.
    pub peers: Option<PeersName>,
    /// There whenever one of the two is.
    pub files: Option<PeerFiles>,
    /// How long a warm start may take.
    pub timeout: time::Duration,
    /// Content of one transfer, in bytes; `None`: half of what the process may take in memory.
    pub transfer_bytes_max: Option<u64>,
}

impl ServeOptions {
    /// The files, where they are needed.
    pub(super) fn peer_files(&self) -> Result<Option<PeerFiles>, ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        let needed = match (&self.peer_listen, &self.peers) {
            (Some(ListenAddress::Unix(_)), _) => {
                return contradiction(
                    "--peer-listen is for other machines; give it an IP address and a port".to_owned(),
                );
            }
            (Some(_), _) => Some("--peer-listen"),
            (None, Some(_)) => Some("--peers"),
            (None, None) => None,
        };
        let files = [
            ("--peer-cert-file", &self.peer_cert_file),
            ("--peer-key-file", &self.peer_key_file),
            ("--peer-ca-file", &self.peer_ca_file),
        ];
        match (needed, files.map(|(_, file)| file.clone())) {
            (Some(_), [Some(cert_file), Some(key_file), Some(ca_file)]) => {
                Ok(Some(PeerFiles { cert_file, key_file, ca_file }))
            }
            (Some(by), _) => {
                let missing = files.iter().find(|(_, file)| file.is_none()).map_or("", |(flag, _)| flag);
                contradiction(format!("{by} needs {missing}: peers speak over mutual TLS only"))
            }
            (None, _) => match files.iter().find(|(_, file)| file.is_some()) {
                Some((flag, _)) => contradiction(format!("{flag} has no effect without --peer-listen or --peers")),
                None => Ok(None),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_a_name_and_a_port() {
        for text in ["kubefan-peers.kubefan.svc:7445", "127.0.0.1:1", "[::1]:7445"] {
            assert_eq!(text.parse::<PeersName>().unwrap().to_string(), text);
        }
        for text in ["", "name", ":7445", "name:", "name:0", "name:70000", "https://name:7445", "a b:1"] {
            assert!(text.parse::<PeersName>().is_err(), "{text}");
        }
    }

    #[test]
    fn peers_need_certificates_and_certificates_peers() {
        let file = || Some(PathBuf::from("f"));
        let base = || ServeOptions { resources: Some(vec!["pods".to_owned()]), ..Default::default() };
        let error = |options: ServeOptions| options.validate().unwrap_err().to_string();
        let peers = || Some("p:1".parse().unwrap());
        let listen = |text: &str| Some(text.parse().unwrap());
        assert_eq!(
            error(ServeOptions { peers: peers(), peer_cert_file: file(), ..base() }),
            "--peers needs --peer-key-file: peers speak over mutual TLS only"
        );
        assert!(
            error(ServeOptions { peer_listen: listen("0.0.0.0:7445"), ..base() }).contains("needs --peer-cert-file")
        );
        assert_eq!(
            error(ServeOptions { peer_ca_file: file(), ..base() }),
            "--peer-ca-file has no effect without --peer-listen or --peers"
        );
        assert!(error(ServeOptions { peer_listen: listen("unix:/x"), ..base() }).starts_with("--peer-listen is for"));
        let files = || ServeOptions { peer_cert_file: file(), peer_key_file: file(), peer_ca_file: file(), ..base() };
        let both = || ServeOptions { peers: peers(), peer_listen: listen("0.0.0.0:7445"), ..files() };
        assert_eq!(both().validate().unwrap().peer.peers, peers());
        let cold = ServeOptions { cold: Some(true), ..both() }.validate().unwrap().peer;
        assert!(cold.peers.is_none() && cold.listen.is_some() && cold.files.is_some(), "it still gives");
        let same = ServeOptions { listen: listen("127.0.0.1:1"), peer_listen: listen("127.0.0.1:1"), ..files() };
        assert!(error(same).contains("are both 127.0.0.1:1"));
    }
}
