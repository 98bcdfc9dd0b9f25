//! `kubefan verify`: what a running kubefan holds against the apiserver, by name and version, each resource at one version.
//!
//! Two lists that were read one after the other always differ in a busy cluster. So kubefan's is read first, and the apiserver is asked
//! for exactly the version that it had: what differs then is wrong.

use std::{
    io::{BufWriter, Write, stdout},
    path::PathBuf,
    time::Duration,
};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    CliError,
    select::{ServerArgs, describe, is_cluster_scoped},
    table::Columns,
};
use kubefan_client::{ClientError, ListWatch, ObjectList, Parts, Projection, ReadOptions, ResourceStatus, Target};
use kubefan_common::proto::v1alpha1::ResourceState;
use kubefan_model::{GroupVersionResource, ObjectKey, ResourceVersion, Scope};
use kubefan_proxy::{
    cache::comparison::{Comparison, Difference, Differences},
    upstream::{
        Upstream, UpstreamError,
        client::UpstreamOptions,
        metadata::{MetadataPages, MetadataTarget},
        settings::UpstreamSettings,
    },
};

/// A version may be compacted while it is read, and an apiserver may be behind: then both are read again.
const TRIES: usize = 3;
/// Between two tries.
const TRY_INTERVAL: Duration = Duration::from_secs(1);
/// The longest that a server may ask to wait before the next.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

/// Compare what kubefan holds with the apiserver, at the same version
///
/// Exits with 0 where all is equal, 1 where something differs, 2 where that could not be told.
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Types, by any name that kubectl takes [default: all that kubefan caches]
    #[arg(value_name = "RESOURCE", value_delimiter = ',')]
    resources: Vec<String>,

    /// How to print
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    /// Only this namespace [default: all that kubefan caches]
    #[arg(short, long, value_name = "NAME", default_value = "", hide_default_value = true)]
    namespace: String,

    /// Only objects with these labels, such as app=web,tier!=db
    #[arg(short = 'l', long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    selector: String,

    /// Only objects with these fields; for a kubefan with --upstream-field-selector, its selector
    #[arg(long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    field_selector: String,

    /// The kubeconfig of the apiserver, instead of $KUBECONFIG, ~/.kube/config or the pod's service account
    #[arg(long, env = "KUBEFAN_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// The context of the kubeconfig, instead of its current one
    #[arg(long, env = "KUBEFAN_CONTEXT", value_name = "NAME")]
    context: Option<String>,

    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// JSON
    Json,
}

/// What one comparison came to.
struct Compared {
    resource: String,
    namespace: String,
    objects: usize,
    version: String,
    outcome: Outcome,
}

enum Outcome {
    Equal,
    Different(Differences),
    Unknown(String),
}

pub(super) async fn run(args: VerifyArgs) -> Result<(), CliError> {
    match verify(&args).await {
        Ok(compared) => {
            match args.output {
                Some(Format::Json) => print_json(&compared)?,
                None => print_table(&compared)?,
            }
            let any = |found: fn(&Outcome) -> bool| compared.iter().any(|one| found(&one.outcome));
            match () {
                () if any(|outcome| matches!(outcome, Outcome::Different(_))) => Err(CliError::Printed),
                () if any(|outcome| matches!(outcome, Outcome::Unknown(_))) => Err(CliError::Undetermined(None)),
                () => Ok(()),
            }
        }
        Err(error) => Err(CliError::Undetermined(Some(error.to_string()))),
    }
}

