//! `kubefan verify`: compares the cache of a running kubefan with the apiserver, by object key and
//! resource version.
//!
//! In a busy cluster, two lists read one after the other always differ. Therefore the command lists
//! kubefan first and then asks the apiserver for exactly the same resource version: any difference
//! is an error in the cache.

use std::{
    io::{BufWriter, Write, stdout},
    path::PathBuf,
    time::Duration,
};

use clap::{Args, ValueEnum};
use kubefan_cache::comparison::{Comparison, Difference, Differences};
use kubefan_client::{Client, ClientError, ObjectList, Parts, Projection, ReadOptions, ResourceStatus, Target};
use kubefan_common::proto::v1alpha1::ResourceState;
use kubefan_model::{GroupVersionResource, ObjectKey, ResourceVersion, Scope};
use kubefan_upstream::{
    Upstream, UpstreamError,
    client::UpstreamOptions,
    metadata::{MetadataPages, MetadataTarget},
    settings::UpstreamSettings,
};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    error::{CliError, describe},
    select::{ServerArgs, is_cluster_scoped},
    table::Columns,
    visible::{print_json, visible},
};

/// The version may be compacted during the comparison, or an apiserver may lag behind. Then both
/// sides are read again.
const TRIES: usize = 3;
/// The delay between two tries.
const TRY_INTERVAL: Duration = Duration::from_secs(1);
/// Upper limit for the retry delay that the server asks for.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

/// Compare kubefan's cache with the apiserver, at the same resource version
///
/// Exit codes: 0 if everything is equal, 1 if something differs, 2 if the comparison failed. A
/// kubeconfig that points at kubefan is refused: a cache cannot verify itself.
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Types, by any name that kubectl accepts [default: all that kubefan caches]
    #[arg(value_name = "RESOURCE", value_delimiter = ',')]
    resources: Vec<String>,

    /// Output format [default: a table]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    /// Only this namespace [default: all that kubefan caches]
    #[arg(short, long, value_name = "NAME", default_value = "", hide_default_value = true)]
    namespace: String,

    /// Only objects whose labels match, such as app=web,tier!=db
    #[arg(short = 'l', long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    selector: String,

    /// Only objects whose fields match; if kubefan runs with --upstream-field-selector, give that
    /// selector here
    #[arg(long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    field_selector: String,

    /// The kubeconfig of the apiserver, instead of $KUBECONFIG, ~/.kube/config or the pod's service
    /// account
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

/// The result for one cache.
struct ComparedCache {
    resource: String,
    namespace: String,
    objects: usize,
    version: String,
    outcome: CompareResult,
}

enum CompareResult {
    Equal,
    Different(Differences),
    Unknown(String),
}

pub(super) async fn run(args: VerifyArgs) -> Result<(), CliError> {
    match verify(&args).await {
        Ok(compared) => {
            match args.output {
                Some(Format::Json) => print_results(&compared)?,
                None => print_table(&compared)?,
            }
            let any = |found: fn(&CompareResult) -> bool| compared.iter().any(|one| found(&one.outcome));
            match () {
                () if any(|outcome| matches!(outcome, CompareResult::Different(_))) => Err(CliError::Printed),
                () if any(|outcome| matches!(outcome, CompareResult::Unknown(_))) => Err(CliError::Undetermined(None)),
                () => Ok(()),
            }
        }
        Err(error) => Err(CliError::Undetermined(Some(error.to_string()))),
    }
}

