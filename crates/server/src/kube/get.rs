//! Gets over HTTP: single objects from the cache.

use axum::body::Body;
use http::Response;
use kubefan_audit::Notes;
use kubefan_cache::kube_encoding::list::single_object;
use kubefan_model::ObjectKey;

use super::{
    answer,
    found_cache::{FoundCache, Snapshot},
};

/// Returns the answer to a get for the object with this key; `None` if the snapshot does not have
/// it.
pub(super) fn get(found: &FoundCache, snapshot: &Snapshot, key: &ObjectKey, notes: &Notes) -> Option<Response<Body>> {
    let object = snapshot.store.get(key.as_str())?;
    let parser = &found.selected.served.parser;
    let body = single_object(object, parser, &found.format);
    notes.sent(1, body.len());
    Some(answer::from_cache(parser.media().content_type(), Body::from(body)))
}
