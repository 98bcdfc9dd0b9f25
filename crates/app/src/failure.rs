//! The errors for which kubefan cannot run, and the reports of failed servers.

use std::{io, path::PathBuf};

use kubefan_access::authentication::certificate::trusted_cas::ClientCaError;
use kubefan_peer::PeerError;
use kubefan_telemetry::traces::TraceError;
use kubefan_upstream::{UpstreamError, settings::SettingsError};

use kubefan_server::transport::{certificate::TlsError, listen::BindError};

/// The error for which kubefan cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The settings for the apiserver (kubeconfig or service account) cannot be read.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The kubefan at `--upstream` cannot be addressed.
    #[error("--upstream {0}")]
    NextKubefan(#[from] kubefan_client::ClientError),
    /// The apiserver is not reachable, and `tuning.requireUpstream` is set.
    #[error("{0} (tuning.requireUpstream)")]
    Upstream(#[source] UpstreamError),
    /// A port cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The options of TLS cannot be used together.
    #[error("--tls-min-version, tuning.tlsCipherSuites: {0}")]
    TlsOptions(rustls::Error),
    /// The CAs of client certificates cannot be used.
    #[error(transparent)]
    ClientCa(#[from] ClientCaError),
    /// The audit log cannot be opened.
    #[error("--audit-log-path {}: {error}; name a file that kubefan may write, or - for stdout", .path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The key of the saved states cannot be read.
    #[error("--state-key-file {}: {message}", .path.display())]
    StateKey {
        /// The file.
        path: PathBuf,
        /// The problem.
        message: String,
    },
    /// A server failed.
    #[error("{what} failed: {message}")]
    Server {
        /// The server.
        what: &'static str,
        /// The error, with its causes.
        message: String,
    },
    /// The certificate, key or CA for peers cannot be used.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// Traces cannot be exported.
    #[error(transparent)]
    Traces(#[from] TraceError),
    /// The metrics cannot be registered.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Returns the error for a server that has ended although it should run for as long as kubefan.
pub(super) fn server_error(what: &'static str, result: Result<Result<(), String>, tokio::task::JoinError>) -> AppError {
    let message = match result {
        Ok(Ok(())) => "it ended without an error".to_owned(),
        Ok(Err(message)) => message,
        Err(error) => error.to_string(),
    };
    AppError::Server { what, message }
}

/// Returns an error with its causes, because many libraries omit them from their own text.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    std::iter::once(error).chain(causes).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
