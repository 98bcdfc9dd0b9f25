//! Flags that several commands share: the address of kubefan, and the selection of objects, in
//! kubectl's syntax.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use tonic::Code;

use super::{error::CliError, token::TokenArg};
use kubefan_client::{Client, ClientError, ClientOptions, Target};

/// A running server answers within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct ServerArgs {
    /// The address of kubefan: HOST:PORT, https://HOST:PORT, dns:NAME:PORT or unix:PATH
    #[arg(short, long, env = "KUBEFAN_SERVER", value_name = "ADDRESS", default_value = "127.0.0.1:7443")]
    server: String,

    #[command(flatten)]
    credentials: CredentialArgs,
}

/// Flags for trusting a kubefan, and for authenticating to it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct CredentialArgs {
    /// The CA (PEM) that signed kubefan's certificate, instead of the system's
    #[arg(long, visible_alias = "certificate-authority", env = "KUBEFAN_CA_FILE", value_name = "FILE")]
    pub(super) ca_file: Option<PathBuf>,

    /// The name in kubefan's certificate if it differs from the address: with kubectl port-forward
    /// the name of kubefan's Service, such as kubefan.kubefan.svc
    #[arg(long, env = "KUBEFAN_TLS_SERVER_NAME", value_name = "NAME")]
    pub(super) tls_server_name: Option<String>,

    /// A file with the bearer token for kubefan, which is read again when it changes
    #[arg(long, env = "KUBEFAN_TOKEN_FILE", value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,

    /// The bearer token for kubefan; - reads it from stdin. Other users of this machine see it in
    /// the list of processes, so prefer --token-file or the variable
    #[arg(long, env = "KUBEFAN_TOKEN", value_name = "TOKEN", conflicts_with = "token_file")]
    pub(super) token: Option<TokenArg>,
}

impl ServerArgs {
    pub(super) async fn connect(&self) -> Result<Client, CliError> {
        let CredentialArgs { ca_file, tls_server_name, token_file, token } = &self.credentials;
        let token = token.as_ref().map(|given| given.read(std::io::stdin())).transpose()?;
        let options = ClientOptions {
            ca_file: ca_file.clone(),
            server_name: tls_server_name.clone(),
            token,
            token_file: token_file.clone(),
            connect_timeout: CONNECT_TIMEOUT,
            ..ClientOptions::default()
        };
        Ok(Client::connect(&self.server, &options).await?)
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Selection")]
pub(super) struct SelectArgs {
    /// The namespace [default: default]
    #[arg(short, long, value_name = "NAME", conflicts_with = "all_namespaces")]
    namespace: Option<String>,

    /// All namespaces
    #[arg(short = 'A', long)]
    pub(super) all_namespaces: bool,

    /// Only objects whose labels match, such as app=web,tier!=db
    #[arg(short = 'l', long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    selector: String,

    /// Only objects whose fields match, such as spec.nodeName=node-1
    #[arg(long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    field_selector: String,
}

impl SelectArgs {
    /// The selected namespace; empty for all.
    pub(super) fn namespace(&self) -> &str {
        if self.all_namespaces {
            return "";
        }
        self.namespace.as_deref().unwrap_or("default")
    }

    /// The target for all selected objects of a type, or for a single one.
    pub(super) fn target(&self, resource: &str, name: Option<&str>) -> Target {
        Target {
            resource: resource.to_owned(),
            namespace: self.namespace().to_owned(),
            name: name.unwrap_or_default().to_owned(),
            label_selector: self.selector.clone(),
            field_selector: self.field_selector.clone(),
            ..Target::default()
        }
    }

    /// Parses `TYPE[,TYPE]`, `TYPE NAME…` or `TYPE/NAME…`.
    pub(super) fn parse(&self, words: &[String]) -> Result<Vec<Selected>, CliError> {
        let wrong = |text: &str| Err(CliError::Plain(text.to_owned()));
        let Some((first, names)) = words.split_first() else { return wrong("name a resource type, such as pods") };
        let mut selected: Vec<Selected> = Vec::new();
        if first.contains('/') {
            for word in words {
                match word.split_once('/') {
                    Some((resource, name)) if !resource.is_empty() && !name.is_empty() && !name.contains('/') => {
                        match selected.iter_mut().find(|known| known.resource == resource) {
                            Some(known) => known.names.push(name.to_owned()),
                            None => {
                                selected.push(Selected { resource: resource.to_owned(), names: vec![name.to_owned()] })
                            }
                        }
                    }
                    _ => return wrong(&format!("{word:?} is not of the form TYPE/NAME, unlike the other arguments")),
                }
            }
        } else {
            if let Some(name) = names.iter().find(|name| name.contains('/')) {
                return wrong(&format!("{name:?} includes a type: leave out {first:?}, or the part before the slash"));
            }
            let types: Vec<&str> = first.split(',').collect();
            if types.len() > 1 && !names.is_empty() || types.contains(&"") {
                return wrong("several types cannot be combined with names; write TYPE/NAME TYPE/NAME");
            }
            selected.extend(
                types.into_iter().map(|resource| Selected { resource: resource.to_owned(), names: names.to_vec() }),
            );
        }
        if selected.iter().any(|one| !one.names.is_empty()) {
            if self.all_namespaces {
                return wrong(
                    "a name is unique only within its namespace: use --namespace instead of --all-namespaces",
                );
            }
            if !self.selector.is_empty() || !self.field_selector.is_empty() {
                return wrong("a name cannot be combined with a selector");
            }
        }
        Ok(selected)
    }
}

/// A type and the requested names. No names select all objects.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selected {
    pub(super) resource: String,
    pub(super) names: Vec<String>,
}

/// Whether the error says that this type has no namespaces although the target names one. kubectl
/// ignores the namespace in this case.
pub(super) fn is_cluster_scoped(error: &ClientError, target: &Target) -> bool {
    !target.namespace.is_empty() && error.code() == Code::InvalidArgument && error.field() == "target.namespace"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> SelectArgs {
        SelectArgs { namespace: None, all_namespaces: false, selector: String::new(), field_selector: String::new() }
    }

    fn parse(args: &SelectArgs, words: &str) -> Result<Vec<Selected>, String> {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        args.parse(&words).map_err(|error| error.to_string())
    }

    fn selected(resource: &str, names: &[&str]) -> Selected {
        Selected { resource: resource.to_owned(), names: names.iter().map(|name| name.to_string()).collect() }
    }

    #[test]
    fn types_and_names_are_parsed_as_in_kubectl() {
        let args = args();
        assert_eq!(parse(&args, "pods"), Ok(vec![selected("pods", &[])]));
        assert_eq!(parse(&args, "po a b"), Ok(vec![selected("po", &["a", "b"])]));
        assert_eq!(parse(&args, "po/a svc/b po/c"), Ok(vec![selected("po", &["a", "c"]), selected("svc", &["b"])]));
        assert_eq!(parse(&args, "pods,svc"), Ok(vec![selected("pods", &[]), selected("svc", &[])]));
        for wrong in ["", "po/a b", "po svc/a", "po/", "/a", "po/a/b", "pods,svc a", "pods,"] {
            assert!(parse(&args, wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_excludes_selectors_and_all_namespaces() {
        assert!(parse(&SelectArgs { all_namespaces: true, ..args() }, "po a").unwrap_err().contains("--namespace"));
        assert!(parse(&SelectArgs { selector: "a=b".into(), ..args() }, "po/a").unwrap_err().contains("selector"));
        assert_eq!(args().target("po", Some("a")).namespace, "default");
        assert_eq!(SelectArgs { all_namespaces: true, ..args() }.target("po", None).namespace, "");
    }
}