async fn verify(args: &VerifyArgs) -> Result<Vec<Compared>, CliError> {
    let settings = UpstreamSettings { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
    let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await.map_err(CliError::plain)?;
    let client = args.server.connect().await?;
    let mut compared = Vec::new();
    for (name, target) in targets(args, client.list_resources().await?) {
        compared.push(compare(&client, &upstream, name, target).await);
    }
    if compared.is_empty() {
        return Err(CliError::Plain("kubefan caches nothing yet; name what to compare, such as pods".to_owned()));
    }
    Ok(compared)
}

/// The caches that are meant, by a name to show; what is not cached yet is asked for as it was written.
fn targets(args: &VerifyArgs, cached: Vec<ResourceStatus>) -> Vec<(String, Target)> {
    let target = |namespace: &str| Target {
        namespace: namespace.to_owned(),
        label_selector: args.selector.clone(),
        field_selector: args.field_selector.clone(),
        ..Target::default()
    };
    let of_cache = |status: &ResourceStatus| {
        let namespaced = status.resource.as_ref().is_some_and(|resource| resource.namespaced);
        let namespace = match (&*status.namespace, &*args.namespace) {
            ("", wanted) if namespaced => wanted,
            ("", _) => "",
            (scope, "") => scope,
            (scope, wanted) => (scope == wanted).then_some(scope)?,
        };
        let mut target = target(namespace);
        match &status.resource {
            Some(resource) => {
                (target.group, target.version) = (resource.group.clone(), resource.version.clone());
                target.resource = resource.resource.clone();
            }
            None => target.resource = status.name.clone(),
        }
        Some((status.name.clone(), target))
    };
    // That a resource does not exist is an answer, and there is nothing to compare.
    let exists = |status: &&ResourceStatus| status.state() != ResourceState::NotFound;
    if args.resources.is_empty() {
        return cached.iter().filter(exists).filter_map(of_cache).collect();
    }
    let named = |name: &String| {
        let is_named = |status: &&ResourceStatus| {
            let resource = status.resource.as_ref().map(|resource| resource.resource.as_str());
            status.name == *name || resource == Some(name)
        };
        let found: Vec<_> = cached.iter().filter(is_named).filter_map(of_cache).collect();
        match found.is_empty() {
            false => found,
            true => vec![(name.clone(), Target { resource: name.clone(), ..target(&args.namespace) })],
        }
    };
    args.resources.iter().flat_map(named).collect()
}

/// One resource, as often as it takes to read both sides at one version.
async fn compare(client: &ListWatch, upstream: &Upstream, resource: String, mut target: Target) -> Compared {
    let mut compared = Compared {
        resource,
        namespace: String::new(),
        objects: 0,
        version: String::new(),
        outcome: Outcome::Unknown(String::new()),
    };
    for _ in 0..TRIES {
        let options = ReadOptions {
            projection: Projection { parts: Parts::Metadata, ..Projection::default() },
            ..ReadOptions::default()
        };
        let list = match client.list(target.clone(), options).await {
            Ok(list) => list,
            Err(error) if is_cluster_scoped(&error, &target) => {
                target.namespace.clear();
                continue;
            }
            Err(error) => {
                compared.outcome = Outcome::Unknown(describe(&error));
                match (error.retry_after(), error) {
                    (Some(delay), ClientError::Status(_)) => sleep(delay.min(RETRY_DELAY_MAX)).await,
                    _ => return compared,
                }
                continue;
            }
        };
        compared.namespace.clone_from(&target.namespace);
        (compared.objects, compared.version) = (list.objects.len(), list.resource_version.clone());
        match differences(upstream, list, &target).await {
            Ok(differences) if differences.count == 0 => {
                compared.outcome = Outcome::Equal;
                return compared;
            }
            Ok(differences) => {
                compared.outcome = Outcome::Different(differences);
                return compared;
            }
            Err(Failed::Passing(message)) => {
                compared.outcome = Outcome::Unknown(message);
                sleep(TRY_INTERVAL).await;
            }
            Err(Failed::Final(message)) => {
                compared.outcome = Outcome::Unknown(message);
                return compared;
            }
        }
    }
    compared
}

enum Failed {
    /// Worth another try, with kubefan's version of then.
    Passing(String),
    Final(String),
}

async fn differences(upstream: &Upstream, list: ObjectList, target: &Target) -> Result<Differences, Failed> {
    let broken = |message: String| Failed::Final(format!("kubefan's answer cannot be read: {message}"));
    let version: ResourceVersion = list.resource_version.parse().map_err(|error| broken(format!("{error}")))?;
    let resource = list.resource.unwrap_or_default();
    // Versions of two clusters do not compare. Where one of them may not be read, the comparison itself tells.
    let asked = upstream.confirm(upstream.doubt()).await;
    if let (Ok(()), Some(cluster)) = (asked, upstream.cluster())
        && !list.cluster.is_empty()
        && list.cluster != cluster
    {
        return Err(Failed::Final(format!(
            "kubefan's state is of another cluster ({}) than the apiserver at {} ({cluster})",
            list.cluster,
            upstream.server()
        )));
    }
    let held = list.objects.into_iter().map(|object| {
        let version = object.resource_version.parse()?;
        Ok((ObjectKey::new(&object.namespace, &object.name), version))
    });
    let held: Vec<(ObjectKey, ResourceVersion)> = held
        .collect::<Result<_, kubefan_model::version::InvalidVersion>>()
        .map_err(|error| broken(error.to_string()))?;
    let scope = match target.namespace.as_str() {
        "" => Scope::Cluster,
        namespace => Scope::Namespace(namespace.to_owned()),
    };
    let target = MetadataTarget {
        gvr: GroupVersionResource::new(resource.group, resource.version, resource.resource),
        scope,
        label_selector: target.label_selector.clone(),
        field_selector: target.field_selector.clone(),
    };
    let mut pages = MetadataPages::new(upstream.clone(), target, version);
    let mut comparison = Comparison::new(held.into_iter(), usize::MAX);
    let failed = |error: UpstreamError| match error {
        UpstreamError::Gone { .. } | UpstreamError::VersionTooLarge { .. } => Failed::Passing(error.to_string()),
        UpstreamError::Auth { message } => Failed::Final(format!(
            "the apiserver at {} does not accept the credentials of verify's own kubeconfig (401): {message}",
            upstream.server()
        )),
        error => Failed::Final(error.to_string()),
    };
    while let Some(page) = pages.next().await.map_err(failed)? {
        if pages.is_cached() {
            return Err(Failed::Final(format!(
                "the server at {} is a kubefan, which answered from its cache; name the apiserver's own kubeconfig (--kubeconfig)",
                upstream.server()
            )));
        }
        for (key, version) in page {
            comparison.compare(key, version).map_err(|error| Failed::Final(error.to_string()))?;
        }
    }
    Ok(comparison.finish())
}

fn print_table(compared: &[Compared]) -> Result<(), CliError> {
    let mut out = BufWriter::new(stdout());
    let mut rows = vec![["RESOURCE", "NAMESPACE", "OBJECTS", "VERSION", "RESULT"].map(str::to_owned).to_vec()];
    for Compared { resource, namespace, objects, version, outcome } in compared {
        let namespace = if namespace.is_empty() { "<all>" } else { namespace };
        let (objects, version) = match version.as_str() {
            "" => ("<unknown>".to_owned(), "<unknown>"),
            version => (objects.to_string(), version),
        };
        let result = match outcome {
            Outcome::Equal => "equal".to_owned(),
            Outcome::Different(differences) => format!("{} different", differences.count),
            Outcome::Unknown(message) => format!("unknown: {}", message.replace('\n', " ")),
        };
        rows.push(vec![resource.clone(), namespace.to_owned(), objects, version.to_owned(), result]);
    }
    Columns::default().print(&mut out, &rows)?;
    for Compared { resource, outcome, .. } in compared {
        if let Outcome::Different(differences) = outcome {
            for difference in &differences.first {
                writeln!(out, "{resource} {difference}")?;
            }
        }
    }
    Ok(out.flush()?)
}

fn print_json(compared: &[Compared]) -> Result<(), CliError> {
    let results: Vec<Value> = compared.iter().map(as_json).collect();
    let mut out = BufWriter::new(stdout());
    serde_json::to_writer_pretty(&mut out, &json!({ "results": results })).map_err(CliError::plain)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

fn as_json(compared: &Compared) -> Value {
    let Compared { resource, namespace, objects, version, outcome } = compared;
    let (result, message, differences) = match outcome {
        Outcome::Equal => ("equal", "", &[][..]),
        Outcome::Different(differences) => ("different", "", &differences.first[..]),
        Outcome::Unknown(message) => ("unknown", message.as_str(), &[][..]),
    };
    let difference = |Difference { key, cached, upstream }: &Difference| {
        json!({
            "namespace": key.namespace(), "name": key.name(),
            "held": cached.map(|version| version.to_string()), "upstream": upstream.map(|version| version.to_string()),
        })
    };
    json!({
        "resource": resource, "namespace": namespace, "objects": objects, "resourceVersion": version, "result": result,
        "message": message, "differences": differences.iter().map(difference).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use kubefan_client::ResolvedResource;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        verify: VerifyArgs,
    }

    fn cached(name: &str, namespaced: bool, namespace: &str) -> ResourceStatus {
        let resource = name.split('.').next().unwrap_or_default().to_owned();
        let version = "v1".to_owned();
        ResourceStatus {
            name: name.to_owned(),
            resource: Some(ResolvedResource { resource, version, namespaced, ..ResolvedResource::default() }),
            namespace: namespace.to_owned(),
            state: ResourceState::Synced.into(),
            ..ResourceStatus::default()
        }
    }

    fn meant(words: &[&str], cached: &[ResourceStatus]) -> Vec<(String, String)> {
        let args = Only::parse_from(["verify"].iter().chain(words)).verify;
        targets(&args, cached.to_vec()).into_iter().map(|(_, target)| (target.resource, target.namespace)).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
    }

    #[test]
    fn all_that_is_cached_is_meant_or_what_is_named() {
        let all = [cached("pods", true, ""), cached("nodes", false, "")];
        assert_eq!(meant(&[], &all), pairs(&[("pods", ""), ("nodes", "")]));
        assert_eq!(meant(&["-n", "x"], &all), pairs(&[("pods", "x"), ("nodes", "")]));
        assert_eq!(meant(&["nodes,deploy"], &all), pairs(&[("nodes", ""), ("deploy", "")]));
        let scopes = [cached("pods", true, "a"), cached("pods", true, "b")];
        assert_eq!(meant(&["pods"], &scopes), pairs(&[("pods", "a"), ("pods", "b")]));
        assert_eq!(meant(&["-n", "b"], &scopes), pairs(&[("pods", "b")]));
        let missing = ResourceStatus { state: ResourceState::NotFound.into(), ..cached("widgets", true, "") };
        assert_eq!(meant(&[], &[missing]), []);
    }
}
