//! The handshake with client certificates: the facts that it proves, and those that it leaves open.

use std::time::{Duration, SystemTime};

use kubefan_testkit::certificates::{Content, Signer};
use prometheus::Gauge;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    sign::{CertifiedKey, SingleCertAndKey},
};
use tokio_rustls::TlsConnector;

use super::*;
use crate::transport::{
    certificate::{Certificate, TlsFiles},
    tls_options::TlsVersion,
};

/// Presents a chain with any key, also with a key of another certificate.
fn present(chain: &[&Signer], key: &Signer) -> Arc<SingleCertAndKey> {
    let key = PrivateKeyDer::from_pem_slice(key.key_pem.as_bytes()).unwrap();
    let key = ring::sign::any_supported_type(&key).unwrap();
    let chain = chain.iter().map(|signer| signer.der.clone()).collect();
    Arc::new(CertifiedKey::new(chain, key).into())
}

fn wall_clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

struct Servers {
    acceptor: TlsAcceptor,
    ca: Signer,
}

impl Servers {
    fn new(min_version: TlsVersion) -> Self {
        let ca = Signer::root(Content::ca("servers"));
        let mut content = Content::client("kubefan", "x").usages(&[]).days(20_000, 20_000);
        content.0.subject_alt_names = vec![rcgen::SanType::DnsName("kubefan.test".try_into().unwrap())];
        let server = ca.sign(content);
        let dir = tempfile::tempdir().unwrap();
        let files = TlsFiles { cert_file: dir.path().join("crt"), private_key_file: dir.path().join("key") };
        std::fs::write(&files.cert_file, &server.pem).unwrap();
        std::fs::write(&files.private_key_file, &server.key_pem).unwrap();
        let expiration = Gauge::new("expiration", "For tests.").unwrap();
        let certificate = Certificate::read(&files, wall_clock, expiration).unwrap();
        let options = TlsOptions { min_version, cipher_suites: Vec::new() };
        Self { acceptor: acceptor(certificate, &options, true).unwrap(), ca }
    }

    fn client(
        &self,
        version: &'static rustls::SupportedProtocolVersion,
        presents: Arc<SingleCertAndKey>,
    ) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.der.clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_protocol_versions(&[version]).unwrap().with_root_certificates(roots);
        builder.with_client_cert_resolver(presents)
    }

    /// The chain that the server has got, or why there is no connection.
    async fn connect(&self, client: &Arc<ClientConfig>) -> Result<Vec<CertificateDer<'static>>, String> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (near, far) = tokio::io::duplex(1 << 16);
        let connector = TlsConnector::from(client.clone());
        let connecting = async move {
            let name = ServerName::try_from("kubefan.test").unwrap();
            let mut io = connector.connect(name, near).await?;
            // In TLS 1.3 the tickets for a resumption come after the handshake.
            io.write_all(b"x").await?;
            io.read_u8().await
        };
        let accepting = async {
            let mut io = self.acceptor.accept(far).await?;
            let chain = io.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
            io.read_u8().await?;
            io.write_all(b"y").await?;
            Ok::<_, std::io::Error>(chain)
        };
        let (connected, accepted) = tokio::join!(connecting, accepting);
        let chain = accepted.map_err(|error| error.to_string())?;
        connected
            .map(|_| chain.into_iter().map(CertificateDer::into_owned).collect())
            .map_err(|error| error.to_string())
    }
}

const VERSIONS: [&rustls::SupportedProtocolVersion; 2] = [&rustls::version::TLS12, &rustls::version::TLS13];

/// The clients' certificates are valid in 2027. The server's certificate counts now.
fn alice(ca: &Signer) -> Signer {
    ca.sign(Content::client("alice", "readers"))
}

#[tokio::test]
async fn a_copy_of_a_certificate_without_its_key_fails_the_handshake() {
    let servers = Servers::new(TlsVersion::Tls12);
    let ca = Signer::root(Content::ca("clients"));
    let alice = alice(&ca);
    let thief = Signer::root(Content::client("thief", "x"));
    for version in VERSIONS {
        let with = |key: &Signer| Arc::new(servers.client(version, present(&[&alice], key)));
        assert_eq!(servers.connect(&with(&alice)).await, Ok(vec![alice.der.clone()]), "{version:?}");
        let stolen = servers.connect(&with(&thief)).await;
        assert!(stolen.is_err(), "{version:?}: {stolen:?}");
    }
}

#[tokio::test]
async fn a_certificate_of_any_ca_passes_the_handshake() {
    let servers = Servers::new(TlsVersion::Tls12);
    let expired = Signer::root(Content::client("expired", "x").days(2, -1));
    for version in VERSIONS {
        let client = Arc::new(servers.client(version, present(&[&expired], &expired)));
        assert_eq!(servers.connect(&client).await, Ok(vec![expired.der.clone()]));
    }
}

/// A resumed session shows the chain of the handshake that began it. It is verified again for each
/// connection, so a certificate that was removed from trust does not live on in tickets.
#[tokio::test]
async fn a_resumed_session_shows_the_same_chain() {
    let servers = Servers::new(TlsVersion::Tls12);
    let ca = Signer::root(Content::ca("clients"));
    let alice = alice(&ca);
    for version in VERSIONS {
        let client = Arc::new(servers.client(version, present(&[&alice], &alice)));
        for _ in 0..2 {
            assert_eq!(servers.connect(&client).await, Ok(vec![alice.der.clone()]));
        }
    }
}

#[tokio::test]
async fn a_long_chain_fails_the_handshake() {
    let servers = Servers::new(TlsVersion::Tls12);
    let alice = alice(&Signer::root(Content::ca("clients")));
    let connect = async |length: usize| {
        let chain = vec![&alice; length];
        let client = servers.client(&rustls::version::TLS13, present(&chain, &alice));
        servers.connect(&Arc::new(client)).await.map(|chain| chain.len())
    };
    assert_eq!(connect(CLIENT_CHAIN_LENGTH_MAX).await, Ok(CLIENT_CHAIN_LENGTH_MAX));
    let refused = connect(CLIENT_CHAIN_LENGTH_MAX + 1).await.unwrap_err();
    assert!(refused.contains("too long"), "{refused}");
}

#[tokio::test]
async fn a_client_of_an_older_version_than_the_least_is_refused() {
    let servers = Servers::new(TlsVersion::Tls13);
    let alice = alice(&Signer::root(Content::ca("clients")));
    let [old, new] = VERSIONS.map(|version| Arc::new(servers.client(version, present(&[&alice], &alice))));
    assert!(servers.connect(&old).await.is_err());
    assert!(servers.connect(&new).await.is_ok());
}
