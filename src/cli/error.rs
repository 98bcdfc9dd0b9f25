//! Errors of a command, as the one line that the user sees.

use std::{fmt, io};

use tonic::Code;

use super::shutdown::StopSignal;
use kubefan_client::ClientError;

/// The reason why a command failed. The text is the one line that the user sees.
#[derive(Debug, thiserror::Error)]
pub(super) enum CliError {
    /// A problem with the arguments, the configuration or the system.
    #[error("error: {0}")]
    Plain(String),
    /// kubefan answered with an error, or could not be reached.
    #[error("{}", describe(.0))]
    Client(#[from] ClientError),
    /// History cannot resume from the version of a watch.
    #[error("{}; with --on-expired=restart the watch starts over with a snapshot", describe(.0))]
    Expired(ClientError),
    /// Writing the output failed.
    #[error("error: cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// The result could not be determined. `None` if the reason was already printed.
    #[error("{}", .0.as_deref().unwrap_or_default())]
    Undetermined(Option<String>),
    /// The errors were already printed.
    #[error("")]
    Printed,
    /// A signal.
    #[error("")]
    Interrupted(StopSignal),
}

impl CliError {
    pub(super) fn plain(error: impl fmt::Display) -> Self {
        Self::Plain(error.to_string())
    }

    /// Whether the reader of the output closed the pipe, as `head` does.
    pub(super) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// The one-line text of a client error, in kubectl's format.
pub(super) fn describe(error: &ClientError) -> String {
    let reason = match error {
        ClientError::Unreachable { address, message } => {
            let mut message = message.clone();
            if let Some(first) = message.get_mut(..1) {
                first.make_ascii_lowercase();
            }
            return format!("error: cannot reach kubefan at {address}: {message}{}", hint(address, &message));
        }
        ClientError::Address { .. }
        | ClientError::Undecodable { .. }
        | ClientError::Protocol { .. }
        | ClientError::HttpUnreachable { .. }
        | ClientError::HttpProtocol { .. } => return format!("error: {error}"),
        ClientError::Api(status) => &status.reason,
        ClientError::Status(status) => match status.code {
            Code::InvalidArgument => "BadRequest",
            Code::NotFound => "NotFound",
            Code::PermissionDenied => "Forbidden",
            Code::Unauthenticated => "Unauthorized",
            Code::OutOfRange => "Expired",
            Code::ResourceExhausted => "TooManyRequests",
            Code::Unavailable => "ServiceUnavailable",
            Code::DeadlineExceeded => "Timeout",
            Code::FailedPrecondition => "NotCached",
            _ => "InternalError",
        },
    };
    let flags = if error.code() == Code::Unauthenticated { " (--token-file, --token)" } else { "" };
    format!("Error from server ({reason}): {error}{flags}")
}

/// Returns advice for a kubefan at `address` that cannot be reached because of `message`, as a part
/// of a sentence. Empty if the message already says it.
fn hint(address: &str, message: &str) -> String {
    let is = |texts: &[&str]| texts.iter().any(|text| message.contains(text));
    if is(&["token file"]) {
        String::new()
    } else if is(&["the CA file must contain"]) {
        " (--ca-file)".to_owned()
    } else if is(&["certificate", "TLS"]) {
        String::new()
    } else if is(&["stream closed", "reset", "frame", "http2"])
        && !address.contains("://")
        && !address.starts_with("unix:")
    {
        // A TLS server closes a connection that does not start with a TLS handshake.
        format!("; is it a TLS port? Then use https://{address}")
    } else {
        "; is `kubefan serve` running?".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_formatted_as_in_kubectl() {
        let refused =
            ClientError::Unreachable { address: "127.0.0.1:7443".into(), message: "Connection refused".into() };
        assert_eq!(
            describe(&refused),
            "error: cannot reach kubefan at 127.0.0.1:7443: connection refused; is `kubefan serve` running?"
        );
        let message = "stream closed because of a broken pipe".into();
        let closed = ClientError::Unreachable { address: "127.0.0.1:7443".into(), message };
        assert!(describe(&closed).ends_with("is it a TLS port? Then use https://127.0.0.1:7443"));
        for (message, end) in [
            ("no trusted CA has signed it; the CA file must contain the CA that has", "the CA that has (--ca-file)"),
            ("the server's certificate expired 2 days ago; it must be renewed", "it must be renewed"),
            ("the server does not speak TLS on this port; use http", "use http"),
        ] {
            let address = "https://127.0.0.1:7443".to_owned();
            let text = describe(&ClientError::Unreachable { address, message: message.into() });
            assert!(text.ends_with(end), "{text}");
        }
    }
}
