//! The bundle of CAs in use. A new one replaces it as a whole.
//!
//! Two hazards. A new bundle may be half written: a bundle that cannot be used never replaces the
//! one in use. And the bundle of the cluster may not be read yet: then no holder of a certificate
//! can be identified, which is no reason to refuse them for good.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tracing::{info, warn};

use super::bundle::{BundleError, CaBundle};
use crate::authentication::caller::Clock;

/// The shortest interval between two checks of the file for a new bundle.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);
/// The longest bundle, in bytes: about a thousand CAs. As much fits in a ConfigMap.
const BUNDLE_BYTES_MAX: u64 = 1 << 20;

/// The file with the CAs cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--client-ca-file {}: {message}", .file.display())]
pub struct ClientCaError {
    file: PathBuf,
    message: String,
}

/// The CAs that are trusted to name users.
pub struct TrustedCas {
    file: Option<PathBuf>,
    pub(super) wall_clock: Clock,
    /// The extras of users that are left out.
    pub(super) ignored_extra: Vec<String>,
    current: Mutex<Current>,
}

/// The CAs that are trusted now.
#[derive(Clone)]
pub(super) enum Trusted {
    /// Not known yet.
    Unread,
    /// No CA.
    None,
    /// The CAs of this bundle.
    Bundle(Arc<CaBundle>),
}

struct Current {
    trusted: Trusted,
    /// Grows with every change.
    generation: u64,
    pem: Vec<u8>,
    looked_at: Instant,
}

impl TrustedCas {
    /// The CAs of a file. Users have no extras with these keys.
    ///
    /// # Errors
    /// The file cannot be read or used.
    pub fn of_file(file: PathBuf, wall_clock: Clock, ignored_extra: Vec<String>) -> Result<Arc<Self>, ClientCaError> {
        let unusable = |message: String| ClientCaError { file: file.clone(), message };
        let pem = read(&file).map_err(unusable)?;
        let cas = Self::new(Some(file.clone()), wall_clock, ignored_extra);
        cas.replace(&pem).map_err(|error| unusable(error.to_string()))?;
        Ok(Arc::new(cas))
    }

    /// The CAs of another source, which [`Self::replace`] will bring.
    pub fn unread(wall_clock: Clock, ignored_extra: Vec<String>) -> Arc<Self> {
        Arc::new(Self::new(None, wall_clock, ignored_extra))
    }

    fn new(file: Option<PathBuf>, wall_clock: Clock, ignored_extra: Vec<String>) -> Self {
        let looked_at = Instant::now();
        let current = Current { trusted: Trusted::Unread, generation: 0, pem: Vec::new(), looked_at };
        Self { file, wall_clock, ignored_extra, current: Mutex::new(current) }
    }

    /// Whether they come from a file.
    pub fn is_of_file(&self) -> bool {
        self.file.is_some()
    }

    /// Trusts the CAs of a bundle in PEM from now on, and no others. Returns false if they are the
    /// same as before.
    ///
    /// # Errors
    /// The bundle cannot be used. Then the CAs stay as they are.
    pub fn replace(&self, pem: &[u8]) -> Result<bool, BundleError> {
        self.current().replace(pem)
    }

    /// Trusts no CA, unless one is trusted already.
    pub fn trust_none(&self) {
        let mut current = self.current();
        if matches!(current.trusted, Trusted::Unread) {
            current.trusted = Trusted::None;
            current.generation += 1;
        }
    }

    /// Reads the file again now, and logs its content. A bundle that cannot be used leaves the one
    /// in use.
    pub fn reload(&self) {
        let Some(file) = &self.file else { return };
        if !self.current().renew(file) {
            info!(client_ca_file = %file.display(), "the CAs of clients were read again; they have not changed");
        }
    }

    /// The CAs, and a number that grows when they change. The file is small and rarely read, so a
    /// connection may wait for that.
    pub(super) fn newest(&self) -> (Trusted, u64) {
        let mut current = self.current();
        if let Some(file) = &self.file
            && current.looked_at.elapsed() >= RENEWAL_INTERVAL
        {
            current.renew(file);
        }
        (current.trusted.clone(), current.generation)
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Current {
    fn replace(&mut self, pem: &[u8]) -> Result<bool, BundleError> {
        if self.pem == pem && matches!(self.trusted, Trusted::Bundle(_)) {
            return Ok(false);
        }
        let bundle = CaBundle::parse(pem)?;
        if bundle.ignored() > 0 {
            let ignored = bundle.ignored();
            warn!(ignored, "certificates in the bundle of the CAs of clients may not sign client certificates");
        }
        self.trusted = Trusted::Bundle(Arc::new(bundle));
        self.generation += 1;
        self.pem = pem.to_vec();
        Ok(true)
    }

    /// Reads the file again. False if it has not changed.
    fn renew(&mut self, file: &Path) -> bool {
        self.looked_at = Instant::now();
        let renewed = read(file).and_then(|pem| self.replace(&pem).map_err(|error| error.to_string()));
        let client_ca_file = file.display();
        match renewed {
            Ok(false) => return false,
            Ok(true) => info!(%client_ca_file, "the CAs of clients were renewed"),
            Err(error) => {
                warn!(%client_ca_file, error, "the renewed CAs of clients cannot be used; the old ones stay in use");
            }
        }
        true
    }
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    let unreadable = |error| format!("cannot read it: {error}");
    let bytes = std::fs::metadata(file).map_err(unreadable)?.len();
    if bytes > BUNDLE_BYTES_MAX {
        return Err(format!("it has {bytes} bytes, and a bundle has at most {BUNDLE_BYTES_MAX}"));
    }
    std::fs::read(file).map_err(unreadable)
}

impl fmt::Debug for TrustedCas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrustedCas").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
