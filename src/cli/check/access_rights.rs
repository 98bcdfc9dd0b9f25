//! Rights of kubefan's account, asked for by SelfSubjectAccessReview, and the group "rights": those
//! beside list and watch.

use std::{borrow::Cow, fmt};

use serde::Deserialize;
use serde_json::{Value, json};

use kubefan_app::config::{ClientCas, ServeConfig, TlsSource};
use kubefan_managed_tls::{ObjectName, Stored};
use kubefan_upstream::{ReviewKind, Upstream, UpstreamError, passthrough::Credentials};

use super::{
    configuration::reviews_callers,
    report::{Finding, Report},
};

const SELF_ACCESS: ReviewKind = ReviewKind {
    path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    api_version: "authorization.k8s.io/v1",
    kind: "SelfSubjectAccessReview",
};

#[derive(Deserialize)]
struct Verdict {
    allowed: bool,
}

/// A right, as RBAC names it. Empty texts mean all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Right<'a> {
    pub(super) verb: &'a str,
    pub(super) group: &'a str,
    pub(super) resource: &'a str,
    pub(super) name: Cow<'a, str>,
    pub(super) namespace: Cow<'a, str>,
    /// A path such as `/metrics`, instead of a resource.
    pub(super) path: &'a str,
}

impl Right<'_> {
    fn spec(&self) -> Value {
        let Self { verb, group, resource, name, namespace, path } = self;
        if !path.is_empty() {
            return json!({ "nonResourceAttributes": { "path": path, "verb": verb } });
        }
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        json!({ "resourceAttributes": {
            "verb": verb, "group": group, "resource": resource, "subresource": subresource, "name": name, "namespace": namespace,
        }})
    }

    /// The rule that grants it.
    pub(super) fn rule(&self) -> String {
        let Self { verb, group, resource, name, path, .. } = self;
        if !path.is_empty() {
            return format!("{{ nonResourceURLs: [\"{path}\"], verbs: [{verb}] }}");
        }
        let names = if name.is_empty() { String::new() } else { format!(", resourceNames: [{name}]") };
        let group = if group.is_empty() { "\"\"" } else { group };
        format!("{{ apiGroups: [{group}], resources: [{resource}]{names}, verbs: [{verb}] }}")
    }
}

/// Formats a right such as `list pods in the namespace a`.
impl fmt::Display for Right<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, group, resource, name, namespace, path } = self;
        if !path.is_empty() {
            return write!(f, "{verb} {path}");
        }
        write!(f, "{verb} {resource}")?;
        if !group.is_empty() {
            write!(f, ".{group}")?;
        }
        if !name.is_empty() {
            write!(f, " {name}")?;
        }
        if namespace.is_empty() { Ok(()) } else { write!(f, " in the namespace {namespace}") }
    }
}

