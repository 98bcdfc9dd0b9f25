//! Mutual TLS between peers: each side presents a certificate and verifies the other's against the
//! peers' CA. There is no unencrypted mode.
//!
//! A transfer contains the whole cache, and any holder of a certificate from this CA may read it.
//! A CA of files should therefore be used only for the replicas, and a peer that connects must have
//! one of their names. The files are read anew for every connection, so that rotated files take
//! effect at once; connections are rare.
//!
//! Without files, replicas prove themselves with the managed CA. It also signs the certificate of
//! the data port, so both sides require a name that only replicas have ([`PEER_NAME`]).

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kubefan_common::tls::explain_pem;
use kubefan_managed_tls::{ManagedTls, PEER_NAME, PeerProof};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use webpki::EndEntityCert;

use super::error::PeerError;

/// A replica's certificate for its peers, and the CAs that it verifies them against.
#[derive(Debug, Clone)]
pub enum PeerTls {
    /// PEM files.
    Files(PeerTlsFiles),
    /// A certificate of the managed CA.
    Managed(Arc<ManagedTls>),
}

/// The PEM files of certificate, key and CA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsFiles {
    /// The certificate chain. Its certificate must allow both server and client authentication.
    pub cert_file: PathBuf,
    /// Private key of the certificate.
    pub key_file: PathBuf,
    /// The CA that every peer's certificate is verified against.
    pub ca_file: PathBuf,
    /// A peer that connects must have one of these names in its certificate (DNS names or IP
    /// addresses of `subjectAltName`); empty for any.
    pub allowed_names: Vec<ServerName<'static>>,
}

impl PeerTls {
    /// Accepts a connection from a peer.
    ///
    /// # Errors
    /// [`PeerError::Files`] or [`PeerError::Managed`] if this replica has nothing to prove itself
    /// with, [`PeerError::Connect`] if the handshake fails or the other side is not a peer.
    pub async fn accept<T: AsyncRead + AsyncWrite + Unpin>(&self, io: T) -> Result<server::TlsStream<T>, PeerError> {
        let proof = self.proof().await?;
        let config = server_config(&proof).map_err(|error| self.unusable(error))?;
        let accepted = TlsAcceptor::from(Arc::new(config)).accept(io).await;
        let accepted = accepted.map_err(|error| PeerError::Connect(error.to_string()))?;
        if self.allows(accepted.get_ref().1.peer_certificates()) {
            return Ok(accepted);
        }
        Err(PeerError::Connect(match self {
            Self::Files(_) => "its certificate has no allowed name (tuning.peerAllowedNames)".to_owned(),
            Self::Managed(_) => format!("its certificate is not that of a replica: it lacks the name {PEER_NAME}"),
        }))
    }

    /// Whether the certificate at the start of a verified chain has an allowed name.
    fn allows(&self, chain: Option<&[CertificateDer<'_>]>) -> bool {
        let certificate = chain.and_then(<[_]>::first).and_then(|der| EndEntityCert::try_from(der).ok());
        let has = |name: &ServerName<'_>| {
            certificate.as_ref().is_some_and(|own| own.verify_is_valid_for_subject_name(name).is_ok())
        };
        match self {
            Self::Files(files) => files.allowed_names.is_empty() || files.allowed_names.iter().any(has),
            Self::Managed(_) => ServerName::try_from(PEER_NAME).is_ok_and(|name| has(&name)),
        }
    }

