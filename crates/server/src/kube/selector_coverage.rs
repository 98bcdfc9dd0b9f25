//! The requests that caches can answer if `--upstream-field-selector` narrows them.
//!
//! The hazard is a list that silently lacks objects, and a 404 for an object that exists. So a
//! narrowed cache answers only requests for objects that its selector covers.

use kubefan_model::{
    GroupVersionResource, ReadSpec,
    selector::{FieldOperator, FieldSelector, FieldTerm},
};

use super::{path::Path, read_error::ReadError, status::Failure};

/// Checks that a request asks only for objects that the caches cover.
///
/// # Errors
/// Sends the request upstream.
pub(super) fn check(narrowed_by: &FieldSelector, path: &Path, spec: &ReadSpec) -> Result<(), ReadError> {
    if covers(narrowed_by, path, spec) {
        return Ok(());
    }
    Err(ReadError::Upstream(Failure::bad_request(format!(
        "only objects with {narrowed_by} are cached (--upstream-field-selector), and the apiserver is not asked: add that \
         fieldSelector to the request"
    ))))
}

/// Returns the answer to a get for an object that is not in the cache.
pub(super) fn object_not_found(narrowed_by: &FieldSelector, gvr: &GroupVersionResource, path: &Path) -> Failure {
    if covers(narrowed_by, path, &ReadSpec::default()) {
        return Failure::no_object(gvr, &path.name);
    }
    Failure::unavailable(format!(
        "kubefan does not know whether {gvr} {:?} exists: only objects with {narrowed_by} are cached \
         (--upstream-field-selector), and the apiserver is not asked",
        path.name
    ))
}

/// Whether `narrowed_by` selects every object that the path and the selectors select.
fn covers(narrowed_by: &FieldSelector, path: &Path, spec: &ReadSpec) -> bool {
    if narrowed_by.is_everything() {
        return true;
    }
    // Upstream reports invalid selectors.
    let Ok(fields) = spec.fields() else { return false };
    let is_demanded = |term: &FieldTerm| {
        let named = match &*term.path {
            "metadata.name" => &path.name,
            "metadata.namespace" => &path.namespace,
            _ => "",
        };
        let is_named = term.op == FieldOperator::Equals && !named.is_empty() && *term.value == *named;
        is_named || fields.terms().contains(term)
    };
    narrowed_by.terms().iter().all(is_demanded)
}

#[cfg(test)]
mod tests {
    use kubefan_model::SelectorTexts;

    use super::*;

    #[test]
    fn only_requests_for_covered_objects_are_answered() {
        let path = Path::parse("/api/v1/namespaces/a/pods/p").unwrap();
        let covers = |narrowed_by, fields: &str| {
            let texts = SelectorTexts { fields: fields.to_owned(), ..SelectorTexts::default() };
            covers(&FieldSelector::parse(narrowed_by).unwrap(), &path, &ReadSpec::new(texts))
        };
        for (narrowed_by, fields, is) in [
            ("", "", true),
            ("spec.nodeName=n1", "", false),
            ("spec.nodeName=n1", "spec.nodeName=n1", true),
            ("spec.nodeName=n1", "spec.nodeName==n1,status.phase=Running", true),
            ("spec.nodeName=n1", "spec.nodeName=n2", false),
            ("spec.nodeName=n1", "spec.nodeName!=n1", false),
            ("spec.nodeName=n1", "no selector", false),
            ("spec.nodeName=n1,status.phase!=Failed", "spec.nodeName=n1", false),
            ("spec.nodeName=n1,status.phase!=Failed", "status.phase!=Failed,spec.nodeName=n1", true),
            ("metadata.namespace=a", "", true),
            ("metadata.name=p", "", true),
            ("metadata.namespace!=a", "", false),
            ("metadata.namespace=b", "", false),
        ] {
            assert_eq!(covers(narrowed_by, fields), is, "{narrowed_by} of {fields}");
        }
    }
}
