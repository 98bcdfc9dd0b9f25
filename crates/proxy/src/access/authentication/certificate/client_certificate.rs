//! The certificate of a connection, and what it says about the caller.
//!
//! A chain costs signatures to verify, so that is done once, when the connection begins, and again
//! only if it proved nothing and other CAs are trusted since. A caller that is known stays known
//! while its connection lasts, until its certificate ends.

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
use crate::access::authentication::caller::KnownCaller;

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

/// What a certificate says about the caller.
#[derive(Debug, Clone)]
pub enum CertificateVerdict {
    /// Its holder.
    Known(Arc<KnownCaller>),
    /// Nothing, and why. Anonymous requests may be sent with it.
    Nothing(&'static str),
    /// It must not be used, and why.
    Refused(&'static str),
    /// That cannot be said yet, and why.
    Unavailable(&'static str),
}

/// The certificate that a client has presented, and of which it has the private key.
pub struct ClientCertificate {
    cas: Arc<TrustedCas>,
    state: Mutex<State>,
}

enum State {
    Known(Arc<KnownCaller>),
    /// The verdict on the chain, by the CAs of this generation.
    Unknown {
        chain: Vec<CertificateDer<'static>>,
        generation: u64,
        verdict: CertificateVerdict,
    },
}

impl ClientCertificate {
    /// Verifies a chain, whose first certificate is the client's.
    pub fn new(chain: &[CertificateDer<'_>], cas: Arc<TrustedCas>) -> Arc<Self> {
        let (trusted, generation) = cas.newest();
        let state = match verdict(chain, &trusted, &cas) {
            CertificateVerdict::Known(caller) => State::Known(caller),
            verdict => {
                let chain = chain.iter().map(|der| der.clone().into_owned()).collect();
                State::Unknown { chain, generation, verdict }
            }
        };
        Arc::new(Self { cas, state: Mutex::new(state) })
    }

    /// What it says about the caller.
    pub fn verdict(&self) -> CertificateVerdict {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Unknown { chain, generation, verdict: last } = &mut *state {
            let (trusted, newest) = self.cas.newest();
            if *generation != newest {
                *generation = newest;
                match verdict(chain, &trusted, &self.cas) {
                    CertificateVerdict::Known(caller) => *state = State::Known(caller),
                    other => *last = other,
                }
            }
        }
        match &*state {
            State::Known(caller) if caller.is_expired() => CertificateVerdict::Refused(WRONG_TIME),
            State::Known(caller) => CertificateVerdict::Known(caller.clone()),
            State::Unknown { verdict, .. } => verdict.clone(),
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
    if let Err(untrusted) = bundle.verify(chain, now) {
        return CertificateVerdict::Refused(match untrusted {
            Untrusted::UnknownCa => UNKNOWN_CA,
            Untrusted::WrongTime => WRONG_TIME,
            Untrusted::WrongUsage => WRONG_USAGE,
        });
    }
    match chain.first().ok_or(NoUser::Unusable).and_then(subject::holder) {
        Ok(holder) => {
            let expires_at = Instant::now().checked_add(holder.not_after.saturating_sub(now));
            let identity = holder.identity.without_extra(&cas.ignored_extra);
            CertificateVerdict::Known(KnownCaller::new(identity, expires_at))
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
