//! The target of `--upstream`: the gRPC address of another kubefan, or a kubeconfig that leads to
//! its Kubernetes API.

use std::{net::IpAddr, path::PathBuf};

use kubefan_client::ClientCertificate;
use kubefan_upstream::{kubefan_client::KubefanSettings, settings::UpstreamSettings};

use super::{ConfigError, rules::unusable};

const FLAG: &str = "--upstream";

/// The server of lists and watches, if it is not the apiserver.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceSettings {
    /// At the gRPC service of a kubefan.
    Grpc(KubefanSettings),
    /// At the Kubernetes API of a kubefan.
    Http(UpstreamSettings),
}

/// `--upstream` and the flags that go with it, as given.
#[derive(Debug, Clone, Default)]
pub(super) struct Given {
    /// An address or the name of a file.
    pub(super) upstream: Option<String>,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) certificate_file: Option<PathBuf>,
    pub(super) key_file: Option<PathBuf>,
    pub(super) server_name: Option<String>,
}

/// Returns the other kubefan; `None` without `--upstream`.
pub(super) fn source(given: Given) -> Result<Option<SourceSettings>, ConfigError> {
    let Given { upstream, ca_file, token_file, certificate_file, key_file, server_name } = given;
    let address = upstream.as_deref().filter(|upstream| is_address(upstream));
    let has_tls = address.is_some_and(|address| address.starts_with("https://"));
    let is_socket = address.is_some_and(|address| address.starts_with("unix:"));
    if let Some(address) = address
        && !has_tls
        && !is_socket
        && !is_loopback(host(address))
    {
        let problem = format!(
            "others on the way could read and change what is sent without TLS; write https://{} (kubefan serve \
             --tls-cert-file there)",
            authority(address)
        );
        return Err(unusable(FLAG, address, problem));
    }
    // Without TLS they would protect nothing, and a kubeconfig has its own.
    let needing_tls = [
        ("--upstream-ca-file", ca_file.is_some()),
        ("--upstream-token-file", token_file.is_some() && !is_socket),
        ("--upstream-cert-file", certificate_file.is_some()),
        ("--upstream-key-file", key_file.is_some()),
        ("--upstream-server-name", server_name.is_some()),
    ];
    if let Some((flag, _)) = needing_tls.iter().find(|(_, given)| *given && !has_tls) {
        return ConfigError::contradiction(format!(
            "{flag} needs a gRPC address with TLS as --upstream, like https://HOST:7443"
        ));
    }
    let Some(address) = address else {
        let http =
            |file| SourceSettings::Http(UpstreamSettings { kubeconfig: Some(PathBuf::from(file)), context: None });
        return Ok(upstream.map(http));
    };
    // A file may hold both.
    let certificate = certificate_file.map(|certificate_file| ClientCertificate {
        key_file: key_file.unwrap_or_else(|| certificate_file.clone()),
        certificate_file,
    });
    let token_file = token_file.filter(|_| certificate.is_none());
    let address = address.to_owned();
    Ok(Some(SourceSettings::Grpc(KubefanSettings { address, ca_file, token_file, certificate, server_name })))
}

/// Whether a text is an address, as `kubefan get --server` takes it, and not the name of a file.
fn is_address(text: &str) -> bool {
    let has_port = |(host, port): (&str, &str)| !host.contains('/') && port.parse::<u16>().is_ok();
    text.contains("://")
        || text.starts_with("unix:")
        || text.starts_with("dns:")
        || text.rsplit_once(':').is_some_and(has_port)
}

/// The host and port of an address.
fn authority(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let rest = rest.strip_prefix("dns:").unwrap_or(rest).trim_start_matches('/');
    rest.split('/').next().unwrap_or(rest)
}

fn host(address: &str) -> &str {
    let authority = authority(address);
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(upstream: &str) -> Given {
        Given { upstream: Some(upstream.to_owned()), ..Given::default() }
    }

    #[test]
    fn upstream_is_a_grpc_address_or_a_kubeconfig() {
        assert_eq!(source(Given::default()), Ok(None));
        for address in [
            "https://kubefan.kubefan.svc:7443",
            "unix:/run/kubefan.sock",
            "127.0.0.1:7443",
            "localhost:7443",
            "[::1]:7443",
            "http://127.0.0.1:7443",
            "dns:localhost:7443",
            "dns:///localhost:7443",
        ] {
            let Ok(Some(SourceSettings::Grpc(settings))) = source(given(address)) else { panic!("{address}") };
            assert_eq!(settings, KubefanSettings { address: address.to_owned(), ..KubefanSettings::default() });
        }
        for file in ["kubeconfig", "/etc/kubefan/upstream", "./a:7", "C:file"] {
            assert!(matches!(source(given(file)), Ok(Some(SourceSettings::Http(_)))), "{file}");
        }
    }

    #[test]
    fn options_that_contradict_an_address_are_named() {
        let problem = |options: Given| source(options).unwrap_err().to_string();
        let plain = ["kubefan.svc:7443", "http://10.0.0.1:7443", "dns:///kubefan.svc:7443"];
        for address in plain {
            assert!(problem(given(address)).contains("without TLS; write https://"), "{address}");
        }
        let file = || Some(PathBuf::from("f"));
        let token = |upstream: &str| Given { token_file: file(), ..given(upstream) };
        for upstream in ["localhost:7443", "kubeconfig"] {
            assert!(problem(token(upstream)).starts_with("--upstream-token-file needs a gRPC address with TLS"));
        }
        let alone = Given { ca_file: file(), ..Given::default() };
        assert!(problem(alone).starts_with("--upstream-ca-file needs a gRPC address with TLS as --upstream"));
        let ca = Given { ca_file: file(), ..given("unix:/run/k") };
        assert!(problem(ca).starts_with("--upstream-ca-file needs a gRPC address with TLS"));
        assert!(source(token("unix:/run/k")).is_ok() && source(token("https://h:1")).is_ok());
    }

    #[test]
    fn a_certificate_is_shown_instead_of_a_token_and_its_file_may_hold_the_key() {
        let grpc = |options: Given| match source(options) {
            Ok(Some(SourceSettings::Grpc(settings))) => settings,
            other => panic!("{other:?}"),
        };
        let pair = |certificate_file: &str, key_file: &str| {
            Some(ClientCertificate { certificate_file: certificate_file.into(), key_file: key_file.into() })
        };
        let one_file = Given { certificate_file: Some("both".into()), ..given("https://h:1") };
        assert_eq!(grpc(one_file.clone()).certificate, pair("both", "both"));
        let all = Given { key_file: Some("key".into()), token_file: Some("token".into()), ..one_file };
        let settings = grpc(all);
        assert_eq!((settings.certificate, settings.token_file), (pair("both", "key"), None));
        let only_key = Given { key_file: Some("key".into()), ..given("https://h:1") };
        assert_eq!(grpc(only_key).certificate, None);
    }
}
