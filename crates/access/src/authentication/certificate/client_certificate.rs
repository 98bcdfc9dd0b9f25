//! The certificate of a connection, and its verdict about the caller.
//!
//! A chain costs signatures to verify, so that is done once, when the connection begins, and again
//! when other CAs are trusted. A request that has arrived stays its caller's, until the certificate
//! or one above it ends.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

use super::{
    bundle::{CaBundle, Untrusted},
    subject::{self, NoUser},
    trusted_cas::{Trusted, TrustedCas},
};
use crate::authentication::caller::KnownCaller;

const UNKNOWN_CA: &str = "the client certificate is not of a CA that kubefan trusts (--client-ca-file, otherwise client-ca-file of \
    the ConfigMap kube-system/extension-apiserver-authentication), or it may not name a user";
const WRONG_TIME: &str =
    "the client certificate, or one above it, is not valid yet or has expired: connect with one that is valid now";
const WRONG_USAGE: &str = "the client certificate, or one above it, is not for clients (extended key usage clientAuth)";
const UNUSABLE: &str = "the subject of the client certificate cannot be read, or has no single uid";
const NAMELESS: &str = "the client certificate names no user: its subject has no CN";
const NO_CA: &str = "kubefan trusts no CA of client certificates: it has no --client-ca-file, and found none in the ConfigMap \
    kube-system/extension-apiserver-authentication";
const UNREAD: &str = "kubefan could not read yet which CAs of client certificates it trusts; try again";

/// The caller, as a certificate proves it.
#[derive(Debug, Clone)]
pub enum CertificateVerdict {
    /// The holder of the certificate.
    Known(Arc<KnownCaller>),
    /// The certificate proves nothing, for this reason. Anonymous requests may be sent with it.
    Nothing(&'static str),
    /// The certificate must not be used, for this reason.
    Refused(&'static str),
    /// The verdict is not known yet, and why.
    Unavailable(&'static str),
}

/// The certificate that a client has presented. The client has proved that it has the private key.
pub struct ClientCertificate {
    chain: Vec<CertificateDer<'static>>,
    cas: Arc<TrustedCas>,
    last: Mutex<LastVerdict>,
}

/// The verdict on the chain, by the CAs of this generation.
struct LastVerdict {
    verdict: CertificateVerdict,
    generation: u64,
}

impl ClientCertificate {
    /// Verifies a chain, whose first certificate is the client's.
    pub fn new(chain: &[CertificateDer<'_>], cas: Arc<TrustedCas>) -> Arc<Self> {
        let (trusted, generation) = cas.newest();
        let last = Mutex::new(LastVerdict { verdict: verdict(chain, &trusted, &cas), generation });
        let chain = chain.iter().map(|der| der.clone().into_owned()).collect();
        Arc::new(Self { chain, cas, last })
    }

    /// Returns the verdict about the caller of a request that has arrived now.
    pub fn verdict(&self) -> CertificateVerdict {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (trusted, generation) = self.cas.newest();
        if last.generation != generation {
            *last = LastVerdict { verdict: verdict(&self.chain, &trusted, &self.cas), generation };
        }
        match &last.verdict {
            CertificateVerdict::Known(caller) if caller.is_expired() => CertificateVerdict::Refused(WRONG_TIME),
            verdict => verdict.clone(),
        }
    }
}

fn verdict(chain: &[CertificateDer<'_>], trusted: &Trusted, cas: &TrustedCas) -> CertificateVerdict {
    match trusted {
        Trusted::Unread => CertificateVerdict::Unavailable(UNREAD),
        Trusted::None => CertificateVerdict::Nothing(NO_CA),
        Trusted::Bundle(bundle) => verified(chain, bundle, cas),
    }
}

fn verified(chain: &[CertificateDer<'_>], bundle: &CaBundle, cas: &TrustedCas) -> CertificateVerdict {
    let now = (cas.wall_clock)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let not_after = match bundle.verify(chain, now) {
        Ok(not_after) => not_after,
        Err(Untrusted::UnknownCa) => return CertificateVerdict::Refused(UNKNOWN_CA),
        Err(Untrusted::WrongTime) => return CertificateVerdict::Refused(WRONG_TIME),
        Err(Untrusted::WrongUsage) => return CertificateVerdict::Refused(WRONG_USAGE),
    };
    match chain.first().ok_or(NoUser::Unusable).and_then(subject::holder) {
        Ok(identity) => {
            let expires_at = Instant::now().checked_add(not_after.saturating_sub(now));
            CertificateVerdict::Known(KnownCaller::new(identity.without_extra(&cas.ignored_extra), expires_at))
        }
        Err(NoUser::Nameless) => CertificateVerdict::Nothing(NAMELESS),
        Err(NoUser::Unusable) => CertificateVerdict::Refused(UNUSABLE),
    }
}

/// Leaves the chain out.
impl fmt::Debug for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCertificate").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
