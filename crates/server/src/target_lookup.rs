//! From a target to the cache that holds it and the objects it selects. Every error names the field
//! at fault.

use kubefan_access::{Authorized, Read};
use kubefan_admission::Holder;
use kubefan_cache::Refusal;
use kubefan_fanout::{CacheRequest, Catalog, Served};
use kubefan_model::{Media, selection::Selection, selector::ShardSelector};

use super::selector_limits::SelectorLimits;

/// The cache of a target, and the objects that the target selects.
pub struct Selected {
    /// The cache.
    pub served: Served,
    /// The objects.
    pub selection: Selection,
}

/// Finds the cache of an authorized read, in an encoding, and binds its selectors. Their memory is
/// counted to `holder`.
pub async fn select(
    catalog: &dyn Catalog,
    read: &Authorized<Read>,
    media: Media,
    holder: Option<Holder>,
    limits: SelectorLimits,
) -> Result<Selected, Refusal> {
    let target = read.what().target();
    let invalid = |field, message: String| Refusal::Invalid { field, message };
    read.what().check_names()?;
    // Selectors come first: their errors need no lookup, which could go upstream.
    let spec = read.what().spec();
    let labels = spec.labels().map_err(|error| invalid("target.label_selector", error.to_string()))?;
    let fields = spec.fields().map_err(|error| invalid("target.field_selector", error.to_string()))?;
    let shard = spec.shard().map_err(|error| invalid("shardSelector", error.to_string()))?;
    limits.check(labels, fields)?;
    let request = CacheRequest {
        group: &target.group,
        version: &target.version,
        resource: &target.resource,
        namespace: &target.namespace,
        media,
        tenant: read.caller().tenant(),
    };
    let served = catalog.find(request).await?;
    // The caller's right was reviewed by the names in the target. A name that was not known then
    // may be the short name of a resource of another group now.
    let is_reviewed = read.caller().tenant().is_some();
    if is_reviewed && (&served.gvr.group, &served.gvr.resource) != (&target.group, &target.resource) {
        let message = format!("{} was not known when your right was reviewed; try again", target.resource);
        return Err(Refusal::Unavailable(message));
    }
    if !served.namespaced && !target.namespace.is_empty() {
        return Err(invalid("target.namespace", format!("{} are not namespaced; leave it empty", served.gvr)));
    }
    let selection = Selection::bind(
        &target.namespace,
        &target.name,
        labels.clone(),
        fields,
        &served.fields,
        served.parser.clone(),
        &served.gvr,
    )
    .map_err(|error| invalid("target.field_selector", error.to_string()))?;
    let selection = match shard.and_then(ShardSelector::shards) {
        Some(shards) => selection.within(shards),
        None => selection,
    };
    let selection = served.hub.share(selection, holder)?;
    Ok(Selected { served, selection })
}
