//! Headers of upstream in answers of kubefan.

use http::HeaderMap;

/// Puts headers of upstream's in place of those with the same names.
pub(super) fn put(cross_origin: &HeaderMap, headers: &mut HeaderMap) {
    for (name, value) in cross_origin {
        headers.insert(name, value.clone());
    }
}
