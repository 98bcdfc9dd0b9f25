//! Headers of upstream in answers of kubefan.

use http::HeaderMap;

/// Replaces headers by upstream's headers of the same names.
pub(super) fn put(cross_origin: &HeaderMap, headers: &mut HeaderMap) {
    for (name, value) in cross_origin {
        headers.insert(name, value.clone());
    }
}
