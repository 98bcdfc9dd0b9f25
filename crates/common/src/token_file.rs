//! A bearer token in a file that is replaced before the token expires, like a pod's service account
//! token.
//!
//! The hazard is a token in a log. So no error quotes one, and the header is marked as sensitive:
//! its `Debug` form does not show it, and HTTP/2 does not index it.

use std::{
    io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tonic::codegen::http::{HeaderValue, header::InvalidHeaderValue};

/// The token in one file, with the header from its last reading.
pub struct TokenFile {
    path: PathBuf,
    read_interval: Duration,
    /// The header, and when it was read; `None`: it must be read again.
    cached: Mutex<Option<(HeaderValue, Option<Instant>)>>,
}

/// A token file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("token file {}: {fault}", path.display())]
pub struct TokenFileError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub fault: TokenFault,
}

/// The reason why a token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenFault {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(io::Error),
    /// There is only white space.
    #[error("the token is empty")]
    Empty,
    /// A line break, for example.
    #[error("the token has characters that a header cannot contain")]
    NoHeader(InvalidHeaderValue),
}

impl TokenFile {
    /// The token in a file that is read at most once in each interval. `inline` is the header until
    /// the file can be read.
    pub fn new(path: PathBuf, inline: Option<HeaderValue>, read_interval: Duration) -> Self {
        Self { path, read_interval, cached: Mutex::new(inline.map(|header| (header, None))) }
    }

    /// The `Authorization` header for the next request. If the file can no longer be read, the last
    /// token stays in use, because some setups delete the file after it was read.
    ///
    /// # Errors
    /// There has been no token yet.
    pub async fn header(&self) -> Result<HeaderValue, TokenFileError> {
        let last = self.cached().clone();
        if let Some((header, Some(read))) = &last
            && read.elapsed() < self.read_interval
        {
            return Ok(header.clone());
        }
        let header = match (self.read().await, last) {
            (Ok(header), _) => header,
            (Err(_), Some((last, _))) => last,
            (Err(error), None) => return Err(error),
        };
        self.store(&header);
        Ok(header)
    }

    /// Reads the file again after the server refused `refused`. `None` if there is no other token.
    pub async fn replacement(&self, refused: Option<&HeaderValue>) -> Option<HeaderValue> {
        let header = self.read().await.ok()?;
        self.store(&header);
        (Some(&header) != refused).then_some(header)
    }

    /// Reads the file again for the next request: the token that was sent no longer counts.
    pub fn expire(&self, sent: Option<&HeaderValue>) {
        // Another request may have read its replacement. An unreadable file keeps the token.
        if let Some((header, read)) = &mut *self.cached()
            && Some(&*header) == sent
        {
            *read = None;
        }
    }

    async fn read(&self) -> Result<HeaderValue, TokenFileError> {
        let read = tokio::fs::read_to_string(&self.path).await.map_err(TokenFault::Unreadable);
        read.and_then(|token| trimmed(&token)).map_err(|fault| TokenFileError { path: self.path.clone(), fault })
    }

    fn store(&self, header: &HeaderValue) {
        *self.cached() = Some((header.clone(), Some(Instant::now())));
    }

    fn cached(&self) -> MutexGuard<'_, Option<(HeaderValue, Option<Instant>)>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The header of a token as a file has it: with a line feed at its end, which client-go trims, too.
///
/// # Errors
/// It is not a token.
pub fn trimmed(token: &str) -> Result<HeaderValue, TokenFault> {
    match token.trim() {
        "" => Err(TokenFault::Empty),
        token => bearer(token).map_err(TokenFault::NoHeader),
    }
}

/// The header of a token.
///
/// # Errors
/// The token is not valid in a header.
pub fn bearer(token: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    let mut header = HeaderValue::try_from(format!("Bearer {token}"))?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const READ_INTERVAL: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_replaced_token_is_read_within_the_interval_and_at_once_after_a_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = TokenFile::new(path.clone(), None, READ_INTERVAL);
        assert!(token.header().await.unwrap_err().to_string().contains("token: No such file"));
        fs::write(&path, "first\n").unwrap();
        assert_eq!(token.header().await.unwrap(), "Bearer first");
        fs::write(&path, "second").unwrap();
        let first = token.header().await.unwrap();
        assert_eq!(first, "Bearer first");
        assert_eq!(token.replacement(Some(&first)).await.unwrap(), "Bearer second");
        let second = token.header().await.unwrap();
        assert_eq!(token.replacement(Some(&second)).await, None, "the file has no other token");
        fs::write(&path, "third").unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        assert_eq!(token.header().await.unwrap(), "Bearer third");
        fs::remove_file(&path).unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        let last = token.header().await.unwrap();
        assert_eq!(last, "Bearer third", "the last token stays in use");
        assert!(!format!("{last:?}").contains("third"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_no_longer_counts_is_read_again_unless_another_has_replaced_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "first").unwrap();
        let token = TokenFile::new(path.clone(), None, READ_INTERVAL);
        let first = token.header().await.unwrap();
        fs::write(&path, "second").unwrap();
        token.expire(Some(&first));
        assert_eq!(token.header().await.unwrap(), "Bearer second");
        fs::write(&path, "third").unwrap();
        token.expire(Some(&first));
        let second = token.header().await.unwrap();
        assert_eq!(second, "Bearer second", "it was replaced before");
        fs::remove_file(&path).unwrap();
        token.expire(Some(&second));
        assert_eq!(token.header().await.unwrap(), second, "a file that cannot be read keeps it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_beside_the_file_counts_until_the_file_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = TokenFile::new(path.clone(), Some(bearer("inline").unwrap()), READ_INTERVAL);
        assert_eq!(token.header().await.unwrap(), "Bearer inline");
        fs::write(&path, "of-the-file").unwrap();
        tokio::time::advance(READ_INTERVAL).await;
        assert_eq!(token.header().await.unwrap(), "Bearer of-the-file");
    }

    #[test]
    fn the_error_for_an_invalid_token_does_not_quote_it() {
        assert!(!trimmed("very\nsecret").unwrap_err().to_string().contains("secret"));
        assert!(matches!(trimmed(" \n"), Err(TokenFault::Empty)));
    }
}