async fn verify(args: &VerifyArgs) -> Result<Vec<ComparedCache>, CliError> {
    let settings = UpstreamSettings { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
    let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await.map_err(CliError::plain)?;
    let client = args.server.connect().await?;
    let mut compared = Vec::new();
    for (name, target) in targets(args, client.list_resources().await?) {
        compared.push(compare(&client, &upstream, name, target).await);
    }
    if compared.is_empty() {
        return Err(CliError::Plain("kubefan has no caches yet; name a type to compare, such as pods".to_owned()));
    }
    Ok(compared)
}

/// The caches to compare, each with a name to print. A named type that is not cached yet is passed
/// on as written.
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
                target.group = resource.group.clone();
                target.version = resource.version.clone();
                target.resource = resource.resource.clone();
            }
            None => target.resource = status.name.clone(),
        }
        Some((status.name.clone(), target))
    };
    // If the apiserver does not serve the resource, there is nothing to compare, and neither if it
    // denies kubefan a resource that only a reader asked for.
    let is_cached = |status: &&ResourceStatus| match status.state() {
        ResourceState::NotFound => false,
        ResourceState::Forbidden => !status.on_demand,
        _ => true,
    };
    if args.resources.is_empty() {
        return cached.iter().filter(is_cached).filter_map(of_cache).collect();
    }
    let named = |name: &String| {
        let is_named = |status: &&ResourceStatus| {
            let resource = status.resource.as_ref().map(|resource| resource.resource.as_str());
            status.name == *name || resource == Some(name)
        };
        let found: Vec<_> = cached.iter().filter(is_named).filter_map(of_cache).collect();
        if found.is_empty() {
            vec![(name.clone(), Target { resource: name.clone(), ..target(&args.namespace) })]
        } else {
            found
        }
    };
    args.resources.iter().flat_map(named).collect()
}

/// Compares one cache. Retries until both sides could be read at the same version.
async fn compare(client: &Client, upstream: &Upstream, resource: String, mut target: Target) -> ComparedCache {
    let mut compared = ComparedCache {
        resource,
        namespace: target.namespace.clone(),
        objects: 0,
        version: String::new(),
        outcome: CompareResult::Unknown(String::new()),
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
                compared.namespace.clear();
                continue;
            }
            Err(error) => {
                compared.outcome = CompareResult::Unknown(describe(&error));
                match (error.retry_after(), error) {
                    (Some(delay), ClientError::Status(_)) => sleep(delay.min(RETRY_DELAY_MAX)).await,
                    _ => return compared,
                }
                continue;
            }
        };
        compared.objects = list.objects.len();
        compared.version = ResourceVersion::parse_place(&list.resource_version)
            .map_or_else(|_| list.resource_version.clone(), |version| version.whole().to_string());
        match differences(upstream, list, &target).await {
            Ok(differences) if differences.count == 0 => {
                compared.outcome = CompareResult::Equal;
                return compared;
            }
            Ok(differences) => {
                compared.outcome = CompareResult::Different(differences);
                return compared;
            }
            Err(CompareError::Retryable(message)) => {
                compared.outcome = CompareResult::Unknown(message);
                sleep(TRY_INTERVAL).await;
            }
            Err(CompareError::Final(message)) => {
                compared.outcome = CompareResult::Unknown(message);
                return compared;
            }
        }
    }
    compared
}

enum CompareError {
    /// A retry with a newer version of kubefan's cache may succeed.
    Retryable(String),
    Final(String),
}

async fn differences(upstream: &Upstream, list: ObjectList, target: &Target) -> Result<Differences, CompareError> {
    let broken = |message: String| CompareError::Final(format!("kubefan's answer cannot be read: {message}"));
    let version = ResourceVersion::parse_place(&list.resource_version).map_err(|error| broken(error.to_string()))?;
    let resource = list.resource.unwrap_or_default();
    // Versions of different clusters cannot be compared. If the identity of the apiserver's cluster
    // cannot be read, the comparison itself shows any difference.
    let confirmed = upstream.confirm().await;
    if let (Ok(()), Some(cluster)) = (confirmed, upstream.cluster())
        && !list.cluster.is_empty()
        && list.cluster != cluster
    {
        return Err(CompareError::Final(format!(
            "kubefan caches another cluster ({}) than that of the apiserver at {} ({cluster})",
            list.cluster,
            upstream.server()
        )));
    }
    let cached = list.objects.into_iter().map(|object| {
        let version = object.resource_version.parse()?;
        Ok((ObjectKey::new(&object.namespace, &object.name), version))
    });
    let cached: Vec<(ObjectKey, ResourceVersion)> = cached
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
    let mut comparison = Comparison::new(cached.into_iter(), usize::MAX);
    let failed = |error: UpstreamError| match error {
        UpstreamError::Gone { .. } | UpstreamError::VersionTooLarge { .. } => {
            CompareError::Retryable(error.to_string())
        }
        UpstreamError::Auth { message } => CompareError::Final(format!(
            "the apiserver at {} does not accept the credentials of verify's own kubeconfig (401): {message}",
            upstream.server()
        )),
        UpstreamError::Cached { .. } => {
            CompareError::Final(format!("{error}; name the apiserver's own kubeconfig (--kubeconfig)"))
        }
        error => CompareError::Final(error.to_string()),
    };
    while let Some(page) = pages.next().await.map_err(failed)? {
        for (key, version) in page {
            comparison.compare(key, version).map_err(|error| CompareError::Final(error.to_string()))?;
        }
    }
    Ok(comparison.finish())
}

