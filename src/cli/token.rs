//! A bearer token on the command line.

use std::{fmt, io::Read};

use super::error::CliError;

/// The longest token that is read from stdin, in bytes. Tokens of service accounts have one or two
/// thousand.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// The value of `--token`: a token, or `-`. Its `Debug` form does not show it.
#[derive(Clone)]
pub(super) struct TokenArg(String);

impl From<String> for TokenArg {
    fn from(given: String) -> Self {
        Self(given)
    }
}

impl fmt::Debug for TokenArg {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("…")
    }
}

impl TokenArg {
    /// The token; for `-`, the text on stdin. The error does not quote it.
    pub(super) fn read(&self, stdin: impl Read) -> Result<String, CliError> {
        let mut token = self.0.clone();
        if token == "-" {
            token.clear();
            stdin
                .take(TOKEN_BYTES_MAX)
                .read_to_string(&mut token)
                .map_err(|error| CliError::Plain(format!("--token -: {error}")))?;
        }
        let token = token.trim();
        // A header could not carry anything else.
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let problem = "--token is not a bearer token: it must be one word of printable ASCII characters";
            return Err(CliError::Plain(problem.to_owned()));
        }
        Ok(token.to_owned())
    }
}
