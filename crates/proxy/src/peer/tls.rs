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
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use webpki::EndEntityCert;

use super::error::PeerError;
use crate::managed_tls::{ManagedTls, PEER_NAME};

/// What a replica proves itself with to its peers, and what it verifies them against.
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
    /// Its private key.
    pub key_file: PathBuf,
    /// The CA that every peer's certificate is verified against.
    pub ca_file: PathBuf,
    /// A peer that connects must have one of these names in its certificate (DNS names or IP
    /// addresses of `subjectAltName`); empty for any.
    pub allowed_names: Vec<ServerName<'static>>,
}

struct Proof {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
}

impl PeerTls {
    /// Accepts a connection from a peer.
    ///
    /// # Errors
    /// [`PeerError::Tls`] if a file cannot be used, [`PeerError::Connect`] if the handshake fails
    /// or the other side is not a peer.
    pub async fn accept<T: AsyncRead + AsyncWrite + Unpin>(&self, io: T) -> Result<server::TlsStream<T>, PeerError> {
        let config = self.proof().await?.server_config()?;
        let accepted = TlsAcceptor::from(Arc::new(config)).accept(io).await;
        let accepted = accepted.map_err(|error| PeerError::Connect(error.to_string()))?;
        match self.allows(accepted.get_ref().1.peer_certificates()) {
            true => Ok(accepted),
            false => Err(PeerError::Connect("its certificate has no allowed name (--peer-allowed-names)".to_owned())),
        }
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
        let config = self.proof().await?.client_config()?;
        let name = match self {
            Self::Files(_) => name,
            Self::Managed(_) => PEER_NAME,
        };
        let name = ServerName::try_from(name.to_owned()).map_err(|error| PeerError::Connect(error.to_string()))?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, io);
        connecting.await.map_err(|error| PeerError::Connect(error.to_string()))
    }

    /// Reads the files, or waits for the managed certificate; callers limit how long.
    async fn proof(&self) -> Result<Proof, PeerError> {
        match self {
            Self::Files(files) => {
                let files = files.clone();
                blocking(move || files.read()).await
            }
            Self::Managed(managed) => match managed.peer_proof().await {
                Some(proof) => {
                    let (chain, key, roots) = (proof.chain.clone(), proof.key.clone_key(), proof.roots.clone());
                    Ok(Proof { chain, key, roots })
                }
                None => Err(PeerError::Connect("there is no managed certificate".to_owned())),
            },
        }
    }
}

impl Proof {
    fn server_config(self) -> Result<ServerConfig, PeerError> {
        let Self { chain, key, roots } = self;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
        let verifier = verifier.map_err(unusable)?;
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config =
            builder.and_then(|builder| builder.with_client_cert_verifier(verifier).with_single_cert(chain, key));
        let mut config = config.map_err(unusable)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    fn client_config(self) -> Result<ClientConfig, PeerError> {
        let Self { chain, key, roots } = self;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config =
            builder.and_then(|builder| builder.with_root_certificates(roots).with_client_auth_cert(chain, key));
        let mut config = config.map_err(unusable)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

impl PeerTlsFiles {
    /// Checks that the files can be used.
    ///
    /// # Errors
    /// [`PeerError::Tls`] names the file and the problem.
    pub fn check(&self) -> Result<(), PeerError> {
        self.read()?.server_config()?;
        self.read()?.client_config().map(|_| ())
    }

    fn read(&self) -> Result<Proof, PeerError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| PeerError::Tls(format!("cannot read {}: {error}", path.display())))
        };
        let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, PeerError> {
            let read = read(path)?;
            let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read).collect();
            let all = all.map_err(|error| self.unusable(path, error))?;
            if all.is_empty() { Err(self.unusable(path, "it contains no PEM certificate")) } else { Ok(all) }
        };
        let (chain, ca) = (certificates(&self.cert_file)?, certificates(&self.ca_file)?);
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key_file)?);
        let key = key.map_err(|error| self.unusable(&self.key_file, error))?;
        let mut roots = RootCertStore::empty();
        for certificate in ca {
            roots.add(certificate).map_err(|error| self.unusable(&self.ca_file, error))?;
        }
        Ok(Proof { chain, key, roots: Arc::new(roots) })
    }

    fn unusable(&self, path: &Path, error: impl std::fmt::Display) -> PeerError {
        PeerError::Tls(format!("{} cannot be used: {error}", path.display()))
    }
}

fn unusable(error: impl std::fmt::Display) -> PeerError {
    PeerError::Tls(format!("they cannot be used: {error}"))
}

/// Runs file reads on the blocking thread pool, because the disk may be slow.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PeerError> + Send + 'static,
) -> Result<T, PeerError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(PeerError::Tls("reading the files failed".to_owned())))
}