fn print_table(compared: &[ComparedCache]) -> Result<(), CliError> {
    let mut out = BufWriter::new(stdout());
    let mut rows = vec![["RESOURCE", "NAMESPACE", "OBJECTS", "VERSION", "RESULT"].map(str::to_owned).to_vec()];
    for ComparedCache { resource, namespace, objects, version, outcome } in compared {
        let namespace = if namespace.is_empty() { "<all>" } else { namespace };
        let (objects, version) = match version.as_str() {
            "" => ("<unknown>".to_owned(), "<unknown>"),
            version => (objects.to_string(), version),
        };
        let result = match outcome {
            CompareResult::Equal => "equal".to_owned(),
            CompareResult::Different(differences) => format!("{} different", differences.count),
            CompareResult::Unknown(message) => format!("unknown: {}", message.replace('\n', " ")),
        };
        rows.push(vec![resource.clone(), namespace.to_owned(), objects, version.to_owned(), result]);
    }
    Columns::default().print(&mut out, &rows)?;
    for ComparedCache { resource, outcome, .. } in compared {
        if let CompareResult::Different(differences) = outcome {
            for difference in &differences.first {
                writeln!(out, "{}", visible(&format!("{resource} {difference}")))?;
            }
        }
    }
    Ok(out.flush()?)
}

fn print_results(compared: &[ComparedCache]) -> Result<(), CliError> {
    let results: Vec<Value> = compared.iter().map(as_json).collect();
    let mut out = BufWriter::new(stdout());
    print_json(&mut out, &json!({ "results": results }))?;
    Ok(out.flush()?)
}

fn as_json(compared: &ComparedCache) -> Value {
    let ComparedCache { resource, namespace, objects, version, outcome } = compared;
    let (result, message, differences) = match outcome {
        CompareResult::Equal => ("equal", "", &[][..]),
        CompareResult::Different(differences) => ("different", "", &differences.first[..]),
        CompareResult::Unknown(message) => ("unknown", message.as_str(), &[][..]),
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
    use kubefan_client::ResolvedResource;

    use super::*;

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

    fn selected(words: &[&str], cached: &[ResourceStatus]) -> Vec<(String, String)> {
        let args = Only::parse_from(["verify"].iter().chain(words)).verify;
        targets(&args, cached.to_vec()).into_iter().map(|(_, target)| (target.resource, target.namespace)).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
    }

    #[test]
    fn all_caches_are_compared_unless_types_are_named() {
        let all = [cached("pods", true, ""), cached("nodes", false, "")];
        assert_eq!(selected(&[], &all), pairs(&[("pods", ""), ("nodes", "")]));
        assert_eq!(selected(&["-n", "x"], &all), pairs(&[("pods", "x"), ("nodes", "")]));
        assert_eq!(selected(&["nodes,deploy"], &all), pairs(&[("nodes", ""), ("deploy", "")]));
        let scopes = [cached("pods", true, "a"), cached("pods", true, "b")];
        assert_eq!(selected(&["pods"], &scopes), pairs(&[("pods", "a"), ("pods", "b")]));
        assert_eq!(selected(&["-n", "b"], &scopes), pairs(&[("pods", "b")]));
        let missing = ResourceStatus { state: ResourceState::NotFound.into(), ..cached("widgets", true, "") };
        assert_eq!(selected(&[], &[missing]), []);
        let forbidden = |on_demand| {
            let state = ResourceState::Forbidden.into();
            ResourceStatus { state, on_demand, ..cached("secrets", true, "a") }
        };
        assert_eq!(selected(&[], &[forbidden(true)]), [], "only a reader asked for it");
        assert_eq!(selected(&[], &[forbidden(false)]), pairs(&[("secrets", "a")]), "the operator asked for it");
        assert_eq!(selected(&["secrets"], &[forbidden(true)]), pairs(&[("secrets", "a")]), "it is named");
    }
}
