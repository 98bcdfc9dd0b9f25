//! Reasons why a kubeconfig or its credentials cannot be used, without their contents.

use kube_client::{
    client::{
        AuthError,
        oidc_errors::{Error as OidcError, RefreshError},
    },
    config::{AuthInfo, KubeconfigError, LoadDataError},
};
use rustls::pki_types::pem;

use crate::{
    text::{find, innermost, with_single_quotes},
    tls::explain_pem,
};

/// The name that a library gives to the client certificate together with its key.
const IDENTITY: &str = "identity PEM";
const IDENTITY_IN_WORDS: &str = "the client certificate or the private key of the kubeconfig";

/// Describes a kubeconfig that cannot be used, and names the contexts that there are.
pub(super) fn explain(error: &KubeconfigError, contexts: &[String]) -> String {
    let contexts = || match contexts {
        [] => "it has no contexts".to_owned(),
        names => format!("it has the contexts {}", names.join(", ")),
    };
    match error {
        KubeconfigError::ReadConfig(source, _) => source.to_string(),
        KubeconfigError::Parse(source) => match source.location() {
            Some(location) => format!("not a kubeconfig: bad YAML at line {}", location.line()),
            None => "not a kubeconfig: bad YAML".to_owned(),
        },
        KubeconfigError::CurrentContextNotSet => {
            format!("no current-context is set; {}: choose one with --context", contexts())
        }
        KubeconfigError::LoadContext(name) => format!("there is no context {name:?}; {}", contexts()),
        KubeconfigError::LoadClusterOfContext(name) => {
            format!("its context names the cluster {name:?}, which does not exist")
        }
        KubeconfigError::ParseCertificates(_) => "its certificate-authority is not PEM".to_owned(),
        other if matches!(find(other), Some(LoadDataError::DecodeBase64(_))) => {
            let text = other.to_string();
            format!("{}: its data is not base64", text.split(':').next().unwrap_or_default())
        }
        other => with_single_quotes(&other.to_string()),
    }
}

/// Describes credentials that cannot be used, without the output of a plugin, which may contain the
/// credential.
pub fn explain_auth(error: &AuthError) -> String {
    match error {
        AuthError::AuthExecRun { out, .. } => format!("the exec credential plugin failed: {}", out.status),
        AuthError::AuthExecStart(source) => format!("the exec credential plugin could not be started: {source}"),
        AuthError::AuthExecParse(_) => "the exec credential plugin did not print an ExecCredential".to_owned(),
        AuthError::ParseTokenKey(_) => "the credential command did not print JSON".to_owned(),
        AuthError::ReadTokenFile(source, path) => format!("token file {}: {source}", path.display()),
        AuthError::InvalidBasicAuth(_) | AuthError::InvalidBearerToken(_) => {
            "the token or password is not a valid header value".to_owned()
        }
        AuthError::MalformedTokenExpirationDate(_) => "the end of the token is not a date".to_owned(),
        AuthError::Oidc(OidcError::IdToken(_)) => "the OIDC ID token is not valid".to_owned(),
        AuthError::Oidc(OidcError::Refresh(
            RefreshError::InvalidMetadata(_) | RefreshError::InvalidTokenResponse(_),
        )) => "the OIDC provider does not answer as one".to_owned(),
        other => other.to_string(),
    }
}

/// Describes TLS settings that cannot be used, and names their files.
pub(super) fn explain_tls(error: &kube_client::Error, user: &AuthInfo) -> String {
    if let kube_client::Error::Auth(error) = error {
        return explain_auth(error);
    }
    if let Some(error) = find::<pem::Error>(error) {
        return format!("{IDENTITY_IN_WORDS} cannot be read: {}", explain_pem(error));
    }
    // The innermost error would not name the file.
    if let Some(error) = find::<KubeconfigError>(error) {
        return explain(error, &[]);
    }
    match find::<rustls::Error>(error) {
        Some(rustls::Error::InconsistentKeys(_)) => mismatch(user),
        _ => innermost(error).to_string().replace(IDENTITY, IDENTITY_IN_WORDS),
    }
}

/// The text for a client certificate and a key that do not belong together.
fn mismatch(user: &AuthInfo) -> String {
    let place = |file: &Option<String>, key: &str| match file {
        Some(file) => format!("{file:?} ({key})"),
        None => format!("{key}-data"),
    };
    format!(
        "the client certificate {} and the private key {} of the kubeconfig do not belong together",
        place(&user.client_certificate, "client-certificate"),
        place(&user.client_key, "client-key")
    )
}

#[cfg(test)]
mod tests {
    use kube_client::Config;

    use super::*;
    use crate::kubeconfig::tls_config;

    #[test]
    fn the_output_of_a_credential_plugin_is_not_quoted() {
        let output = std::process::Command::new("sh").args(["-c", "echo token-abc; exit 3"]).output().unwrap();
        let error = AuthError::AuthExecRun { cmd: "plugin --password abc".to_owned(), out: Box::new(output) };
        assert_eq!(explain_auth(&error), "the exec credential plugin failed: exit status: 3");
        let of_json = || serde_json::from_str::<u8>(r#""very-secret""#).unwrap_err();
        for error in [
            AuthError::Oidc(OidcError::IdToken(of_json().into())),
            AuthError::Oidc(OidcError::Refresh(RefreshError::InvalidTokenResponse(of_json()))),
            AuthError::ParseTokenKey(of_json()),
        ] {
            assert!(!explain_auth(&error).contains("very-secret"), "{error}");
        }
    }

    #[test]
    fn a_client_certificate_with_the_key_of_another_names_both_files() {
        let dir = tempfile::tempdir().unwrap();
        let certified = || rcgen::generate_simple_self_signed(["kubefan".to_owned()]).unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("a.crt"), certified().cert.pem()).unwrap();
        std::fs::write(path("b.key"), certified().signing_key.serialize_pem()).unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = Config::new("https://127.0.0.1:6443".parse().unwrap());
        config.root_cert = Some(Vec::new());
        config.auth_info.client_certificate = Some(path("a.crt"));
        config.auth_info.client_key = Some(path("b.key"));
        let message = tls_config(&config).unwrap_err();
        assert!(message.contains("do not belong together"), "{message}");
        assert!(message.contains(&path("a.crt")) && message.contains(&path("b.key")), "{message}");
    }
}
