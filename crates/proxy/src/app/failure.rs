//! How the failures of servers are reported.

use super::AppError;

/// Why a server that should run for as long as kubefan has ended.
pub(super) fn server_error(what: &'static str, result: Result<Result<(), String>, tokio::task::JoinError>) -> AppError {
    let message = match result {
        Ok(Ok(())) => "it ended without an error".to_owned(),
        Ok(Err(message)) => message,
        Err(error) => error.to_string(),
    };
    AppError::Server { what, message }
}

/// An error with its causes, because many libraries omit them from their own text.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    std::iter::once(error).chain(causes).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
