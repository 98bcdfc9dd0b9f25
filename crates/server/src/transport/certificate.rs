//! The certificate of the data port: reads it, reads it again after it was renewed, and reports
//! when it expires.
//!
//! Two hazards. A renewal may be half written: a certificate that cannot be used never replaces the
//! one in use. And a certificate may expire silently: clients then fail, and only they know why. So
//! its end is a metric, and a certificate outside its time is logged as a warning, when it is read
//! and when it expires in use.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use prometheus::Gauge;
use rustls::{
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::time::sleep;
use tracing::{info, warn};

use kubefan_common::tls::explain_pem;
use kubefan_managed_tls::certificate_facts::{CertificateFacts, WrongTime};

/// A certificate and its private key, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert_file: PathBuf,
    /// The private key.
    pub private_key_file: PathBuf,
}

/// The certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--tls-cert-file {cert}, --tls-private-key-file {key}: {message}")]
pub struct TlsError {
    cert: String,
    key: String,
    message: String,
}

impl TlsFiles {
    /// Checks that the files can be used together. Their dates are not looked at.
    ///
    /// # Errors
    /// A file cannot be read or used, or the key is not the certificate's.
    pub fn check(&self) -> Result<(), TlsError> {
        Pem::read(self)?.certified(self).map(|_| ())
    }

    fn unusable(&self, message: impl fmt::Display) -> TlsError {
        let name = |path: &Path| path.display().to_string();
        TlsError { cert: name(&self.cert_file), key: name(&self.private_key_file), message: message.to_string() }
    }
}

/// Interval of the checks of the files for a renewed certificate. New connections use it, existing
/// ones do not.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

/// The wall clock, which the time of a certificate is compared with.
type Clock = fn() -> SystemTime;

/// The contents of the two files.
#[derive(PartialEq, Eq)]
struct Pem {
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl Pem {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| files.unusable(format!("cannot read {}: {error}", path.display())))
        };
        Ok(Self { cert: read(&files.cert_file)?, key: read(&files.private_key_file)? })
    }

    fn certified(&self, files: &TlsFiles) -> Result<Arc<CertifiedKey>, TlsError> {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&self.cert)
            .collect::<Result<_, _>>()
            .map_err(|error| files.unusable(format!("the first file: {}", explain_pem(&error))))?;
        if chain.is_empty() {
            return Err(files.unusable("the first file contains no certificate"));
        }
        let key = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|error| files.unusable(format!("the private key in the second file: {}", explain_pem(&error))))?;
        let certified = CertifiedKey::from_der(chain, key, &ring::default_provider());
        Ok(Arc::new(certified.map_err(|error| files.unusable(error))?))
    }
}

/// The certificate that the server presents.
pub struct Certificate {
    files: TlsFiles,
    wall_clock: Clock,
    /// End of the certificate's validity, in seconds since 1970.
    expiration: Gauge,
    current: Mutex<Current>,
}

struct Current {
    certified: Arc<CertifiedKey>,
    pem: Pem,
    /// `None` if they cannot be read.
    facts: Option<CertificateFacts>,
    /// The wrong time that was warned of.
    warned: Option<WrongTime>,
}

impl Certificate {
    /// Reads the files. `expiration` is set to the end of the certificate, in seconds since 1970.
    ///
    /// # Errors
    /// A file cannot be read or used, or the key is not the certificate's.
    pub fn read(files: &TlsFiles, wall_clock: Clock, expiration: Gauge) -> Result<Arc<Self>, TlsError> {
        let pem = Pem::read(files)?;
        let certified = pem.certified(files)?;
        let current = Current { certified, pem, facts: None, warned: None };
        let certificate = Self { files: files.clone(), wall_clock, expiration, current: Mutex::new(current) };
        certificate.begin_to_use(&mut certificate.current());
        Ok(Arc::new(certificate))
    }

    /// Reads the files again now, and logs their content. A certificate that cannot be used leaves
    /// the one in use.
    pub fn reload(&self) {
        if !self.renew(&mut self.current()) {
            let cert_file = self.files.cert_file.display();
            info!(%cert_file, "the certificate of the data port was read again; it has not changed");
        }
    }

