//! The target of `--upstream`: the gRPC address of another kubefan, or a kubeconfig that leads to
//! its Kubernetes API.

use std::{net::IpAddr, path::PathBuf};

use kubefan_client::ClientCertificate;
use kubefan_informers::ConfiguredResource;
use kubefan_model::Media;
use kubefan_upstream::{kubefan_client::KubefanSettings, settings::UpstreamSettings};

use super::{
    ConfigError,
    on_demand::OnDemandConfig,
    rules::{together, unusable},
};

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
    let given = [
        (ca_file.is_some(), "--upstream-ca-file"),
        (token_file.is_some(), "--upstream-token-file"),
        (certificate_file.is_some(), "--upstream-cert-file"),
        (key_file.is_some(), "--upstream-key-file"),
        (server_name.is_some(), "--upstream-server-name"),
    ];
    let given = |needs_tls: bool| {
        let flag = |(is_given, flag): (bool, &'static str)| is_given.then_some(flag);
        given.into_iter().filter_map(flag).find(|flag| !needs_tls || *flag != "--upstream-token-file")
    };
    let Some(address) = address else {
        if let Some(flag) = given(false) {
            return ConfigError::contradiction(format!(
                "{flag} needs a gRPC address as --upstream, like https://HOST:7443"
            ));
        }
        let http =
            |file| SourceSettings::Http(UpstreamSettings { kubeconfig: Some(PathBuf::from(file)), context: None });
        return Ok(upstream.map(http));
    };
    let has_tls = address.starts_with("https://");
    let is_socket = address.starts_with("unix:");
    if !has_tls && !is_socket && !is_loopback(host(address)) {
        let problem = format!(
            "others on the way could read and change what is sent without TLS; write https://{} (kubefan serve \
             --tls-cert-file there)",
            authority(address)
        );
        return Err(unusable(FLAG, address, problem));
    }
    if !has_tls && let Some(flag) = given(is_socket) {
        return ConfigError::contradiction(format!("{flag} needs TLS, and --upstream {address} has none"));
    }
    together(("--upstream-cert-file", certificate_file.is_some()), ("--upstream-key-file", key_file.is_some()))?;
    let certificate = certificate_file
        .zip(key_file)
        .map(|(certificate_file, key_file)| ClientCertificate { certificate_file, key_file });
    if certificate.is_some() && token_file.is_some() {
        return ConfigError::contradiction(
            "--upstream-cert-file and --upstream-token-file name two accounts; give only one of them",
        );
    }
    let address = address.to_owned();
    Ok(Some(SourceSettings::Grpc(KubefanSettings { address, ca_file, token_file, certificate, server_name })))
}

/// Refuses objects in a form that is not cached. Protobuf is on by default, and where there is
/// none, requests for it go upstream.
pub(super) fn check_forms(
    source: Option<&SourceSettings>,
    resources: &[ConfiguredResource],
    on_demand: &OnDemandConfig,
) -> Result<(), ConfigError> {
    let is_grpc = matches!(source, Some(SourceSettings::Grpc(_)));
    let is_protobuf = |resource: &&ConfiguredResource| resource.media.contains(&Media::Protobuf);
    let protobuf = resources.iter().find(is_protobuf).map(|resource| format!("--resource {}=protobuf", resource.name));
    let problem = match (&protobuf, on_demand.protobuf()) {
        (Some(flag), None) => Some(format!("{flag} has no effect with tuning.protobuf: off; give only one of them")),
        _ => None,
    };
    let tables = on_demand.caches_tables.then(|| "--cache-tables".to_owned());
    let not_over_grpc = protobuf.or(tables).filter(|_| is_grpc).map(|flag| {
        format!("{flag} needs a kubeconfig as --upstream: a kubefan reads only JSON from another one over gRPC")
    });
    problem.or(not_over_grpc).map_or(Ok(()), ConfigError::contradiction)
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
        assert!(problem(token("localhost:7443")).contains("--upstream-token-file needs TLS"));
        assert!(problem(token("kubeconfig")).contains("needs a gRPC address as --upstream"));
        let alone = Given { ca_file: file(), ..Given::default() };
        assert!(problem(alone).starts_with("--upstream-ca-file needs a gRPC address as --upstream"));
        let ca = Given { ca_file: file(), ..given("unix:/run/k") };
        assert!(problem(ca).starts_with("--upstream-ca-file needs TLS"));
        let certificate = Given { certificate_file: file(), ..given("https://h:1") };
        assert_eq!(problem(certificate.clone()), "--upstream-cert-file needs --upstream-key-file");
        let both = Given { key_file: file(), token_file: file(), ..certificate };
        assert!(problem(both).contains("two accounts"));
        assert!(source(token("unix:/run/k")).is_ok() && source(token("https://h:1")).is_ok());
    }
}
