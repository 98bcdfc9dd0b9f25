//! A bearer token: fixed, or in a file.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use kubefan_common::token_file::{TokenFile, trimmed};
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
            (Some(file), _) => Ok(Self::file(file.to_owned(), None)),
            (None, Some(token)) => trimmed(token).map(Self::Fixed).map_err(|fault| fault.to_string()),
            (None, None) => Ok(Self::None),
        }
    }

    /// The token in a file, and until it can be read the one beside it.
    pub(crate) fn file(path: PathBuf, inline: Option<HeaderValue>) -> Self {
        Self::File(TokenFile::new(path, inline, READ_INTERVAL))
    }

    /// Whether another token may take the place of this one.
    pub(crate) fn may_change(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// The header for the next request.
    pub(crate) async fn header(&self) -> Result<Option<HeaderValue>, String> {
        match self {
            Self::None => Ok(None),
            Self::Fixed(header) => Ok(Some(header.clone())),
            Self::File(file) => file.header().await.map(Some).map_err(|error| error.to_string()),
        }
    }

    /// Reads the file again after the server refused `refused`. `None` if there is no other token.
    pub(crate) async fn replacement(&self, refused: Option<&HeaderValue>) -> Option<HeaderValue> {
        let Self::File(file) = self else { return None };
        file.replacement(refused).await
    }

    /// Reads the file again for the next request: the token that was sent no longer counts.
    pub(crate) fn expire(&self, sent: Option<&HeaderValue>) {
        if let Self::File(file) = self {
            file.expire(sent);
        }
    }
}
