//! A bearer token in a file that is replaced before it runs out, as a pod's service account token is.
//!
//! kube-client has this too, but it sends the file's closing newline along, which is no header value; client-go cuts it.

use std::{
    fs, io,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::HeaderValue;
use kube_client::client::AuthError;
use tokio::time::Instant;

/// As client-go: a token is read again after a minute. A kubelet replaces it at 80 % of its life, of ten minutes at least.
const READ_INTERVAL: Duration = Duration::from_secs(60);

/// The token of one file.
pub(super) struct TokenFile {
    path: PathBuf,
    cached: Mutex<Option<(HeaderValue, Instant)>>,
}

impl TokenFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, cached: Mutex::new(None) }
    }

    /// The `Authorization` header. A file that cannot be read any more leaves the last token in use: some setups remove it on
    /// purpose once it was read.
    pub(super) fn header(&self) -> Result<HeaderValue, AuthError> {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = |(_, read): &&(HeaderValue, Instant)| read.elapsed() < READ_INTERVAL;
        if let Some((header, _)) = cached.as_ref().filter(fresh) {
            return Ok(header.clone());
        }
        let header = match (self.read(), cached.take()) {
            (Ok(header), _) => header,
            (Err(_), Some((last, _))) => last,
            (Err(error), None) => return Err(error),
        };
        *cached = Some((header.clone(), Instant::now()));
        Ok(header)
    }

    fn read(&self) -> Result<HeaderValue, AuthError> {
        let failed = |error| AuthError::ReadTokenFile(error, self.path.clone());
        let text = fs::read_to_string(&self.path).map_err(failed)?;
        let token = text.trim();
        if token.is_empty() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, "the file is empty")));
        }
        let mut header = HeaderValue::try_from(format!("Bearer {token}")).map_err(AuthError::InvalidBearerToken)?;
        header.set_sensitive(true);
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_replaced_token_is_used_within_a_minute_and_the_last_one_when_the_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let file = TokenFile::new(path.clone());
        assert!(file.header().is_err());
        fs::write(&path, "first\n").unwrap();
        assert_eq!(file.header().unwrap(), "Bearer first");
        fs::write(&path, "second").unwrap();
        assert_eq!(file.header().unwrap(), "Bearer first");
        tokio::time::advance(READ_INTERVAL).await;
        assert_eq!(file.header().unwrap(), "Bearer second");
        fs::remove_file(&path).unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        assert_eq!(file.header().unwrap(), "Bearer second");
        assert!(!format!("{:?}", file.header()).contains("second"));
    }
}
