//! A read of cached objects, as requested. Both the authorization and the read are derived from it,
//! so the two cannot differ.

use std::{borrow::Cow, iter, mem};

use kubefan_common::proto::v1alpha1::Target;
use kubefan_model::{
    GroupVersionResource, ReadSpec, SelectorTexts,
    selector::{FieldOperator, FieldSelector, FieldTerm},
};

use super::attributes::{Attributes, ReadVerb};

/// The field that names an object.
const NAME_FIELD: &str = "metadata.name";

#[cfg(test)]
thread_local! {
    /// Number of times that this thread has parsed the selectors of a read for its attributes.
    pub(super) static PARSED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The place in a request that names its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// In the path of an object, or in the message of a get.
    Object,
    /// In the path of a collection with selectors in the query. A message of gRPC is the same, with
    /// its name as one more term of the field selector.
    Collection,
    /// In a path with the deprecated prefix `/watch/`. Its selectors are not authorized: the
    /// apiserver does not apply them everywhere.
    WatchPath,
}

/// A read.
#[derive(Debug, Clone, PartialEq)]
pub struct Read {
    verb: ReadVerb,
    /// Without the selectors.
    target: Target,
    form: Form,
    spec: ReadSpec,
}

impl Read {
    /// A get.
    pub fn object(target: Target) -> Self {
        Self::new(ReadVerb::Get, target, Form::Object)
    }

    /// A list or a watch.
    pub fn collection(verb: ReadVerb, target: Target) -> Self {
        Self::new(verb, target, Form::Collection)
    }

    /// A watch by a path with the deprecated prefix `/watch/`.
    pub fn watch_path(target: Target) -> Self {
        Self::new(ReadVerb::Watch, target, Form::WatchPath)
    }

    fn new(verb: ReadVerb, mut target: Target, form: Form) -> Self {
        let labels = mem::take(&mut target.label_selector);
        let fields = mem::take(&mut target.field_selector);
        let spec = ReadSpec::new(SelectorTexts { labels, fields, shard: String::new() });
        Self { verb, target, form, spec }
    }

    /// Replaces the selectors. Authorizers see no shard.
    #[must_use]
    pub fn selecting(self, spec: ReadSpec) -> Self {
        Self { spec, ..self }
    }

    /// The selectors.
    pub fn spec(&self) -> &ReadSpec {
        &self.spec
    }

    /// The verb.
    pub fn verb(&self) -> ReadVerb {
        self.verb
    }

    /// The target of the read, without the selectors.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The size of its texts, in bytes.
    pub fn bytes(&self) -> usize {
        let Target { group, version, resource, namespace, name, .. } = &self.target;
        let names = [group, version, resource, namespace, name];
        names.map(String::len).iter().sum::<usize>() + self.spec.bytes()
    }

    /// Whether the full name of its resource is known. Without a version, `resource` is any name
    /// that kubectl takes, or the version is the preferred one.
    pub fn has_full_name(&self) -> bool {
        !self.target.version.is_empty()
    }

    /// Replaces the resource by the one with this full name.
    #[must_use]
    pub fn of_resource(mut self, gvr: GroupVersionResource) -> Self {
        let GroupVersionResource { group, version, resource } = gvr;
        self.target.group = group;
        self.target.version = version;
        self.target.resource = resource;
        self
    }

    /// Returns the attributes to ask about, one after the other until some are allowed. With
    /// `broad_first`, a list or watch starts with the whole resource and the namespace, which
    /// include it. Last comes exactly this read. Its selectors are parsed only then: that takes
    /// long, and most reads need a broad right alone.
    pub fn questions(&self, broad_first: bool) -> impl Iterator<Item = Attributes> {
        let asks_broad = broad_first && self.verb != ReadVerb::Get;
        let broad = asks_broad.then(|| self.attributes_of_namespace());
        let whole = broad.as_ref().filter(|broad| !broad.namespace.is_empty()).map(Attributes::of_whole_resource);
        let exact = iter::once_with(move || self.attributes());
        let exact = exact.filter(move |exact| !(asks_broad && exact.is_of_all_objects()));
        whole.into_iter().chain(broad).chain(exact)
    }

