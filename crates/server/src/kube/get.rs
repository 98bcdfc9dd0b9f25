//! Gets over HTTP: single objects from the cache.

use axum::body::Body;
use http::Response;
use kubefan_audit::Notes;
use kubefan_cache::kube_encoding::list::single_object;
use kubefan_model::{ObjectKey, format::ContentCoding};

use super::{
    answer, content_coding,
    found_cache::{FoundCache, Snapshot},
    gzip_list::{self, COMPRESSED_BYTES_MIN},
};

/// Returns the answer to a get for the object with this key; `None` if the snapshot does not have
/// it.
pub(super) fn get(found: &FoundCache, snapshot: &Snapshot, key: &ObjectKey, notes: &Notes) -> Option<Response<Body>> {
    let object = snapshot.store.get(key.as_str())?;
    let parser = &found.selected.served.parser;
    let mut body = single_object(object, parser, &found.format);
    let mut coding = ContentCoding::Identity;
    if body.len() >= COMPRESSED_BYTES_MIN && found.format.coding() == ContentCoding::Gzip {
        coding = ContentCoding::Gzip;
        body = gzip_list::body_of(&found.selected.served.hub.compress(body));
    }
    notes.sent(1, body.len());
    let mut response = answer::from_cache(parser.media().content_type(), Body::from(body));
    content_coding::put_headers(coding, response.headers_mut());
    Some(response)
}