    /// Checks the files again and again, without end. This task does so, and not handshakes,
    /// because the reported end must also be right if clients only keep old connections.
    pub async fn follow(&self) {
        loop {
            sleep(RENEWAL_INTERVAL).await;
            let mut current = self.current();
            self.renew(&mut current);
            self.warn_of_wrong_time(&mut current);
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the files again. False if they have not changed.
    fn renew(&self, current: &mut Current) -> bool {
        let renewed = Pem::read(&self.files).and_then(|pem| {
            if pem == current.pem {
                Ok(None)
            } else {
                pem.certified(&self.files).map(|certified| Some((certified, pem)))
            }
        });
        match renewed {
            Ok(None) => return false,
            Ok(Some((certified, pem))) => {
                current.certified = certified;
                current.pem = pem;
                info!(cert_file = %self.files.cert_file.display(), "the certificate of the data port was renewed");
                self.begin_to_use(current);
            }
            Err(error) => {
                warn!(%error, "the renewed certificate of the data port cannot be used; the old one stays in use");
            }
        }
        true
    }

    fn begin_to_use(&self, current: &mut Current) {
        current.facts = current.certified.cert.first().and_then(|der| CertificateFacts::of_der(der));
        current.warned = None;
        // Without an end that can be read, no alert on the end must fire.
        let ends = current.facts.as_ref().map_or(f64::INFINITY, |facts| facts.not_after as f64);
        self.expiration.set(ends);
        self.warn_of_wrong_time(current);
    }

    fn warn_of_wrong_time(&self, current: &mut Current) {
        let now = (self.wall_clock)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let wrong = current.facts.as_ref().and_then(|facts| facts.wrong_at(i64::try_from(now).unwrap_or(i64::MAX)));
        if let Some(wrong) = wrong.filter(|wrong| current.warned != Some(*wrong)) {
            warn!(
                cert_file = %self.files.cert_file.display(),
                "the certificate of the data port {wrong}; clients refuse it until it is renewed"
            );
        }
        current.warned = wrong;
    }
}

/// Leaves the key out.
impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current().certified.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_SECONDS: u64 = 1_800_000_000;
    const DAY_SECONDS: u64 = 86_400;

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(NOW_SECONDS)
    }

    fn gauge() -> Gauge {
        Gauge::new("expiration", "For tests.").unwrap()
    }

    fn files(dir: &tempfile::TempDir) -> TlsFiles {
        TlsFiles { cert_file: dir.path().join("tls.crt"), private_key_file: dir.path().join("tls.key") }
    }

    /// Writes a certificate that is valid for this many days before and after now.
    fn write(files: &TlsFiles, name: &str, days_before: i64, days_after: i64) {
        let mut params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
        let at = |days: i64| {
            let second = NOW_SECONDS as i64 + days * DAY_SECONDS as i64;
            rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(second as u64)
        };
        params.not_before = at(-days_before);
        params.not_after = at(days_after);
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(&files.cert_file, params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(&files.private_key_file, key.serialize_pem()).unwrap();
    }

    /// Follows the files until the test ends.
    fn follow(certificate: &Arc<Certificate>) {
        let certificate = certificate.clone();
        tokio::spawn(async move { certificate.follow().await });
    }

    /// The least wait after which the files have been looked at once more.
    const AFTER_A_LOOK: Duration = RENEWAL_INTERVAL.saturating_add(Duration::from_millis(1));

    #[tokio::test(start_paused = true)]
    async fn a_renewed_certificate_is_used_and_a_broken_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(&dir);
        write(&files, "first.example", 1, 1);
        let certificate = Certificate::read(&files, now, gauge()).unwrap();
        follow(&certificate);
        let presented = || certificate.current().certified.cert.clone();
        let first = presented();
        write(&files, "second.example", 1, 1);
        assert_eq!(presented(), first, "the files are not read for each connection");
        sleep(AFTER_A_LOOK).await;
        let second = presented();
        assert_ne!(second, first);
        std::fs::write(&files.private_key_file, "half a fi").unwrap();
        sleep(AFTER_A_LOOK).await;
        assert_eq!(presented(), second);
        certificate.reload();
        assert_eq!(presented(), second);
        write(&files, "third.example", 1, 1);
        certificate.reload();
        assert_ne!(presented(), second, "a reload does not wait");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_renewed_certificate_is_reported_without_a_handshake() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(&dir);
        let expiration = gauge();
        write(&files, "a.example", 1, 1);
        follow(&Certificate::read(&files, now, expiration.clone()).unwrap());
        write(&files, "a.example", 1, 30);
        sleep(AFTER_A_LOOK).await;
        assert_eq!(expiration.get(), (NOW_SECONDS + 30 * DAY_SECONDS) as f64);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_certificate_is_reported_when_it_is_read_and_renewed() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(&dir);
        let expiration = gauge();
        write(&files, "a.example", 2, 3);
        let certificate = Certificate::read(&files, now, expiration.clone()).unwrap();
        assert_eq!(expiration.get(), (NOW_SECONDS + 3 * DAY_SECONDS) as f64);
        assert_eq!(certificate.current().warned, None);
        let at = |days: i64| NOW_SECONDS as i64 + days * DAY_SECONDS as i64;
        for (before, after, wrong) in [(3, -1, WrongTime::Expired(at(-1))), (-1, 2, WrongTime::NotYet(at(1)))] {
            write(&files, "a.example", before, after);
            certificate.reload();
            assert_eq!(expiration.get(), at(after) as f64);
            assert_eq!(certificate.current().warned, Some(wrong));
        }
        let text = WrongTime::Expired(at(-1)).to_string();
        assert_eq!(text, "has expired: it was valid until 2027-01-14T08:00:00Z");
    }
}
