//! Environment variables that no option reads. A misspelt variable that is silently ignored is a
//! setting that the operator believes in, so it is named.
//!
//! Kubernetes sets variables for each Service in a pod's namespace, and those of a Service named
//! `kubefan` begin like kubefan's own (`makeEnvVariableName` in `pkg/kubelet/envvars`).

use super::names::nearest;

/// The start of every variable that kubefan reads.
const PREFIX: &str = "KUBEFAN_";
/// The most variables to name.
const UNKNOWN_MAX: usize = 20;

/// Describes the variables that look like settings of kubefan and are none. `known` are the names
/// that some command reads, and `set` the names and values of the environment.
pub fn unknown(set: impl IntoIterator<Item = (String, String)>, known: &[&str]) -> Vec<String> {
    let is_unknown = |(name, value): &(String, String)| {
        let rest = name.strip_prefix(PREFIX)?;
        (!known.contains(&name.as_str()) && !is_of_a_service(rest, value)).then(|| rest.to_owned())
    };
    let mut unknown: Vec<_> = set.into_iter().filter_map(|variable| is_unknown(&variable)).collect();
    unknown.sort_unstable();
    let describe = |rest: String| match nearest(&rest, known.iter().filter_map(|known| known.strip_prefix(PREFIX))) {
        Some(known) => format!("{PREFIX}{rest} is ignored; did you mean {PREFIX}{known}?"),
        None => format!("{PREFIX}{rest} is ignored; `kubefan serve --help` names the variables"),
    };
    unknown.into_iter().take(UNKNOWN_MAX).map(describe).collect()
}

/// Whether Kubernetes set this variable for a Service. `rest` follows [`PREFIX`]; it may begin with
/// more of the Service's name, as in `kubefan-peers`.
fn is_of_a_service(rest: &str, value: &str) -> bool {
    let ends = |end: &str| rest.strip_suffix(end).is_some_and(|start| start.is_empty() || start.ends_with('_'));
    if ends("SERVICE_HOST") || ends("SERVICE_PORT") || format!("_{rest}").contains("_SERVICE_PORT_") {
        return true;
    }
    // `KUBEFAN_PORT=tcp://10.0.0.1:7443`, and `KUBEFAN_PORT_7443_TCP` with its parts.
    let is_numbered = |rest: &str| {
        let mut parts = rest.split('_');
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        parts.next().is_some_and(is_number) && parts.next().is_some_and(|part| ["TCP", "UDP", "SCTP"].contains(&part))
    };
    let after_port = format!("_{rest}").split_once("_PORT_").is_some_and(|(_, rest)| is_numbered(rest));
    after_port || (ends("PORT") && value.contains("://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 3] = ["KUBEFAN_RESOURCE", "KUBEFAN_LISTEN", "KUBEFAN_MAX_STALENESS"];

    fn described(set: &[(&str, &str)]) -> Vec<String> {
        unknown(set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())), &KNOWN)
    }

    #[test]
    fn a_misspelt_variable_is_named_with_the_one_that_was_meant() {
        let set = [
            ("HOME", "/root"),
            ("KUBEFAN_RESOURCE", "pods"),
            ("KUBEFAN_RESORCE", "pods"),
            ("KUBEFAN_ZEBRA", "1"),
            ("KUBEFAN_ADMIN_PORT", "7444"),
        ];
        assert_eq!(
            described(&set),
            [
                "KUBEFAN_ADMIN_PORT is ignored; `kubefan serve --help` names the variables",
                "KUBEFAN_RESORCE is ignored; did you mean KUBEFAN_RESOURCE?",
                "KUBEFAN_ZEBRA is ignored; `kubefan serve --help` names the variables",
            ]
        );
    }

    #[test]
    fn the_variables_of_services_are_not_named() {
        let set = [
            ("KUBEFAN_SERVICE_HOST", "10.0.0.1"),
            ("KUBEFAN_SERVICE_PORT", "7443"),
            ("KUBEFAN_SERVICE_PORT_KUBERNETES_API", "7443"),
            ("KUBEFAN_PORT", "tcp://10.0.0.1:7443"),
            ("KUBEFAN_PORT_7443_TCP", "tcp://10.0.0.1:7443"),
            ("KUBEFAN_PORT_7443_TCP_PROTO", "tcp"),
            ("KUBEFAN_PORT_7443_TCP_PORT", "7443"),
            ("KUBEFAN_PORT_7443_TCP_ADDR", "10.0.0.1"),
            ("KUBEFAN_PEERS_SERVICE_HOST", "10.0.0.1"),
            ("KUBEFAN_PEERS_PORT", "udp://10.0.0.1:7445"),
            ("KUBEFAN_PEERS_PORT_7445_UDP_ADDR", "10.0.0.1"),
        ];
        assert_eq!(described(&set), Vec::<String>::new());
    }

    #[test]
    fn a_limited_number_of_variables_is_named() {
        let set: Vec<_> = (0..1000).map(|number| (format!("KUBEFAN_X{number}"), String::new())).collect();
        assert_eq!(unknown(set, &KNOWN).len(), UNKNOWN_MAX);
    }
}
