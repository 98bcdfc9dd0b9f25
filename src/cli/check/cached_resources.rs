//! The group "resources": whether each resource exists, may be listed and watched in every
//! configured scope, and how large it is.

use futures::StreamExt;

use kubefan_app::{config::ServeConfig, mode_names};
use kubefan_model::{GroupVersionResource, Media, Scope};
use kubefan_upstream::{
    Upstream, UpstreamError,
    client::encode_query,
    discovery::{Discovery, DiscoveryOptions},
};

use super::{
    access_rights::{Right, has},
    network_step::step,
    report::{Finding, Report},
};
use crate::cli::{
    object_sample::{ObjectSample, ResourceSize},
    sizing::human_bytes,
};

/// Checks the resources. Returns the sizes of the caches, as far as they are known.
pub(super) async fn check(config: &ServeConfig, upstream: &Upstream, report: &mut Report) -> Vec<ResourceSize> {
    report.group("resources");
    let discovery = Discovery::new(upstream.clone(), DiscoveryOptions::default());
    let mut sizes = Vec::new();
    // A proxy that holds watches back does so for all of them, and waiting takes a second.
    let mut waits_for_bytes = true;
    for resource in &config.cache.resources {
        report.waits_for(&format!("discovery of {}", resource.name));
        let found = match discovery.resolve(&resource.name).await {
            Ok(found) => found,
            Err(error) => {
                report.add(Finding::error(resource.name.clone(), error.to_string(), ""));
                continue;
            }
        };
        let scopes: Vec<Scope> = match config.cache.namespaces.as_slice() {
            [] => vec![Scope::Cluster],
            _ if !found.namespaced => vec![Scope::Cluster],
            namespaces => namespaces.iter().cloned().map(Scope::Namespace).collect(),
        };
        for scope in scopes {
            let selector = config.upstream.field_selector.as_ref().map(ToString::to_string).unwrap_or_default();
            let cache = Cache { upstream, gvr: &found.gvr, scope, selector };
            sizes.extend(cache.check(waits_for_bytes, report).await);
            waits_for_bytes = false;
        }
    }
    if config.cache.resources.is_empty() {
        report.add(Finding::ok("from the start", "none; readers choose (--on-demand)"));
    }
    for unmatched in mode_names::unmatched(&config.modes.modes, &discovery).await {
        report.add(Finding::warning("modes", unmatched.to_string(), "`kubectl api-resources -o name` lists all"));
    }
    sizes
}

/// One cache that `serve` would fill.
struct Cache<'a> {
    upstream: &'a Upstream,
    gvr: &'a GroupVersionResource,
    scope: Scope,
    selector: String,
}

impl Cache<'_> {
    fn name(&self) -> String {
        match &self.scope {
            Scope::Cluster => self.gvr.to_string(),
            Scope::Namespace(namespace) => format!("{} in {namespace}", self.gvr),
        }
    }

    async fn check(&self, waits_for_bytes: bool, report: &mut Report) -> Option<ResourceSize> {
        report.waits_for(&format!("the rights to {}", self.name()));
        let denied = self.denied().await;
        if !denied.is_empty() {
            report.add(judge_denied(&self.name(), &denied));
            return None;
        }
        report.waits_for(&format!("a list of {}", self.name()));
        let path = self.gvr.collection_path(&self.scope);
        let sample = match step(ObjectSample::read(self.upstream, &path, &self.selector)).await {
            Ok(sample) => sample,
            Err(error) => {
                report.add(Finding::error(self.name(), format!("cannot be listed: {error}"), ""));
                return None;
            }
        };
        report.waits_for(&format!("a watch of {}", self.name()));
        if let Err(error) = step(self.watch(&sample.resource_version, waits_for_bytes)).await {
            let remedy = "a proxy in between must pass watches on as they come";
            report.add(Finding::error(self.name(), format!("can be listed, but not watched: {error}"), remedy));
            return None;
        }
        report.add(Finding::ok(self.name(), described(sample.size)));
        sample.size
    }

    /// The rights to list and watch that the account lacks, as far as the server tells.
    async fn denied(&self) -> Vec<Right<'_>> {
        let mut denied = Vec::new();
        for verb in ["list", "watch"] {
            let group = self.gvr.group.as_str();
            let resource = self.gvr.resource.as_str();
            let right = Right { verb, group, resource, namespace: self.scope.namespace().into(), ..Right::default() };
            if let Ok(Some(false)) = has(self.upstream, &right).await {
                denied.push(right);
            }
        }
        denied
    }

    fn watch_path(&self, parameters: &[(&str, &str)]) -> String {
        let selector = ("fieldSelector", self.selector.as_str());
        let all = parameters.iter().copied().chain((!self.selector.is_empty()).then_some(selector));
        format!("{}{}", self.gvr.collection_path(&self.scope), encode_query(all))
    }

    /// Starts a watch. `waits_for_bytes`: and waits until its first bytes or its end.
    async fn watch(&self, version: &str, waits_for_bytes: bool) -> Result<(), UpstreamError> {
        let parameters =
            [("watch", "1"), ("resourceVersion", version), ("timeoutSeconds", "1"), ("allowWatchBookmarks", "true")];
        let mut chunks = self.upstream.stream(&self.watch_path(&parameters), Media::Json).await?;
        if waits_for_bytes { chunks.next().await.transpose().map(|_| ()) } else { Ok(()) }
    }
}

/// Names the rights, and one rule that grants both.
fn judge_denied(name: &str, denied: &[Right<'_>]) -> Finding {
    let verbs: Vec<_> = denied.iter().map(|right| right.verb).collect();
    let both = denied.first().cloned().unwrap_or_default();
    let verbs_of_rule = verbs.join(", ");
    let kind = if both.namespace.is_empty() { "ClusterRole" } else { "Role" };
    Finding::error(
        name,
        format!("kubefan may not {} it", verbs.join(" and ")),
        format!("grant its account {} by a {kind}", Right { verb: &verbs_of_rule, ..both }.rule()),
    )
}

fn described(size: Option<ResourceSize>) -> String {
    match size {
        None => "can be listed and watched".to_owned(),
        Some(ResourceSize { objects, bytes }) => {
            format!("can be listed and watched; {objects} objects, about {} of JSON", human_bytes(bytes as f64))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_grants_both_verbs() {
        let right = |verb, namespace| Right {
            verb,
            resource: "pods",
            namespace: String::from(namespace).into(),
            ..Right::default()
        };
        let both = judge_denied("pods", &[right("list", ""), right("watch", "")]);
        assert_eq!(both.message, "kubefan may not list and watch it");
        let rule = "{ apiGroups: [\"\"], resources: [pods], verbs: [list, watch] } by a ClusterRole";
        assert!(both.remedy.ends_with(rule), "{both:?}");
        let one = judge_denied("pods in a", &[right("watch", "a")]);
        assert!(one.remedy.ends_with("verbs: [watch] } by a Role"), "{one:?}");
    }
}
