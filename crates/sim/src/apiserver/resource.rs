//! Resource definitions: the built-in ones, and the constructor for custom ones.

use std::borrow::Cow;

use serde_json::Value;

use kubefan_model::GroupVersionResource;

/// Definition of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimResource {
    /// Group, version and plural name.
    pub gvr: GroupVersionResource,
    /// Kind, such as `Pod`.
    pub kind: String,
    /// The kind of a list, such as `PodList`.
    pub list_kind: String,
    /// Singular name, such as `pod`.
    pub singular: String,
    /// Short names, such as `po`.
    pub short_names: Vec<String>,
    /// Categories, such as `all`.
    pub categories: Vec<String>,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Fields that a field selector may name, besides `metadata.name` and `metadata.namespace`.
    pub selectable_fields: Vec<SelectableField>,
    /// Whether there is a `/status` subresource. If so, writes to the main resource ignore the
    /// status.
    pub status_subresource: bool,
    /// Whether this is a custom resource: its objects have sorted keys, and the items of its lists
    /// include their kind.
    pub custom: bool,
    /// Form of the versions of objects and lists.
    pub versions: VersionForm,
    /// The JSON that follows the metadata in a bookmark's object: the zero value of the Go type,
    /// without braces.
    pub(super) zero: &'static str,
}

/// Form of versions. kube-apiserver writes numbers; an aggregated API may write anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionForm {
    /// Decimal numbers of 64 bits.
    Number,
    /// Text.
    Opaque,
    /// Decimal numbers of more than 64 bits.
    Wide,
    /// Nothing.
    Absent,
}

impl VersionForm {
    /// The text of a version.
    pub(super) fn text(self, version: u64) -> String {
        match self {
            Self::Number => version.to_string(),
            Self::Opaque => format!("v{version}"),
            Self::Wide => format!("1{version:020}"),
            Self::Absent => String::new(),
        }
    }
}

/// A field that a field selector may name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectableField {
    /// The path of the value in the object, such as `spec.nodeName`. Selectors use the same path.
    pub path: Cow<'static, str>,
    /// The value of an absent field.
    pub default: &'static str,
}

impl SelectableField {
    /// A field whose default is the empty string.
    pub fn text(path: impl Into<Cow<'static, str>>) -> Self {
        Self { path: path.into(), default: "" }
    }

    const fn fixed(path: &'static str, default: &'static str) -> Self {
        Self { path: Cow::Borrowed(path), default }
    }

    pub(super) fn read(&self, object: &Value) -> Box<str> {
        // kube-apiserver accepts this path but never sets its value.
        if self.path == "status.podIPs" {
            return "".into();
        }
        match self.path.split('.').try_fold(object, |value, key| value.get(key)) {
            None | Some(Value::Null) => self.default.into(),
            Some(Value::String(text)) => text.as_str().into(),
            Some(other) => other.to_string().into(),
        }
    }
}

impl SimResource {
    /// Returns a namespaced custom resource without short names, categories, selectable fields or a
    /// status subresource.
    pub fn custom(group: &str, version: &str, plural: &str, kind: &str) -> Self {
        Self {
            gvr: GroupVersionResource::new(group, version, plural),
            kind: kind.to_owned(),
            list_kind: format!("{kind}List"),
            singular: kind.to_lowercase(),
            short_names: Vec::new(),
            categories: Vec::new(),
            namespaced: true,
            selectable_fields: Vec::new(),
            status_subresource: false,
            custom: true,
            versions: VersionForm::Number,
            zero: "",
        }
    }

    /// Whether `metadata.generation` counts the changes of the spec.
    pub(super) fn counts_generation(&self) -> bool {
        self.custom || matches!(&*self.kind, "Pod" | "Deployment")
    }

    /// Checks the path of a field selector. The error has kube-apiserver's text.
    pub(super) fn check_field(&self, path: &str) -> Result<(), String> {
        // Built-in types without a conversion function of their own use apimachinery's default,
        // whose error text differs.
        let by_default = !self.custom && self.selectable_fields.is_empty();
        let known = match path {
            "metadata.name" => true,
            "metadata.namespace" => by_default || self.namespaced,
            path => self.selectable_fields.iter().any(|field| field.path == path),
        };
        if known {
            return Ok(());
        }
        if by_default {
            return Err(format!(
                "\"{path}\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
            ));
        }
        Err(format!("field label not supported: {path}"))
    }
}

/// The group of custom resource definitions.
pub(super) const CRD_GROUP: &str = "apiextensions.k8s.io";

/// The built-in resources.
pub(super) fn built_in() -> Vec<SimResource> {
    let resource = |group: &str, plural: &str, kind: &str, short_name: &str, namespaced: bool| SimResource {
        short_names: vec![short_name.to_owned()],
        namespaced,
        custom: false,
        ..SimResource::custom(group, "v1", plural, kind)
    };
    let all = || vec!["all".to_owned()];
    vec![
        resource("", "configmaps", "ConfigMap", "cm", true),
        SimResource {
            selectable_fields: vec![SelectableField::text("status.phase")],
            status_subresource: true,
            zero: r#","spec":{},"status":{}"#,
            ..resource("", "namespaces", "Namespace", "ns", false)
        },
        SimResource {
            selectable_fields: vec![SelectableField::fixed("spec.unschedulable", "false")],
            status_subresource: true,
            zero: concat!(
                r#","spec":{},"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":0}},"nodeInfo":{"machineID":"","#,
                r#""systemUUID":"","bootID":"","kernelVersion":"","osImage":"","containerRuntimeVersion":"","#,
                r#""kubeletVersion":"","kubeProxyVersion":"","operatingSystem":"","architecture":""}}"#
            ),
            ..resource("", "nodes", "Node", "no", false)
        },
        SimResource {
            selectable_fields: vec![
                SelectableField::text("spec.nodeName"),
                SelectableField::text("spec.restartPolicy"),
                SelectableField::text("spec.schedulerName"),
                SelectableField::text("spec.serviceAccountName"),
                SelectableField::fixed("spec.hostNetwork", "false"),
                SelectableField::text("status.phase"),
                SelectableField::text("status.podIP"),
                SelectableField::text("status.podIPs"),
                SelectableField::text("status.nominatedNodeName"),
            ],
            categories: all(),
            status_subresource: true,
            zero: r#","spec":{"containers":null},"status":{}"#,
            ..resource("", "pods", "Pod", "po", true)
        },
        SimResource {
            selectable_fields: vec![SelectableField::text("spec.clusterIP"), SelectableField::text("spec.type")],
            categories: all(),
            status_subresource: true,
            zero: r#","spec":{},"status":{"loadBalancer":{}}"#,
            ..resource("", "services", "Service", "svc", true)
        },
        SimResource {
            categories: all(),
            status_subresource: true,
            zero: concat!(
                r#","spec":{"replicas":0,"selector":null,"template":{"metadata":{},"spec":{"containers":null}},"#,
                r#""strategy":{}},"status":{}"#
            ),
            ..resource("apps", "deployments", "Deployment", "deploy", true)
        },
        SimResource {
            categories: vec!["api-extensions".to_owned()],
            short_names: vec!["crd".to_owned(), "crds".to_owned()],
            status_subresource: true,
            zero: concat!(
                r#","spec":{"group":"","names":{"plural":"","kind":""},"scope":"","versions":null},"#,
                r#""status":{"conditions":null,"acceptedNames":{"plural":"","kind":""},"storedVersions":null}"#
            ),
            ..resource(CRD_GROUP, "customresourcedefinitions", "CustomResourceDefinition", "crd", false)
        },
    ]
}
