//! The script as data: the steps of `clients/conformance/steps`, and the missing features of the
//! languages.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value};

pub(super) const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/conformance");
/// The files of the steps, in the order in which they run.
const FILES: [&str; 7] = ["read", "watch", "parts", "access", "informer", "fallback", "breaks"];

/// One step: its actions, and the reports that every client must make.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    pub(super) name: String,
    /// The purpose of the step, in one sentence.
    pub(super) promise: String,
    #[serde(default)]
    pub(super) server: ServerSpec,
    /// A feature that a language must offer, or it is left out.
    #[serde(default)]
    pub(super) needs: Option<String>,
    /// The resource of all objects.
    #[serde(default = "configmaps")]
    pub(super) resource: String,
    /// Whether each runner connects before the first action.
    #[serde(default = "yes")]
    pub(super) connect: bool,
    #[serde(rename = "do")]
    pub(super) actions: Vec<Action>,
}

fn configmaps() -> String {
    "configmaps".to_owned()
}

fn yes() -> bool {
    true
}

/// The kubefan of a step.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum ServerSpec {
    /// A server that steps share.
    Shared(Shared),
    /// A server of the script's own.
    Own(Own),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Shared {
    /// All callers may read everything.
    Open,
    /// TLS, and the rights of the apiserver.
    Secure,
    /// As Open, and each stream ends after two seconds, as one whose token ends.
    ShortLived,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Own {
    pub(super) args: Vec<String>,
    /// Starts a second replica.
    pub(super) second: bool,
    /// kubefan reaches the apiserver through a link that the step can cut.
    pub(super) upstream_link: bool,
}

impl Default for ServerSpec {
    fn default() -> Self {
        Self::Shared(Shared::Open)
    }
}

/// One action. Values that start with `$` are variables.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
    /// Creates an object.
    Create(Change),
    /// Changes an object.
    Patch(Change),
    /// Deletes the object of this name.
    Delete(String),
    /// Deletes all objects with these labels, by one request.
    DeleteWhere(String),
    /// Lets a user read the resource in the namespace of the step.
    Grant(String),
    /// Takes this right away.
    Revoke(String),
    /// Writes a fresh token of a service account to the token file. The Secret of this name ends
    /// it.
    RotateToken(String),
    /// Deletes the Secret, and waits until the apiserver refuses its token.
    EndToken(String),
    /// Closes the connections between the clients and kubefan, also new ones.
    Cut,
    /// Ends `cut`.
    Mend,
    /// The connections so far go silent, and stay open.
    Freeze,
    /// New connections lead to the second replica.
    LeadToSecond,
    /// Kills kubefan with SIGKILL.
    Kill,
    /// Starts kubefan again after `kill`.
    Start,
    /// Stops kubefan with SIGSTOP: its connections stay, and nothing answers.
    Hang,
    /// Ends `hang`.
    Wake,
    /// Asks kubefan to end, with SIGTERM.
    Drain,
    /// An operator ends the watches of the step.
    Disconnect,
    /// Closes the connections between kubefan and the apiserver.
    CutUpstream,
    /// Compacts etcd, restarts the apiserver, and ends `cut_upstream`.
    LoseHistory,
    /// kubefan sends the watches of the step in this encoding.
    Served(String),
    /// Makes a client.
    Connect(Command),
    List(Command),
    Get(Command),
    ListResources(Command),
    /// Starts a watch with all marks.
    Watch(Command),
    /// Starts a watch with events only.
    Changes(Command),
    /// Starts an informer with a handler.
    Informer(Command),
    /// Adds a handler to an informer.
    Handler(Command),
    /// Waits until a handler has the state of the first list.
    WaitForSync(String),
    /// Waits until the store of an informer has a version.
    WaitUntil(Command),
    /// The store of an informer has these keys.
    Store(Store),
    /// Ends a watch, an informer or a client.
    Close(String),
    /// The next items of a watch, or the next calls of a handler.
    Expect(Expect),
    /// The last object that a watch or a list reported under this name.
    Content(Content),
    /// Keeps the version and the cluster that a watch resumes from.
    Keep(Keep),
    /// Two variables have the same value.
    Same([String; 2]),
}

/// A command of a runner: `as` names the thing that it makes, `gives` its answer, `error` its
/// failure, `keep` a variable for the version of the answer. The other fields are those of the
/// runners.
pub(super) type Command = Map<String, Value>;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Change {
    pub(super) name: String,
    /// `true`: in the other namespace.
    pub(super) elsewhere: bool,
    /// `null` removes a label.
    pub(super) labels: BTreeMap<String, Option<String>>,
    pub(super) data: BTreeMap<String, Option<String>>,
    /// The node of a pod.
    pub(super) node: Option<String>,
    /// The phase of a pod.
    pub(super) phase: Option<String>,
    /// A variable for the version that the write returned.
    pub(super) keep: Option<String>,
    /// Adds this many bytes of text.
    pub(super) bytes: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Store {
    pub(super) of: String,
    pub(super) has: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Expect {
    pub(super) of: String,
    pub(super) items: Vec<String>,
    #[serde(default)]
    pub(super) any_order: bool,
    /// The connection may break and return in between.
    #[serde(default)]
    pub(super) over_breaks: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Content {
    pub(super) of: String,
    pub(super) name: String,
    /// The whole object.
    #[serde(default)]
    pub(super) is: Option<Value>,
    /// Fields that it has, as JSON pointers.
    #[serde(default)]
    pub(super) has: Vec<String>,
    /// Fields that it does not have.
    #[serde(default)]
    pub(super) lacks: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keep {
    pub(super) of: String,
    #[serde(rename = "as")]
    pub(super) name: String,
}

/// Reasons why a language is left out of steps: language, missing feature, reason.
pub(super) type Lacks = BTreeMap<String, BTreeMap<String, String>>;

/// Reads all steps.
pub(super) fn steps() -> Vec<Step> {
    FILES.iter().flat_map(|file| read::<Vec<Step>>(&format!("steps/{file}.yaml"))).collect()
}

/// Reads the missing features of the languages.
pub(super) fn lacks() -> Lacks {
    read("lacks.yaml")
}

fn read<T: serde::de::DeserializeOwned>(file: &str) -> T {
    let path = Path::new(DIR).join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // By way of JSON, where an action is an object with one field.
    let value: Value = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{file}: {error}"))
}
