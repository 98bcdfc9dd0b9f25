//! The token file of a user in a kubeconfig, which kubefan and the client library read themselves.

use std::{io, path::PathBuf};

use http::HeaderValue;
use kube_client::{client::AuthError, config::AuthInfo};
use secrecy::ExposeSecret;

use crate::token_file::{TokenFault, TokenFileError, bearer};

/// A token file, and the token beside it, which counts for as long as the file cannot be read
/// (`transport.NewBearerAuthWithRefreshRoundTripper` in client-go).
#[derive(Debug)]
pub struct TokenOfFile {
    /// The file.
    pub path: PathBuf,
    /// The header of the token beside it.
    pub inline: Option<HeaderValue>,
}

/// Takes the token file of a user away from kube-client, which would send a trailing newline.
/// `None` if there is none, or other credentials have precedence.
///
/// # Errors
/// The inline token is not valid in a header. kube-client would panic.
pub fn take_token_file(user: &mut AuthInfo) -> Result<Option<TokenOfFile>, AuthError> {
    let inline = user.token.as_ref().map(|token| bearer(token.expose_secret())).transpose();
    let inline = inline.map_err(AuthError::InvalidBearerToken)?;
    let has_others = user.auth_provider.is_some() || user.username.is_some();
    let Some(path) = user.token_file.take_if(|_| !has_others) else { return Ok(None) };
    user.token = None;
    // A plugin is not asked for a token if there is one.
    user.exec = None;
    Ok(Some(TokenOfFile { path: path.into(), inline }))
}

impl From<TokenFileError> for AuthError {
    fn from(TokenFileError { path, fault }: TokenFileError) -> Self {
        match fault {
            TokenFault::Unreadable(error) => Self::ReadTokenFile(error, path),
            TokenFault::Empty => {
                Self::ReadTokenFile(io::Error::new(io::ErrorKind::InvalidData, "the file is empty"), path)
            }
            TokenFault::NoHeader(error) => Self::InvalidBearerToken(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use kube_client::config::Kubeconfig;

    use super::{super::errors::explain_auth, *};

    fn user(fields: &str) -> AuthInfo {
        let text = format!("{{users: [{{name: u, user: {{{fields}}}}}]}}");
        Kubeconfig::from_yaml(&text).unwrap().auth_infos.remove(0).auth_info.unwrap()
    }

    #[test]
    fn a_token_file_stands_above_a_plugin_and_takes_the_token_beside_it() {
        let exec = "exec: {apiVersion: client.authentication.k8s.io/v1, command: /gone, interactiveMode: Never}";
        let mut user = user(&format!("token: t, tokenFile: /token, {exec}"));
        let TokenOfFile { path, inline } = take_token_file(&mut user).unwrap().unwrap();
        assert_eq!((path, inline.unwrap().as_bytes()), (PathBuf::from("/token"), &b"Bearer t"[..]));
        assert!(user.token.is_none() && user.token_file.is_none() && user.exec.is_none());
        assert!(take_token_file(&mut user).unwrap().is_none());
    }

    #[test]
    fn a_token_that_is_no_header_is_refused() {
        let mut user = user("token: \"very\\nsecret\"");
        let error = take_token_file(&mut user).unwrap_err();
        assert_eq!(explain_auth(&error), "the token or password is not a valid header value");
    }
}