    /// Connects to a peer, whose certificate must be valid for `name`, or of the managed CA for
    /// replicas.
    ///
    /// # Errors
    /// As [`Self::accept`].
    pub async fn connect<T: AsyncRead + AsyncWrite + Unpin>(
        &self,
        name: &str,
        io: T,
    ) -> Result<client::TlsStream<T>, PeerError> {
        let proof = self.proof().await?;
        let config = client_config(&proof).map_err(|error| self.unusable(error))?;
        let name = match self {
            Self::Files(_) => name,
            Self::Managed(_) => PEER_NAME,
        };
        let name = ServerName::try_from(name.to_owned()).map_err(|error| PeerError::Connect(error.to_string()))?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, io);
        connecting.await.map_err(|error| not_connected(&error))
    }

    /// Reads the files, or waits for the managed certificate; callers limit how long.
    async fn proof(&self) -> Result<Arc<PeerProof>, PeerError> {
        match self {
            Self::Files(files) => {
                let files = files.clone();
                blocking(move || files.read()).await.map(Arc::new)
            }
            Self::Managed(managed) => {
                managed.peer_proof().await.ok_or_else(|| PeerError::Managed("there is none".to_owned()))
            }
        }
    }

    fn unusable(&self, error: rustls::Error) -> PeerError {
        match self {
            Self::Files(_) => unusable_files(error),
            Self::Managed(_) => PeerError::Managed(error.to_string()),
        }
    }
}

fn server_config(proof: &PeerProof) -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(proof.roots.clone(), provider.clone()).build();
    let verifier = verifier.map_err(|error| rustls::Error::General(error.to_string()))?;
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = builder.with_client_cert_verifier(verifier);
    let mut config = builder.with_single_cert(proof.chain.clone(), proof.key.clone_key())?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn client_config(proof: &PeerProof) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = builder.with_root_certificates(proof.roots.clone());
    let mut config = builder.with_client_auth_cert(proof.chain.clone(), proof.key.clone_key())?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

impl PeerTlsFiles {
    /// Checks that the files can be used.
    ///
    /// # Errors
    /// [`PeerError::Files`] names the file and the problem.
    pub fn check(&self) -> Result<(), PeerError> {
        let proof = self.read()?;
        server_config(&proof).map_err(unusable_files)?;
        client_config(&proof).map(drop).map_err(unusable_files)
    }

    fn read(&self) -> Result<PeerProof, PeerError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| PeerError::Files(format!("cannot read {}: {error}", path.display())))
        };
        let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, PeerError> {
            let read = read(path)?;
            let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read).collect();
            let all = all.map_err(|error| self.unusable(path, explain_pem(&error)))?;
            if all.is_empty() { Err(self.unusable(path, "it contains no PEM certificate")) } else { Ok(all) }
        };
        let chain = certificates(&self.cert_file)?;
        let ca = certificates(&self.ca_file)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key_file)?);
        let key = key.map_err(|error| self.unusable(&self.key_file, explain_pem(&error)))?;
        let mut roots = RootCertStore::empty();
        for certificate in ca {
            roots.add(certificate).map_err(|error| self.unusable(&self.ca_file, error))?;
        }
        Ok(PeerProof { chain, key, roots: Arc::new(roots) })
    }

    fn unusable(&self, path: &Path, error: impl std::fmt::Display) -> PeerError {
        PeerError::Files(format!("{} cannot be used: {error}", path.display()))
    }
}

/// Error of a failed handshake with a peer. A peer that closes the connection without an error may
/// have too many others for a moment.
fn not_connected(error: &io::Error) -> PeerError {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    if matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) {
        return PeerError::Unreachable(error.to_string());
    }
    PeerError::Connect(error.to_string())
}

fn unusable_files(error: rustls::Error) -> PeerError {
    PeerError::Files(format!("they cannot be used: {error}"))
}

/// Runs file reads on the blocking thread pool, because the disk may be slow.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PeerError> + Send + 'static,
) -> Result<T, PeerError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(PeerError::Files("reading the files failed".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_closes_without_a_word_is_tried_again() {
        for (kind, may_pass) in [
            (io::ErrorKind::UnexpectedEof, true),
            (io::ErrorKind::ConnectionReset, true),
            (io::ErrorKind::BrokenPipe, true),
            (io::ErrorKind::InvalidData, false),
        ] {
            assert_eq!(not_connected(&io::Error::from(kind)).may_pass(), may_pass, "{kind:?}");
        }
    }
}