/// Whether kubefan's account has a right. `None` if the server has no such review.
///
/// # Errors
/// The review failed.
pub(super) async fn has(upstream: &Upstream, right: &Right<'_>) -> Result<Option<bool>, UpstreamError> {
    match upstream.review::<Verdict>(&SELF_ACCESS, &right.spec()).await {
        Ok(verdict) => Ok(Some(verdict.allowed)),
        Err(UpstreamError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A right and kubefan's need for it.
struct NeededRight {
    right: Right<'static>,
    purpose: &'static str,
    /// Without it kubefan serves, but less.
    is_optional: bool,
    /// The role that grants it beside its rule.
    role: &'static str,
}

/// Checks the rights beside list and watch.
pub(super) async fn check(config: &ServeConfig, upstream: &Upstream, report: &mut Report) {
    report.group("rights");
    for need in needs(config) {
        report.waits_for(&need.right.to_string());
        report.add(judge(&need, has(upstream, &need.right).await));
    }
}

fn needs(config: &ServeConfig) -> Vec<NeededRight> {
    let need = |right, purpose| NeededRight { right, purpose, is_optional: false, role: "" };
    let namespaces = Right { verb: "get", resource: "namespaces", name: "kube-system".into(), ..Right::default() };
    let mut needs = vec![NeededRight { is_optional: true, ..need(namespaces, "the identity of the cluster") }];
    if reviews_callers(config) {
        let create = |group, resource| Right { verb: "create", group, resource, ..Right::default() };
        for (right, purpose) in [
            (create("authentication.k8s.io", "tokenreviews"), "the identity of callers"),
            (create("authorization.k8s.io", "subjectaccessreviews"), "the rights of callers"),
        ] {
            needs.push(NeededRight { role: "the ClusterRole system:auth-delegator has it", ..need(right, purpose) });
        }
        if config.client_cas() == ClientCas::Cluster {
            let name = "extension-apiserver-authentication".into();
            let namespace = "kube-system".into();
            let right = Right { verb: "get", resource: "configmaps", name, namespace, ..Right::default() };
            let role = "the Role extension-apiserver-authentication-reader of kube-system has it";
            needs.push(NeededRight { is_optional: true, role, ..need(right, "the CAs of client certificates") });
        }
        if config.callers.service_account_jwks {
            for path in ["/.well-known/openid-configuration", "/openid/v1/jwks"] {
                let right = Right { verb: "get", path, ..Right::default() };
                let role = "the ClusterRole system:service-account-issuer-discovery has it";
                needs.push(NeededRight { role, ..need(right, "the keys of service accounts' tokens") });
            }
        }
    }
    if let Some(TlsSource::Managed(managed)) = &config.serving.tls {
        let of = |resource: &'static str, object: &ObjectName, verb| {
            let name = object.name.clone().into();
            let namespace = object.namespace.clone().into();
            Right { verb, resource, name, namespace, ..Right::default() }
        };
        for verb in ["get", "update"] {
            needs.push(need(of("secrets", &managed.secret, verb), "the managed certificate (--tls-managed-secret)"));
            for (stored, object) in managed.published_in() {
                let purpose = match stored {
                    Stored::ConfigMap => "the managed CA, for clients that read it there",
                    Stored::Secret | Stored::Copy => "the managed certificate, for servers with a copy of it",
                };
                let right = of(stored.resource(), object, verb);
                needs.push(NeededRight { is_optional: true, ..need(right, purpose) });
            }
        }
    }
    if config.access.credentials() == Some(Credentials::Impersonate) {
        for (group, resource) in [
            ("", "users"),
            ("", "groups"),
            ("", "serviceaccounts"),
            ("authentication.k8s.io", "uids"),
            ("authentication.k8s.io", "userextras"),
        ] {
            let right = Right { verb: "impersonate", group, resource, ..Right::default() };
            needs.push(need(right, "forwarding requests as their callers (--access=authorized-impersonate)"));
        }
    }
    needs
}

fn judge(need: &NeededRight, has: Result<Option<bool>, UpstreamError>) -> Finding {
    let NeededRight { right, purpose, is_optional, role } = need;
    let check = right.to_string();
    let role = if role.is_empty() { String::new() } else { format!(" ({role})") };
    let remedy = format!("grant kubefan's account {}{role}", right.rule());
    match has {
        Ok(Some(true)) => Finding::ok(check, format!("allowed, for {purpose}")),
        Ok(Some(false)) if *is_optional => Finding::warning(check, format!("denied; needed for {purpose}"), remedy),
        Ok(Some(false)) => Finding::error(check, format!("denied; needed for {purpose}"), remedy),
        Ok(None) => Finding::warning(check, "unknown: the server has no SelfSubjectAccessReview", remedy),
        Err(error) => Finding::warning(check, format!("unknown: {error}"), remedy),
    }
}

#[cfg(test)]
mod tests {
    use kubefan_app::config::ServeOptions;

    use super::super::report::Outcome;
    use super::*;

    fn config(change: impl FnOnce(&mut ServeOptions)) -> ServeConfig {
        let mut options = ServeOptions::default();
        change(&mut options);
        options.validate().unwrap()
    }

    fn names(config: &ServeConfig) -> Vec<String> {
        needs(config).iter().map(|need| need.right.to_string()).collect()
    }

    #[test]
    fn the_rights_follow_the_configuration() {
        let identity = "get namespaces kube-system";
        assert_eq!(names(&config(|_| ())), [identity]);
        let reviewing = |options: &mut ServeOptions| {
            options.serving.tls_cert_file = Some("a".into());
            options.serving.tls_private_key_file = Some("b".into());
        };
        let reviews = ["create tokenreviews.authentication.k8s.io", "create subjectaccessreviews.authorization.k8s.io"];
        let cas = "get configmaps extension-apiserver-authentication in the namespace kube-system";
        assert_eq!(names(&config(reviewing)), [&[identity], &reviews[..], &[cas]].concat());
        let impersonating = names(&config(|options| {
            reviewing(options);
            options.callers.authentication_skip_lookup = Some(true);
            options.callers.access = Some(kubefan_app::config::Access::AuthorizedImpersonate);
        }));
        assert_eq!(impersonating.len(), 8);
        assert!(impersonating.contains(&"impersonate userextras.authentication.k8s.io".to_owned()));
    }

    #[test]
    fn a_missing_right_names_the_rule_that_grants_it() {
        let need = &needs(&config(|_| ()))[0];
        let denied = judge(need, Ok(Some(false)));
        assert_eq!(denied.result, Outcome::Warning);
        let rule = "{ apiGroups: [\"\"], resources: [namespaces], resourceNames: [kube-system], verbs: [get] }";
        assert!(denied.remedy.contains(rule), "{denied:?}");
        assert_eq!(judge(need, Ok(Some(true))).result, Outcome::Ok);
        assert_eq!(judge(need, Ok(None)).result, Outcome::Warning);
        let path = Right { verb: "get", path: "/metrics", ..Right::default() };
        assert_eq!(path.rule(), "{ nonResourceURLs: [\"/metrics\"], verbs: [get] }");
        assert_eq!(path.spec()["nonResourceAttributes"]["path"], "/metrics");
        let nodes = Right { verb: "get", resource: "nodes/proxy", ..Right::default() };
        assert_eq!(nodes.spec()["resourceAttributes"]["subresource"], "proxy");
    }
}
