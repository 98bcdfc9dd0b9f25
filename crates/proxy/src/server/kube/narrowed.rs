//! Caches that hold only a part of a resource (`--upstream-field-selector`): what they can answer, and what would be a lie.
//!
//! To a list of everything, a part is a wrong answer, and an object that is not in it may well exist. So only who asks for that part,
//! or for less, is answered from the cache.

use super::{
    Asked, Front, Otherwise,
    options::{ListOptions, Options, WatchOptions},
    path::Path,
    status::Failure,
};
use crate::fanout::Catalog;
use kubefan_model::{
    GroupVersionResource, Media,
    selector::{FieldOperator, FieldSelector, FieldTerm},
};

impl<C: Catalog> Front<C> {
    /// Sends upstream what asks for more than the caches hold. Where nothing is passed on, a single object is given if it is held.
    pub(super) fn check_part(&self, path: &Path, asked: &Asked) -> Result<(), Otherwise> {
        let narrowed_by = &self.options.narrowed_by;
        let fields = match asked {
            Asked::Many(Options::List(ListOptions { field_selector, .. })) => field_selector,
            Asked::Many(Options::Watch(WatchOptions { field_selector, .. })) => field_selector,
            Asked::One(_) if self.proxy.is_none() => return Ok(()),
            Asked::One(_) => "",
        };
        if is_within(narrowed_by, path, fields) {
            return Ok(());
        }
        Err(Otherwise::Upstream(Failure::bad_request(format!(
            "only objects with {narrowed_by} are cached (--upstream-field-selector), and nothing is passed on to the apiserver \
             (--passthrough=off): ask for them with that fieldSelector"
        ))))
    }

    /// What is said of a single object that is not in the cache.
    pub(super) fn not_held(&self, gvr: &GroupVersionResource, path: &Path) -> Failure {
        let narrowed_by = &self.options.narrowed_by;
        match is_within(narrowed_by, path, "") {
            true => Failure::no_object(gvr, &path.name),
            false => Failure::unavailable(format!(
                "whether {gvr} {:?} exists is not known here: only objects with {narrowed_by} are cached \
                 (--upstream-field-selector), and nothing is passed on to the apiserver (--passthrough=off)",
                path.name
            )),
        }
    }

    /// Whether what a path names is cached already.
    pub(super) fn is_cached(&self, path: &Path, media: Media) -> bool {
        self.reader.catalog().holds(&GroupVersionResource::new(&path.group, &path.version, &path.resource), media)
    }
}

/// Whether everything that is asked for is selected by `narrowed_by`.
fn is_within(narrowed_by: &FieldSelector, path: &Path, fields: &str) -> bool {
    if narrowed_by.is_everything() {
        return true;
    }
    // What is wrong with a selector upstream says.
    let Ok(fields) = FieldSelector::parse(fields) else { return false };
    let is_asked = |term: &FieldTerm| {
        let named = match &*term.path {
            "metadata.name" => &path.name,
            "metadata.namespace" => &path.namespace,
            _ => "",
        };
        let is_named = term.op == FieldOperator::Equals && !named.is_empty() && *term.value == *named;
        is_named || fields.terms().contains(term)
    };
    narrowed_by.terms().iter().all(is_asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_asks_for_the_part_that_is_cached_is_answered_from_it() {
        let path = Path::parse("/api/v1/namespaces/a/pods/p").unwrap();
        let is_within = |narrowed_by, fields| is_within(&FieldSelector::parse(narrowed_by).unwrap(), &path, fields);
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
            assert_eq!(is_within(narrowed_by, fields), is, "{narrowed_by} of {fields}");
        }
    }
}
