//! What `get` and `watch` share: how to reach kubefan, and which objects are meant, both in kubectl's words.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use tonic::Code;

use super::CliError;
use kubefan_client::{ClientError, ClientOptions, ListWatch, Target};

/// A server that is there answers within this.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct ServerArgs {
    /// The address of kubefan: HOST:PORT, https://HOST:PORT, dns:NAME:PORT or unix:PATH
    #[arg(short, long, env = "KUBEFAN_SERVER", value_name = "ADDRESS", default_value = "127.0.0.1:7443")]
    server: String,

    /// The CA (PEM) that signed kubefan's certificate, instead of the system's
    #[arg(long, visible_alias = "certificate-authority", env = "KUBEFAN_CA_FILE", value_name = "FILE")]
    ca_file: Option<PathBuf>,
}

impl ServerArgs {
    pub(super) async fn connect(&self) -> Result<ListWatch, CliError> {
        let options = ClientOptions {
            ca_file: self.ca_file.clone(),
            connect_timeout: CONNECT_TIMEOUT,
            ..ClientOptions::default()
        };
        Ok(ListWatch::connect(&self.server, &options).await?)
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

    /// Only objects with these labels, such as app=web,tier!=db
    #[arg(short = 'l', long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    selector: String,

    /// Only objects with these fields, such as spec.nodeName=node-1
    #[arg(long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    field_selector: String,
}

impl SelectArgs {
    /// The namespace that is meant; empty for all.
    pub(super) fn namespace(&self) -> &str {
        match (&self.namespace, self.all_namespaces) {
            (_, true) => "",
            (Some(namespace), false) => namespace,
            (None, false) => "default",
        }
    }

    /// The objects of a type, or one of them.
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

    /// Reads `TYPE`, `TYPE NAME…` or `TYPE/NAME…`.
    pub(super) fn parse(&self, words: &[String]) -> Result<Vec<Selected>, CliError> {
        let wrong = |text: &str| Err(CliError::Plain(text.to_owned()));
        let Some((first, names)) = words.split_first() else { return wrong("say what to get, such as pods") };
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
                    _ => return wrong(&format!("{word:?} is not TYPE/NAME, as the arguments beside it are")),
                }
            }
        } else {
            if let Some(name) = names.iter().find(|name| name.contains('/')) {
                return wrong(&format!(
                    "{name:?} says its type itself: leave out {first:?}, or the part before the slash"
                ));
            }
            let types: Vec<&str> = first.split(',').collect();
            if types.len() > 1 && !names.is_empty() || types.contains(&"") {
                return wrong("a list of types takes no names; write TYPE/NAME TYPE/NAME");
            }
            selected.extend(
                types.into_iter().map(|resource| Selected { resource: resource.to_owned(), names: names.to_vec() }),
            );
        }
        if selected.iter().any(|one| !one.names.is_empty()) {
            if self.all_namespaces {
                return wrong("a name is only unique in its namespace: use --namespace instead of --all-namespaces");
            }
            if !self.selector.is_empty() || !self.field_selector.is_empty() {
                return wrong("a name and a selector do not go together");
            }
        }
        Ok(selected)
    }
}

/// A type, and the names meant; none means all.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selected {
    pub(super) resource: String,
    pub(super) names: Vec<String>,
}

/// Whether kubefan says that the objects of this type have no namespace, where one was given: kubectl passes it over there.
pub(super) fn is_cluster_scoped(error: &ClientError, target: &Target) -> bool {
    !target.namespace.is_empty() && error.code() == Code::InvalidArgument && error.field() == "target.namespace"
}

/// The one line for an error of the client, in kubectl's form.
pub(super) fn describe(error: &ClientError) -> String {
    let reason = match error {
        ClientError::Unreachable { address, message } => {
            let mut message = message.clone();
            if let Some(first) = message.get_mut(..1) {
                first.make_ascii_lowercase();
            }
            // Whoever speaks TLS ends a connection that begins with something else.
            let spoke = ["stream closed", "reset", "frame", "http2"].iter().any(|text| message.contains(text));
            let hint = if message.contains("certificate") {
                "--ca-file names the CA that signed kubefan's certificate, which must not be a CA itself".to_owned()
            } else if spoke && !address.contains("://") && !address.starts_with("unix:") {
                format!("is that a port for TLS? Then write https://{address}")
            } else {
                "is `kubefan serve` running?".to_owned()
            };
            return format!("error: cannot reach kubefan at {address}: {message}; {hint}");
        }
        ClientError::Address { .. } | ClientError::Undecodable { .. } | ClientError::Protocol { .. } => {
            return format!("error: {error}");
        }
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
    format!("Error from server ({reason}): {error}")
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
    fn types_and_names_are_read_as_kubectl_reads_them() {
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
    fn a_name_goes_with_no_selector_and_one_namespace() {
        assert!(parse(&SelectArgs { all_namespaces: true, ..args() }, "po a").unwrap_err().contains("--namespace"));
        assert!(parse(&SelectArgs { selector: "a=b".into(), ..args() }, "po/a").unwrap_err().contains("selector"));
        assert_eq!(args().target("po", Some("a")).namespace, "default");
        assert_eq!(SelectArgs { all_namespaces: true, ..args() }.target("po", None).namespace, "");
    }

    #[test]
    fn errors_have_kubectls_form() {
        let refused =
            ClientError::Unreachable { address: "127.0.0.1:7443".into(), message: "Connection refused".into() };
        assert_eq!(
            describe(&refused),
            "error: cannot reach kubefan at 127.0.0.1:7443: connection refused; is `kubefan serve` running?"
        );
        let message = "stream closed because of a broken pipe".into();
        let closed = ClientError::Unreachable { address: "127.0.0.1:7443".into(), message };
        assert!(describe(&closed).ends_with("is that a port for TLS? Then write https://127.0.0.1:7443"));
        let message = "invalid peer certificate: UnknownIssuer".into();
        let unknown = ClientError::Unreachable { address: "https://127.0.0.1:7443".into(), message };
        assert!(describe(&unknown).contains("--ca-file"));
    }
}
