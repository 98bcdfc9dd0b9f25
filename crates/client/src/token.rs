//! A bearer token: fixed, or in a file that is replaced before the token expires, like a pod's
//! service account token.
//!
//! The hazard is a token in a log. So no error quotes one, and the header is marked as sensitive:
//! its `Debug` form does not show it, and HTTP/2 does not index it.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tonic::codegen::http::HeaderValue;

/// Directory in which Kubernetes mounts a pod's service account. The kubelet renews its `token`.
pub(crate) const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The time after which the file is read again.
const READ_INTERVAL: Duration = Duration::from_secs(10);

/// The source of the `Authorization` header.
pub(crate) enum Token {
    /// No header.
    None,
    /// Always this header.
    Fixed(HeaderValue),
    /// The token in a file.
    File(TokenFile),
}

/// A token file, with the header from its last reading.
pub(crate) struct TokenFile {
    path: PathBuf,
    /// The header, and when it was read; `None`: it must be read again.
    cached: Mutex<Option<(HeaderValue, Option<Instant>)>>,
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::None => "None",
            Self::Fixed(_) => "Fixed",
            Self::File(_) => "File",
        })
    }
}

impl Token {
    /// The token of the options of a connection. The file takes precedence, and is read with the
    /// first request.
    pub(crate) fn of(token: Option<&str>, file: Option<&Path>) -> Result<Self, String> {
        match (file, token) {
            (Some(file), _) => Ok(Self::file(file.to_owned())),
            (None, Some(token)) => header(token).map(Self::Fixed),
            (None, None) => Ok(Self::None),
        }
    }

    /// The token in a file.
    pub(crate) fn file(path: PathBuf) -> Self {
        Self::File(TokenFile { path, cached: Mutex::default() })
    }

    /// The token in a file, and until it can be read the one beside it.
    #[cfg(feature = "kubeconfig")]
    pub(crate) fn file_beside(path: PathBuf, inline: Option<HeaderValue>) -> Self {
        Self::File(TokenFile { path, cached: Mutex::new(inline.map(|header| (header, None))) })
    }

    /// Whether another token may take the place of this one.
    pub(crate) fn may_change(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// The header for the next request.
    ///
    /// If the file can no longer be read, the last token stays in use, because some setups delete
    /// the file after it was read.
    pub(crate) async fn header(&self) -> Result<Option<HeaderValue>, String> {
        match self {
            Self::None => Ok(None),
            Self::Fixed(header) => Ok(Some(header.clone())),
            Self::File(file) => file.header().await.map(Some),
        }
    }

    /// Reads the file again after the server refused `refused`. `None` if there is no other token.
    pub(crate) async fn replacement(&self, refused: Option<&HeaderValue>) -> Option<HeaderValue> {
        let Self::File(file) = self else { return None };
        let header = file.read().await.ok()?;
        file.store(&header);
        (Some(&header) != refused).then_some(header)
    }

    /// Reads the file again for the next request: the token that was sent no longer counts.
    pub(crate) fn expire(&self, sent: Option<&HeaderValue>) {
        let Self::File(file) = self else { return };
        let mut cached = file.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((header, read)) = cached.take() {
            // Another request may have read its replacement. An unreadable file keeps the token.
            let read = if Some(&header) == sent { None } else { read };
            *cached = Some((header, read));
        }
    }
}

impl TokenFile {
    async fn header(&self) -> Result<HeaderValue, String> {
        let last = self.cached.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match last {
            Some((header, Some(read))) if read.elapsed() < READ_INTERVAL => Ok(header),
            last => {
                let header = match (self.read().await, last) {
                    (Ok(header), _) => header,
                    (Err(_), Some((header, _))) => header,
                    (Err(error), None) => return Err(error),
                };
                self.store(&header);
                Ok(header)
            }
        }
    }

    async fn read(&self) -> Result<HeaderValue, String> {
        let failed = |problem: String| format!("token file {}: {problem}", self.path.display());
        let text = tokio::fs::read_to_string(&self.path).await.map_err(|error| failed(error.to_string()))?;
        header(&text).map_err(failed)
    }

    fn store(&self, header: &HeaderValue) {
        *self.cached.lock().unwrap_or_else(PoisonError::into_inner) = Some((header.clone(), Some(Instant::now())));
    }
}

fn header(token: &str) -> Result<HeaderValue, String> {
    let token = token.trim();
    if token.is_empty() {
        return Err("the token is empty".to_owned());
    }
    let mut header = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| "the token has characters that a header cannot contain".to_owned())?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_replaced_token_file_is_read_within_ten_seconds_and_at_once_after_a_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = Token::file(path.clone());
        assert!(token.header().await.unwrap_err().contains("token: No such file"));
        std::fs::write(&path, "first\n").unwrap();
        assert_eq!(token.header().await.unwrap().unwrap(), "Bearer first");
        std::fs::write(&path, "second").unwrap();
        let first = token.header().await.unwrap().unwrap();
        assert_eq!(first, "Bearer first");
        assert_eq!(token.replacement(Some(&first)).await.unwrap(), "Bearer second");
        let second = token.header().await.unwrap();
        assert_eq!(token.replacement(second.as_ref()).await, None, "the file has no other token");
        std::fs::write(&path, "third").unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        assert_eq!(token.header().await.unwrap().unwrap(), "Bearer third");
        std::fs::remove_file(&path).unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        let last = token.header().await.unwrap().unwrap();
        assert_eq!(last, "Bearer third", "the last token stays in use");
        assert!(!format!("{last:?} {token:?}").contains("third"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_no_longer_counts_is_read_again_unless_another_has_replaced_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "first").unwrap();
        let token = Token::file(path.clone());
        let first = token.header().await.unwrap();
        std::fs::write(&path, "second").unwrap();
        token.expire(first.as_ref());
        assert_eq!(token.header().await.unwrap().unwrap(), "Bearer second");
        std::fs::write(&path, "third").unwrap();
        token.expire(first.as_ref());
        let second = token.header().await.unwrap();
        assert_eq!(second.as_ref().unwrap(), "Bearer second", "it was replaced before");
        std::fs::remove_file(&path).unwrap();
        token.expire(second.as_ref());
        assert_eq!(token.header().await.unwrap(), second, "a file that cannot be read keeps it");
    }

    #[test]
    fn the_error_for_an_invalid_token_does_not_quote_it() {
        assert!(!Token::of(Some("very\nsecret"), None).unwrap_err().contains("secret"));
        assert!(Token::of(Some(" \n"), None).is_err());
    }
}
