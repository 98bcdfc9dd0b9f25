//! The attributes of a read, which an authorizer is asked about.

use kubefan_model::selector::{FieldOperator, FieldSelector, FieldTerm, LabelSelector, Operator, Requirement};
use serde::Serialize;

use crate::user::{Digest, Parts};

/// The verb of a read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ReadVerb {
    /// One object.
    #[default]
    Get,
    /// A list.
    List,
    /// A watch, also one that starts with the state.
    Watch,
}

impl ReadVerb {
    /// The apiserver's name of it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

/// The target of a read, as kube-apiserver's authorizers see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The verb.
    pub verb: ReadVerb,
    /// API group; empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Plural name.
    pub resource: String,
    /// Empty for all namespaces, and for cluster-scoped resources.
    pub namespace: String,
    /// Empty for all objects.
    pub name: String,
    /// The label selector.
    pub labels: LabelSelector,
    /// The field selector.
    pub fields: FieldSelector,
}

impl Attributes {
    /// The attributes of a read of the whole resource.
    pub fn of_whole_resource(&self) -> Self {
        let Self { verb, group, version, resource, .. } = self;
        let group = group.clone();
        let version = version.clone();
        let resource = resource.clone();
        Self { verb: *verb, group, version, resource, ..Self::default() }
    }

    /// Whether they name all objects of their namespace, or of the whole resource.
    pub fn is_of_all_objects(&self) -> bool {
        self.name.is_empty() && self.labels.is_everything() && self.fields.is_everything()
    }

    /// The key of a verdict about them, for a caller with this digest.
    pub fn key(&self, caller: &Digest) -> Digest {
        let Self { verb, group, version, resource, namespace, name, labels, fields } = self;
        let mut parts = Parts::default();
        parts.add_digest(caller);
        parts.add(verb.as_str());
        for text in [group, version, resource, namespace, name] {
            parts.add(text);
        }
        parts.add_number(labels.requirements().len());
        for requirement in labels.requirements() {
            parts.add(requirement.key());
            parts.add_number(requirement.operator() as usize);
            parts.add_number(requirement.values().len());
            for value in requirement.values().iter() {
                parts.add(value);
            }
        }
        parts.add_number(fields.terms().len());
        for term in fields.terms() {
            parts.add(&term.path);
            parts.add_number(term.op as usize);
            parts.add(&term.value);
        }
        parts.digest()
    }

    /// The size of a review about them, in bytes. Many short terms are a large question, too.
    pub fn bytes(&self) -> usize {
        serde_json::to_vec(&self.for_review()).map_or(usize::MAX, |json| json.len())
    }

    /// The attributes as a part of a SubjectAccessReview (`ResourceAttributes`).
    pub(super) fn for_review(&self) -> ResourceAttributes<'_> {
        let labels: Vec<_> = self.labels.requirements().iter().filter_map(of_label).collect();
        let fields: Vec<_> = self.fields.terms().iter().filter_map(of_field).collect();
        ResourceAttributes {
            namespace: &self.namespace,
            verb: self.verb.as_str(),
            group: &self.group,
            version: &self.version,
            resource: &self.resource,
            name: &self.name,
            field_selector: Requirements::unless_empty(fields),
            label_selector: Requirements::unless_empty(labels),
        }
    }
}

/// `ResourceAttributes` of authorization.k8s.io/v1.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResourceAttributes<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    namespace: &'a str,
    verb: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    group: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    version: &'a str,
    resource: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    field_selector: Option<Requirements<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    label_selector: Option<Requirements<'a>>,
}

/// The requirements of a selector. There is at least one: the apiserver refuses none.
#[derive(Debug, Serialize)]
struct Requirements<'a> {
    requirements: Vec<SelectorRequirement<'a>>,
}

#[derive(Debug, Serialize)]
struct SelectorRequirement<'a> {
    key: &'a str,
    operator: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    values: Vec<&'a str>,
}

impl<'a> Requirements<'a> {
    fn unless_empty(requirements: Vec<SelectorRequirement<'a>>) -> Option<Self> {
        (!requirements.is_empty()).then_some(Self { requirements })
    }
}