    /// Returns the attributes that kube-apiserver's authorizers see of the same request
    /// (`RequestInfo` in `requestinfo.go`, `GetAuthorizerAttributes` in
    /// `filters/authorization.go`).
    pub fn attributes(&self) -> Attributes {
        #[cfg(test)]
        PARSED.set(PARSED.get() + 1);
        // As in the apiserver, an invalid selector is no part of the attributes.
        let (labels, fields) = match self.form {
            Form::Collection => {
                let fields = self.spec.fields().map(|fields| self.with_name(fields));
                (self.spec.labels().cloned().unwrap_or_default(), fields.unwrap_or_default())
            }
            Form::Object | Form::WatchPath => Default::default(),
        };
        Attributes { name: self.name(), labels, fields, ..self.attributes_of_namespace() }
    }

    /// Returns the same attributes without the selectors. They are for a record of the read, and
    /// not for a verdict about it.
    pub fn attributes_for_record(&self) -> Attributes {
        Attributes { name: self.name(), ..self.attributes_of_namespace() }
    }

    /// Returns the name of the only object that is read; empty if there may be more.
    fn name(&self) -> String {
        if self.form != Form::Collection {
            return self.target.name.clone();
        }
        // The apiserver reads both selectors, or none.
        let named = self.spec.fields().ok().and_then(|_| {
            FieldSelector::required_value(&self.field_selector(), NAME_FIELD).filter(|name| is_path_segment(name))
        });
        named.filter(|_| self.spec.labels().is_ok()).unwrap_or_default()
    }

    /// Returns the attributes of the same read of all objects in its namespace.
    fn attributes_of_namespace(&self) -> Attributes {
        let Self { verb, target, form, .. } = self;
        let Target { group, version, resource, namespace, name, .. } = target;
        // The path of a namespace names it twice.
        let is_namespace = *form != Form::Collection && group.is_empty() && resource == "namespaces";
        let namespace = if namespace.is_empty() && is_namespace { name } else { namespace };
        Attributes {
            verb: *verb,
            group: group.clone(),
            version: version.clone(),
            resource: resource.clone(),
            namespace: namespace.clone(),
            ..Attributes::default()
        }
    }

    /// The text of the field selector, with the name of a gRPC message.
    pub fn field_selector(&self) -> Cow<'_, str> {
        let name = &self.target.name;
        let fields = &self.spec.texts().fields;
        if self.form != Form::Collection || name.is_empty() {
            return Cow::Borrowed(fields);
        }
        let escaped = name.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=");
        let term = format!("{NAME_FIELD}={escaped}");
        Cow::Owned(if fields.is_empty() { term } else { format!("{term},{fields}") })
    }

    /// The field selector, with the name of a gRPC message.
    fn with_name(&self, fields: &FieldSelector) -> FieldSelector {
        let name = &self.target.name;
        if name.is_empty() {
            return fields.clone();
        }
        let term = FieldTerm { path: NAME_FIELD.into(), op: FieldOperator::Equals, value: name.as_str().into() };
        FieldSelector::new(fields.terms().iter().cloned().chain([term]))
    }
}

/// Whether a name can be the segment of a path (`path.IsValidPathSegmentName`).
fn is_path_segment(name: &str) -> bool {
    !matches!(name, "." | "..") && !name.contains(['/', '%'])
}

#[cfg(test)]
mod tests {
    use kubefan_model::selector::LabelSelector;

    use super::*;

    fn target(namespace: &str, name: &str, labels: &str, fields: &str) -> Target {
        let own = str::to_owned;
        Target {
            version: own("v1"),
            resource: own("pods"),
            namespace: own(namespace),
            name: own(name),
            label_selector: own(labels),
            field_selector: own(fields),
            ..Target::default()
        }
    }

    /// The verb, the namespace, the name, and whether there are selectors.
    fn seen(read: &Read) -> (&'static str, String, String, bool) {
        let Attributes { verb, namespace, name, labels, fields, .. } = read.attributes();
        (verb.as_str(), namespace, name, !labels.is_everything() || !fields.is_everything())
    }

    fn is(verb: &'static str, namespace: &str, name: &str, selects: bool) -> (&'static str, String, String, bool) {
        (verb, namespace.to_owned(), name.to_owned(), selects)
    }

