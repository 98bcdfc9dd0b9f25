//! `kubefan kubeconfig`: prints a kubeconfig that sends a client to kubefan instead of the
//! apiserver.
//!
//! A kubeconfig that looks right but does not work is hard to debug. Therefore this command refuses
//! settings that clients silently ignore, above all credentials without TLS, which client-go does
//! not send. Some clients also ignore `tokenFile`, so the token can be a part of the kubeconfig;
//! then the kubeconfig itself is a secret, and this command says so.

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clap::Args;
use http::{Uri, uri::Scheme};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde::Serialize;

use super::{error::CliError, token::TokenArg, visible::print_notice};
use kubefan_common::tls::explain_pem;

/// Print a kubeconfig that sends clients to kubefan instead of the apiserver
#[derive(Debug, Args)]
#[command(
    after_help = "Each client needs its own credentials, because kubefan forwards them to the apiserver (serve --access=authorized): a token \
    file or a token as here, or its present kubeconfig with other values of `server` and `certificate-authority-data`. Clients send \
    credentials only over https.\n\n\
    With --token the output contains the secret: write it to a file that only its user can read (umask 077), and renew it before the \
    token expires. Prefer --token-file, except for clients that ignore it, such as @kubernetes/client-node and kr8s, which are then \
    anonymous."
)]
pub(super) struct KubeconfigArgs {
    /// The URL of kubefan, as clients reach it: https://HOST:PORT
    #[arg(long, value_name = "URL")]
    server: Uri,
    /// The CA of kubefan's certificate (PEM), which is embedded in the kubeconfig [default: the
    /// system's CAs]
    #[arg(long, value_name = "FILE")]
    certificate_authority: Option<PathBuf>,
    /// The name in kubefan's certificate if it differs from the URL's host: with kubectl
    /// port-forward the name of kubefan's Service, such as kubefan.kubefan.svc
    #[arg(long, value_name = "NAME")]
    tls_server_name: Option<String>,
    /// The file with the client's bearer token; the client reads it, and reads it again when it
    /// changes; this command does not read it
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The client's bearer token, which is embedded in the kubeconfig; - reads it from stdin, so
    /// that other users do not see it in the list of processes
    #[arg(long, value_name = "TOKEN", conflicts_with = "token_file")]
    token: Option<TokenArg>,
    /// The name of the cluster and of its user
    #[arg(long, default_value = "kubefan", value_name = "NAME")]
    cluster: String,
    /// The name of the context [default: the name of the cluster]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The default namespace
    #[arg(long, short, value_name = "NAME")]
    namespace: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Kubeconfig {
    api_version: &'static str,
    kind: &'static str,
    clusters: [Named<ClusterEntry>; 1],
    users: Vec<Named<UserEntry>>,
    contexts: [Named<ContextEntry>; 1],
    #[serde(rename = "current-context")]
    current_context: String,
}

#[derive(Serialize)]
struct Named<T> {
    name: String,
    #[serde(flatten)]
    entry: T,
}

#[derive(Serialize)]
struct ClusterEntry {
    cluster: Cluster,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate_authority_data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_server_name: Option<String>,
}

#[derive(Serialize)]
struct UserEntry {
    user: User,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum User {
    TokenFile(PathBuf),
    Token(String),
}

#[derive(Serialize)]
struct ContextEntry {
    context: Context,
}

#[derive(Serialize)]
struct Context {
    cluster: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
}

pub(super) fn run(args: &KubeconfigArgs) -> Result<(), CliError> {
    let config = kubeconfig(args, std::io::stdin())?;
    let text = serde_saphyr::to_string(&config).map_err(CliError::plain)?;
    let is_https = args.server.scheme() == Some(&Scheme::HTTPS);
    if let Some(note) = note(config.users.first().map(|user| &user.entry.user), is_https) {
        print_notice(&format!("kubefan: {note}"));
    }
    Ok(writeln!(std::io::stdout(), "{}", text.trim_end())?)
}

/// Returns what the user must know about a kubeconfig with these credentials.
fn note(user: Option<&User>, is_https: bool) -> Option<&'static str> {
    match user {
        Some(User::TokenFile(_)) => None,
        Some(User::Token(_)) => Some(
            "the kubeconfig contains the token: every user who can read it can act as its owner (chmod 600), until the token expires",
        ),
        None if is_https => Some(
            "without --token-file or --token the kubeconfig has no user: add one, or kubectl asks for a user name and other clients \
             are anonymous",
        ),
        None => Some(
            "over http clients send no credentials, so kubefan must run with --access=local-self, on the same machine",
        ),
    }
}

fn kubeconfig(args: &KubeconfigArgs, stdin: impl Read) -> Result<Kubeconfig, CliError> {
    let is_https = match args.server.scheme() {
        Some(scheme) if *scheme == Scheme::HTTPS => true,
        Some(scheme) if *scheme == Scheme::HTTP => false,
        _ => return Err(CliError::Plain(format!("--server {}: write it like https://HOST:PORT", args.server))),
    };
    let needs_tls = [
        ("--token-file", args.token_file.is_some(), "clients send credentials only over https"),
        ("--token", args.token.is_some(), "clients send credentials only over https"),
        ("--certificate-authority", args.certificate_authority.is_some(), "http has no certificate to check"),
        ("--tls-server-name", args.tls_server_name.is_some(), "http has no certificate to check"),
    ];
    if let Some((flag, _, because)) = needs_tls.iter().find(|(_, given, _)| *given && !is_https) {
        return Err(CliError::Plain(format!(
            "{flag} with --server {}: {because}; run kubefan with --tls-cert-file and --tls-private-key-file, and use an https:// URL here",
            args.server
        )));
    }
    let certificate_authority_data = args.certificate_authority.as_deref().map(authority).transpose()?;
    let user = match (&args.token_file, &args.token) {
        (Some(file), _) => Some(User::TokenFile(std::path::absolute(file)?)),
        (None, Some(given)) => Some(User::Token(given.read(stdin)?)),
        (None, None) => None,
    };
    let named = |user| Named { name: args.cluster.clone(), entry: UserEntry { user } };
    let users: Vec<_> = user.into_iter().map(named).collect();
    let context = Context {
        cluster: args.cluster.clone(),
        user: users.first().map(|user| user.name.clone()),
        namespace: args.namespace.clone(),
    };
    let current_context = args.context.clone().unwrap_or_else(|| args.cluster.clone());
    let server = args.server.to_string().trim_end_matches('/').to_owned();
    let cluster = ClusterEntry {
        cluster: Cluster { server, certificate_authority_data, tls_server_name: args.tls_server_name.clone() },
    };
    Ok(Kubeconfig {
        api_version: "v1",
        kind: "Config",
        clusters: [Named { name: args.cluster.clone(), entry: cluster }],
        users,
        contexts: [Named { name: current_context.clone(), entry: ContextEntry { context } }],
        current_context,
    })
}

/// The certificates of a PEM file, without anything else in it: a private key beside them must not
/// get into a kubeconfig that is handed out.
fn authority(file: &Path) -> Result<String, CliError> {
    let failed = |why: String| CliError::Plain(format!("--certificate-authority {}: {why}", file.display()));
    let pem = fs::read(file).map_err(|error| failed(error.to_string()))?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(explain_pem(&error).to_owned()))?;
    if certificates.is_empty() {
        return Err(failed("it contains no PEM certificate".to_owned()));
    }
    let mut text = String::new();
    for certificate in &certificates {
        let base64 = STANDARD.encode(certificate);
        text += "-----BEGIN CERTIFICATE-----\n";
        for line in base64.as_bytes().chunks(64) {
            text += &String::from_utf8_lossy(line);
            text.push('\n');
        }
        text += "-----END CERTIFICATE-----\n";
    }
    Ok(STANDARD.encode(text))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: KubeconfigArgs,
    }

    fn print(words: &[&str]) -> Result<kube_client::config::Kubeconfig, String> {
        let args = Only::try_parse_from(["kubeconfig"].iter().chain(words)).map_err(|error| error.to_string())?.args;
        let config = kubeconfig(&args, &b"from-stdin\n"[..]).map_err(|error| error.to_string())?;
        let text = serde_saphyr::to_string(&config).unwrap();
        Ok(kube_client::config::Kubeconfig::from_yaml(&text).unwrap())
    }

    #[test]
    fn the_kubeconfig_contains_every_given_value() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.pem");
        let certified = rcgen::generate_simple_self_signed(["kubefan".to_owned()]).unwrap();
        std::fs::write(&file, certified.signing_key.serialize_pem() + &certified.cert.pem()).unwrap();
        let config = print(&[
            "--server=https://kubefan:7443",
            "--certificate-authority",
            file.to_str().unwrap(),
            "--tls-server-name=kubefan.kubefan.svc",
            "--token-file=/var/run/token",
            "--cluster=prod",
            "--context=through-kubefan",
            "-n=web",
        ])
        .unwrap();
        let cluster = config.clusters[0].cluster.clone().unwrap();
        assert_eq!(
            (config.clusters[0].name.as_str(), cluster.server.as_deref()),
            ("prod", Some("https://kubefan:7443"))
        );
        assert_eq!(cluster.tls_server_name.as_deref(), Some("kubefan.kubefan.svc"));
        let inlined = STANDARD.decode(cluster.certificate_authority_data.unwrap()).unwrap();
        let inlined = String::from_utf8(inlined).unwrap();
        assert_eq!(inlined, certified.cert.pem().replace("\r\n", "\n"), "the certificate without the key");
        let user = config.auth_infos[0].auth_info.clone().unwrap();
        assert_eq!(user.token_file.as_deref(), Some("/var/run/token"));
        let context = config.contexts[0].context.clone().unwrap();
        assert_eq!((context.cluster.as_str(), context.namespace.as_deref()), ("prod", Some("web")));
        assert_eq!(config.current_context.as_deref(), Some("through-kubefan"));
    }

    #[test]
    fn a_key_in_the_place_of_the_ca_is_not_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.pem");
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        for key in [key.replace('\n', " "), key.replace('\n', "\\n")] {
            std::fs::write(&file, key).unwrap();
            let words = ["--server=https://kubefan", "--certificate-authority", file.to_str().unwrap()];
            let error = print(&words).unwrap_err();
            assert!(error.contains("ca.pem: ") && error.ends_with("; are line feeds missing?"), "{error}");
        }
    }

    #[test]
    fn settings_that_clients_would_ignore_are_refused() {
        for (words, says) in [
            (&["--server=http://kubefan:7443", "--token-file=t"][..], "credentials only over https"),
            (&["--server=http://kubefan:7443", "--certificate-authority=ca"], "http has no certificate to check"),
            (&["--server=http://kubefan:7443", "--tls-server-name=kubefan"], "http has no certificate to check"),
            (&["--server=http://kubefan:7443", "--token=t"], "credentials only over https"),
            (&["--server=https://kubefan:7443", "--token="], "not a bearer token"),
            (&["--server=https://kubefan:7443", "--token=two words"], "not a bearer token"),
            (&["--server=https://kubefan:7443", "--token=a", "--token-file=b"], "cannot be used with"),
            (&["--server=kubefan:7443"], "https://HOST:PORT"),
            (&["--server=https://kubefan", "--certificate-authority=/does/not/exist"], "No such file"),
            (&["--server=https://kubefan", "--certificate-authority=Cargo.toml"], "contains no PEM certificate"),
        ] {
            let error = print(words).unwrap_err();
            assert!(error.contains(says), "{words:?}: {error}");
        }
        assert!(print(&["--server=http://127.0.0.1:7443"]).unwrap().auth_infos.is_empty());
    }

    #[test]
    fn a_kubeconfig_without_credentials_has_a_note_that_fits_its_protocol() {
        assert!(note(None, true).unwrap().contains("--token-file"));
        assert!(note(None, false).unwrap().contains("--access=local-self"));
        assert!(note(Some(&User::Token("a".to_owned())), true).unwrap().contains("chmod 600"));
        assert_eq!(note(Some(&User::TokenFile("a".into())), true), None);
    }

    #[test]
    fn a_token_can_be_embedded_and_then_there_is_no_token_file() {
        let words = ["kubeconfig", "--server=https://kubefan:7443", "--token=abc.def"];
        assert!(!format!("{:?}", Only::try_parse_from(words).unwrap().args).contains("abc.def"));
        for (given, token) in [("--token=abc.def", "abc.def"), ("--token=-", "from-stdin")] {
            let config = print(&["--server=https://kubefan:7443", given]).unwrap();
            let user = config.auth_infos[0].auth_info.as_ref().unwrap();
            let printed = serde_json::to_value(user).unwrap();
            assert_eq!((&printed["token"], user.token_file.as_deref()), (&serde_json::json!(token), None));
        }
    }
}