/// `None` for a comparison of numbers, which reviews cannot express. Without it the review is about
/// more objects, so it allows no more.
fn of_label(requirement: &Requirement) -> Option<SelectorRequirement<'_>> {
    let operator = match requirement.operator() {
        Operator::In => "In",
        Operator::NotIn => "NotIn",
        Operator::Exists => "Exists",
        Operator::DoesNotExist => "DoesNotExist",
        Operator::GreaterThan | Operator::LessThan => return None,
    };
    Some(SelectorRequirement { key: requirement.key(), operator, values: requirement.values().iter().collect() })
}

/// `None` for a term without a field, because a review must name one: likewise.
fn of_field(term: &FieldTerm) -> Option<SelectorRequirement<'_>> {
    let FieldTerm { path, op, value } = term;
    let operator = match op {
        FieldOperator::Equals => "In",
        FieldOperator::NotEquals => "NotIn",
    };
    (!path.is_empty()).then(|| SelectorRequirement { key: path, operator, values: vec![value] })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn attributes(verb: ReadVerb, namespace: &str, name: &str, labels: &str, fields: &str) -> Attributes {
        let own = str::to_owned;
        Attributes {
            verb,
            group: own("apps"),
            version: own("v1"),
            resource: own("deployments"),
            namespace: own(namespace),
            name: own(name),
            labels: LabelSelector::parse(labels).unwrap(),
            fields: FieldSelector::parse(fields).unwrap(),
        }
    }

    #[test]
    fn many_short_terms_are_a_large_question() {
        let terms: Vec<String> = (0..500).map(|term| format!("a{term}=")).collect();
        let bytes = attributes(ReadVerb::List, "", "", "", &terms.join(",")).bytes();
        assert!(bytes > 5 * terms.join(",").len(), "{bytes}");
    }

    #[test]
    fn a_review_has_requirements_only_if_there_are_any() {
        let json = |attributes: &Attributes| serde_json::to_value(attributes.for_review()).unwrap();
        let base = json!({ "verb": "list", "group": "apps", "version": "v1", "resource": "deployments" });
        assert_eq!(json(&attributes(ReadVerb::List, "", "", "", "")), base);
        assert_eq!(json(&attributes(ReadVerb::List, "", "", "n>1", "")), base, "no operator for it");
        assert_eq!(json(&attributes(ReadVerb::List, "", "", "", "=x")), base, "no field");
        assert_eq!(
            json(&attributes(ReadVerb::Get, "a", "d", "x in (y,z),!b,n<5", "spec.nodeName=n,status.phase!=Failed")),
            json!({
                "namespace": "a", "verb": "get", "group": "apps", "version": "v1", "resource": "deployments", "name": "d",
                "labelSelector": { "requirements": [
                    { "key": "b", "operator": "DoesNotExist" },
                    { "key": "x", "operator": "In", "values": ["y", "z"] },
                ] },
                "fieldSelector": { "requirements": [
                    { "key": "spec.nodeName", "operator": "In", "values": ["n"] },
                    { "key": "status.phase", "operator": "NotIn", "values": ["Failed"] },
                ] },
            })
        );
    }

    #[test]
    fn different_attributes_and_callers_have_different_keys() {
        use ReadVerb::{Get, List};
        let all = [
            attributes(Get, "", "", "", ""),
            attributes(List, "", "", "", ""),
            attributes(List, "a", "", "", ""),
            attributes(List, "", "a", "", ""),
            attributes(List, "", "", "a", ""),
            attributes(List, "", "", "!a", ""),
            attributes(List, "", "", "a=", ""),
            attributes(List, "", "", "a in (b,c)", ""),
            attributes(List, "", "", "a in (bc)", ""),
            attributes(List, "", "", "", "a=b"),
            attributes(List, "", "", "", "a!=b"),
        ];
        let callers = [[0; 32], [1; 32]];
        let keys: std::collections::HashSet<_> =
            all.iter().flat_map(|one| callers.iter().map(|caller| one.key(caller))).collect();
        assert_eq!(keys.len(), 2 * all.len());
        assert_eq!(
            attributes(List, "", "", "a,b", "").key(&[0; 32]),
            attributes(List, "", "", "b,a", "").key(&[0; 32])
        );
        assert!(attributes(List, "", "", &format!("a in ({})", "b".repeat(63)), "").bytes() > 63);
    }
}
