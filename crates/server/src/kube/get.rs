//! Gets over HTTP: single objects from the cache.

use axum::body::Body;
use http::Response;
use kubefan_cache::kube_encoding::list::single_object;
use kubefan_fanout::Catalog;
use kubefan_model::ObjectKey;

use super::{
    answer,
    cache_reads::{CacheReads, ResolvedRead},
    options::Freshness,
    read_error::ReadError,
    selector_coverage,
};

/// Answers a get.
///
/// # Errors
/// Why it is not answered from the cache; 404 if the object does not exist.
pub async fn get<C: Catalog>(
    reads: &CacheReads<C>,
    ResolvedRead { path, selected, format, arrived_at, notes, .. }: ResolvedRead<'_>,
    freshness: Freshness,
) -> Result<Response<Body>, ReadError> {
    let proof = (Some(&selected.selection), reads.patience());
    let fresh = reads.wait_until_fresh(&selected.served, freshness, proof, arrived_at).await?;
    let (store, _) = selected.served.hub.snapshot_of(&fresh)?;
    let key = ObjectKey::new(&path.namespace, &path.name);
    let Some(object) = store.get(key.as_str()) else {
        return Err(selector_coverage::object_not_found(&reads.narrowed_by, &selected.served.gvr, path).into());
    };
    let parser = &selected.served.parser;
    let body = single_object(object, parser, &format);
    notes.sent(1, body.len());
    Ok(answer::from_cache(parser.media().content_type(), Body::from(body)))
}
