//! The managed certificate as the servers use it: the last one that was read, or the reason why
//! there is none yet.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustls::{
    RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::sync::{Notify, watch};

use super::{
    issue::{IssueError, Issued},
    managed_options::ObjectName,
    material::Material,
};

/// A replica's certificate for its peers, and the CAs that it verifies them against.
pub struct PeerProof {
    /// Certificate of the replica.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key.
    pub key: PrivateKeyDer<'static>,
    /// The CAs.
    pub roots: Arc<RootCertStore>,
}

/// The certificates in use.
#[derive(Clone)]
pub(super) struct Held {
    /// The serving certificate.
    pub(super) certified: Arc<CertifiedKey>,
    /// `None` if it could not be made.
    pub(super) peer: Option<HeldProof>,
}

/// A proof that is in use.
#[derive(Clone)]
pub(super) struct HeldProof {
    proof: Arc<PeerProof>,
    /// Middle of the certificate's validity, in seconds since 1970: it is renewed then.
    pub(super) renewed_at: u64,
}

/// The managed certificate of this process.
pub struct ManagedTls {
    secret: ObjectName,
    held: watch::Sender<Option<Held>>,
    /// The end of the certificate's validity, or the reason why the Secret could not be used at the
    /// last look.
    status: Mutex<Result<String, String>>,
    pub(super) asked: Notify,
}

impl ManagedTls {
    /// Returns a certificate that has not been read.
    pub fn unread(secret: ObjectName) -> Arc<Self> {
        let status = Mutex::new(Err("it has not been read yet".to_owned()));
        Arc::new(Self { secret, held: watch::Sender::new(None), status, asked: Notify::new() })
    }

    /// Returns a certificate that has been read once. `None` if there is none that can be used.
    pub fn of(secret: ObjectName, material: &Material, now: u64) -> Option<Arc<Self>> {
        let (certified, facts) = material.certified()?;
        let peer = HeldProof::make(material, now, facts.not_after)?.ok();
        let managed = Self::unread(secret);
        managed.hold(Held { certified, peer });
        Some(managed)
    }

    /// Looks at the Secret now.
    pub fn look_now(&self) {
        self.asked.notify_one();
    }

    /// Whether there is a certificate to serve with, and a line about it.
    pub fn readiness(&self) -> (bool, String) {
        let is_held = self.held.borrow().is_some();
        let secret = &self.secret;
        match &*self.status() {
            Ok(text) => (is_held, format!("certificate of the Secret {secret}: {text}")),
            Err(why) if is_held => (true, format!("certificate of the Secret {secret}: the last one is in use; {why}")),
            Err(why) => (false, format!("certificate of the Secret {secret}: {why}")),
        }
    }

    /// Returns this replica's proof to its peers. Waits until there is one.
    pub async fn peer_proof(&self) -> Option<Arc<PeerProof>> {
        let mut held = self.held.subscribe();
        let held = held.wait_for(|held| held.as_ref().is_some_and(|held| held.peer.is_some())).await.ok()?;
        Some(held.as_ref()?.peer.as_ref()?.proof.clone())
    }

    pub(super) fn held(&self) -> Option<Held> {
        self.held.borrow().clone()
    }

    pub(super) fn hold(&self, held: Held) {
        self.held.send_replace(Some(held));
    }

    pub(super) fn status(&self) -> MutexGuard<'_, Result<String, String>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the handshakes of the admin port: before there is a certificate, with one that no
    /// client trusts, so that the kubelet's probes are answered, which do not verify it.
    ///
    /// # Errors
    /// No such certificate can be made.
    pub fn or_stand_in(self: &Arc<Self>) -> Result<Arc<dyn ResolvesServerCert>, rustls::Error> {
        let failed = |error: rcgen::Error| rustls::Error::General(error.to_string());
        let key = rcgen::KeyPair::generate().map_err(failed)?;
        let params = rcgen::CertificateParams::new([self.secret.name.clone()]).map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?;
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let stand_in = CertifiedKey::from_der(vec![certificate.der().clone()], key, &ring::default_provider())?;
        Ok(Arc::new(OrStandIn { managed: self.clone(), stand_in: Arc::new(stand_in) }))
    }
}

impl HeldProof {
    /// Makes one from the CA's key. `None` without a CA.
    pub(super) fn make(material: &Material, now: u64, not_after: u64) -> Option<Result<Self, IssueError>> {
        let not_after = not_after.min(material.signing_not_after(now)?);
        let issued = material.peer_certificate(now, not_after)?;
        Some(issued.and_then(|Issued { certificate, key }| {
            let unreadable = |_| IssueError::from(rcgen::Error::CouldNotParseCertificate);
            let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
            let key = PrivateKeyDer::from_pem_slice(key.0.as_bytes()).map_err(unreadable)?;
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(material.roots());
            let proof = PeerProof { chain: chain.map_err(unreadable)?, key, roots: Arc::new(roots) };
            Ok(Self { proof: Arc::new(proof), renewed_at: now + not_after.saturating_sub(now) / 2 })
        }))
    }
}

impl ResolvesServerCert for ManagedTls {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.held.borrow().as_ref().map(|held| held.certified.clone())
    }
}

/// Leaves the keys out.
impl fmt::Debug for ManagedTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedTls").field("secret", &self.secret).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct OrStandIn {
    managed: Arc<ManagedTls>,
    stand_in: Arc<CertifiedKey>,
}

impl ResolvesServerCert for OrStandIn {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.managed.resolve(hello).unwrap_or_else(|| self.stand_in.clone()))
    }
}