    #[test]
    fn attributes_are_those_of_the_apiserver() {
        let list = |target| Read::collection(ReadVerb::List, target);
        let watch = |target| Read::collection(ReadVerb::Watch, target);
        for (read, expected) in [
            (Read::object(target("a", "p", "", "")), is("get", "a", "p", false)),
            (list(target("", "", "", "")), is("list", "", "", false)),
            (list(target("a", "", "x=y", "")), is("list", "a", "", true)),
            (watch(target("a", "", "", "spec.nodeName=n")), is("watch", "a", "", true)),
            // A selector of the name narrows the request to it.
            (list(target("a", "", "", "metadata.name=p")), is("list", "a", "p", true)),
            (list(target("a", "", "", "metadata.name==p")), is("list", "a", "p", true)),
            (list(target("a", "", "", "metadata.name!=p")), is("list", "a", "", true)),
            (list(target("a", "", "", "metadata.name=..")), is("list", "a", "", true)),
            (list(target("a", "", "", "metadata.name=p/q")), is("list", "a", "", true)),
            // The term that sorts first counts, wherever it stands.
            (list(target("a", "", "", "metadata.name=q,metadata.name=p")), is("list", "a", "p", true)),
            (list(target("a", "", "", "metadata.name=p,metadata.name==q")), is("list", "a", "q", true)),
            // An invalid selector is none. The read fails later.
            (list(target("a", "", "", "metadata.name")), is("list", "a", "", false)),
            (list(target("a", "", "=", "")), is("list", "a", "", false)),
            (list(target("a", "", "=", "metadata.name=p")), is("list", "a", "", true)),
            // A name in a message is a term.
            (watch(target("a", "p", "", "")), is("watch", "a", "p", true)),
            (watch(target("a", "p", "", "metadata.name=a")), is("watch", "a", "a", true)),
            // Not on the deprecated paths.
            (Read::watch_path(target("a", "", "x=y", "metadata.name=p")), is("watch", "a", "", false)),
            (Read::watch_path(target("a", "p", "", "")), is("watch", "a", "p", false)),
        ] {
            assert_eq!(seen(&read), expected, "{read:?}");
            let recorded = Attributes { labels: LabelSelector::default(), ..read.attributes() };
            let recorded = Attributes { fields: FieldSelector::default(), ..recorded };
            assert_eq!(read.attributes_for_record(), recorded, "{read:?}");
        }
    }

    #[test]
    fn the_broad_right_comes_first_and_a_get_is_exact() {
        let watch = |namespace: &str, labels: &str| {
            Read::collection(ReadVerb::Watch, target(namespace, "", labels, "spec.nodeName!=n"))
        };
        let whole = |namespace: &str| Read::collection(ReadVerb::Watch, target(namespace, "", "", ""));
        let asked = |read: &Read| read.questions(true).collect::<Vec<_>>();
        let of = |read: Read| read.attributes();
        assert_eq!(asked(&whole("")), [of(whole(""))]);
        assert_eq!(asked(&whole("a")), [of(whole("")), of(whole("a"))]);
        assert_eq!(asked(&watch("", "x=y")), [of(whole("")), of(watch("", "x=y"))]);
        assert_eq!(asked(&watch("a", "x=y")), [of(whole("")), of(whole("a")), of(watch("a", "x=y"))]);
        let everything = Read::collection(ReadVerb::Watch, target("a", "", " ", ""));
        assert_eq!(asked(&everything), [of(whole("")), of(whole("a"))], "the selector selects everything");
        assert!(watch("a", "x=y").questions(false).eq([of(watch("a", "x=y"))]));
        let get = Read::object(target("a", "p", "", ""));
        assert_eq!(asked(&get), [of(get)]);
    }

    #[test]
    fn a_namespace_is_authorized_inside_itself() {
        let namespaces =
            |name: &str, fields: &str| Target { resource: "namespaces".to_owned(), ..target("", name, "", fields) };
        assert_eq!(seen(&Read::object(namespaces("a", ""))), is("get", "a", "a", false));
        assert_eq!(seen(&Read::watch_path(namespaces("a", ""))), is("watch", "a", "a", false));
        let list = Read::collection(ReadVerb::List, namespaces("", "metadata.name=a"));
        assert_eq!(seen(&list), is("list", "", "a", true), "as the apiserver does");
        let watch = Read::collection(ReadVerb::Watch, namespaces("a", ""));
        assert_eq!(seen(&watch), is("watch", "", "a", true));
    }

    #[test]
    fn a_name_in_a_message_adds_no_terms() {
        let read = Read::collection(ReadVerb::Watch, target("a", "p,metadata.name=q", "", ""));
        assert_eq!(read.attributes().fields.terms().len(), 1);
        assert_eq!(seen(&read), is("watch", "a", "p,metadata.name=q", true));
    }
}
