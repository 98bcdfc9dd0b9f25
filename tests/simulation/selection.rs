//! The selections of subscribers, and the oracle's own reading of them. It shares no code with the
//! selectors under test.

use kubefan_common::proto::v1alpha1::Target;

use super::truth::Object;

/// Terms that every object meets. A selector with that many is tested apart from commits.
const ABSENT: &str = ",!a,!b,!c,!d,!e,!f,!g";

/// One selection of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    Everything,
    Namespace(&'static str),
    /// `app=VALUE`.
    App(&'static str),
    /// `tier in (backend,cache),!canary`, and terms that every object meets.
    Tiers,
    /// `spec.nodeName=VALUE`.
    Node(&'static str),
    /// `status.phase!=Running`.
    NotRunning,
    /// `app=VALUE` in one namespace.
    AppIn(&'static str, &'static str),
    /// `canary` on `spec.nodeName=VALUE`.
    CanaryOn(&'static str),
    /// `tier!=cache,canary notin (later)`, which also selects objects without these labels, and
    /// terms that every object meets.
    NotCached,
    /// The objects whose uid has a hash in the lower half. Only over HTTP.
    Shard,
}

impl Selection {
    /// All selections that a seed draws from.
    pub(crate) const ALL: [Selection; 11] = [
        Selection::Everything,
        Selection::Namespace("team-0"),
        Selection::App("web"),
        Selection::App("api"),
        Selection::Tiers,
        Selection::Node("node-0"),
        Selection::Node("node-1"),
        Selection::NotRunning,
        Selection::AppIn("web", "team-1"),
        Selection::CanaryOn("node-2"),
        Selection::NotCached,
    ];

    /// All selections that a seed draws from for programs that read over HTTP.
    pub(crate) fn over_http() -> impl Iterator<Item = Selection> {
        Selection::ALL.into_iter().chain([Selection::Shard, Selection::Shard])
    }

    /// The shard selector over HTTP, beside [`Self::target`]; empty for none.
    pub(crate) fn shard(self) -> String {
        match self {
            Selection::Shard => {
                "shardRange(object.metadata.uid, '0x0000000000000000', '0x8000000000000000')".to_owned()
            }
            _ => String::new(),
        }
    }

    /// The selection as a subscriber requests it.
    pub(crate) fn target(self) -> Target {
        let target = Target { resource: "pods".to_owned(), ..Target::default() };
        let label_selector = |text: &str| text.to_owned();
        match self {
            Selection::Everything | Selection::Shard => target,
            Selection::Namespace(namespace) => Target { namespace: namespace.to_owned(), ..target },
            Selection::App(app) => Target { label_selector: format!("app={app}"), ..target },
            Selection::Tiers => {
                Target { label_selector: label_selector("tier in (backend,cache),!canary") + ABSENT, ..target }
            }
            Selection::Node(node) => Target { field_selector: format!("spec.nodeName={node}"), ..target },
            Selection::NotRunning => Target { field_selector: "status.phase!=Running".to_owned(), ..target },
            Selection::AppIn(app, namespace) => {
                Target { label_selector: format!("app={app}"), namespace: namespace.to_owned(), ..target }
            }
            Selection::NotCached => {
                Target { label_selector: label_selector("tier!=cache,canary notin (later)") + ABSENT, ..target }
            }
            Selection::CanaryOn(node) => Target {
                label_selector: label_selector("canary"),
                field_selector: format!("spec.nodeName={node}"),
                ..target
            },
        }
    }

    /// Whether the selection contains the object.
    pub(crate) fn has(self, object: &Object) -> bool {
        let label = |key: &str| object.labels.get(key).map(String::as_str);
        match self {
            Selection::Everything => true,
            Selection::Namespace(namespace) => object.namespace == namespace,
            Selection::App(app) => label("app") == Some(app),
            Selection::Tiers => matches!(label("tier"), Some("backend" | "cache")) && label("canary").is_none(),
            Selection::Node(node) => object.node == node,
            Selection::NotRunning => object.phase != "Running",
            Selection::AppIn(app, namespace) => label("app") == Some(app) && object.namespace == namespace,
            // The upper bit of FNV-1a.
            Selection::Shard => {
                let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
                object.uid.bytes().fold(14_695_981_039_346_656_037, step) < 1 << 63
            }
            Selection::NotCached => label("tier") != Some("cache") && label("canary") != Some("later"),
            Selection::CanaryOn(node) => label("canary").is_some() && object.node == node,
        }
    }
}
