//! A bearer token in a file that is replaced before the token expires, like a pod's service account
//! token.
//!
//! kube-client can read such files too, but it sends the trailing newline, which is not valid in a
//! header. client-go trims it.

use std::{
    fs, io,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::HeaderValue;
use kube_client::client::AuthError;
use tokio::time::Instant;

use kubefan_common::kubeconfig::{TokenOfFile, bearer};

/// The time after which the file is read again, as in client-go. A kubelet replaces a token at 80 %
/// of its lifetime, which is at least ten minutes.
const READ_INTERVAL: Duration = Duration::from_secs(60);

/// The token in one file.
pub(crate) struct TokenFile {
    path: PathBuf,
    /// The header of the token beside the file, for as long as the file cannot be read.
    inline: Option<HeaderValue>,
    cached: Mutex<Option<(HeaderValue, Instant)>>,
}

impl TokenFile {
    /// The token in a file, with the one beside it in the kubeconfig.
    pub(crate) fn new(TokenOfFile { path, inline }: TokenOfFile) -> Self {
        Self { path, inline, cached: Mutex::new(None) }
    }

    /// The `Authorization` header. If the file can no longer be read, the last token stays in use,
    /// because some setups delete the file after it was read.
    pub(crate) fn header(&self) -> Result<HeaderValue, AuthError> {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = |(_, read): &&(HeaderValue, Instant)| read.elapsed() < READ_INTERVAL;
        if let Some((header, _)) = cached.as_ref().filter(fresh) {
            return Ok(header.clone());
        }
        let header = match (self.read(), cached.take()) {
            (Ok(header), _) => header,
            (Err(_), Some((last, _))) => last,
            (Err(error), None) => self.inline.clone().ok_or(error)?,
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
        bearer(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_replaced_token_is_used_within_a_minute_and_survives_deletion_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let file = TokenFile::new(TokenOfFile { path: path.clone(), inline: None });
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

    #[tokio::test(start_paused = true)]
    async fn a_token_beside_the_file_counts_until_the_file_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let file = TokenFile::new(TokenOfFile { path: path.clone(), inline: Some(bearer("inline").unwrap()) });
        assert_eq!(file.header().unwrap(), "Bearer inline");
        fs::write(&path, "of-the-file").unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        assert_eq!(file.header().unwrap(), "Bearer of-the-file");
    }
}
