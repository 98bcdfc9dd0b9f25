//! The calls of an informer's handler, and the rules that every sequence of them follows.

use std::{
    collections::{BTreeMap, HashMap},
    future::{Future, ready},
    sync::Arc,
};

use kubefan_client::{Deleted, EventHandler, Object};
use serde::Deserialize;
use serde_json::Value;

use crate::harness::tests;

tests! {
    local: a_sequence_of_calls_that_goes_back_or_forgets_an_object_is_refused;
}

/// The method of a handler. The names are those that the Go program prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// An addition of the initial list.
    Initial,
    Add,
    Update,
    Delete,
    /// A deletion whose final state is unknown.
    #[serde(rename = "delete (unseen)")]
    DeleteUnseen,
}

/// One call. The versions are resource versions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) key: String,
    /// The version of an update's old state; otherwise empty.
    pub(super) old: String,
    /// The version of the state in the call. For an unseen deletion the last known one.
    pub(super) new: String,
}

impl Call {
    pub(super) fn is_delete(&self) -> bool {
        matches!(self.kind, Kind::Delete | Kind::DeleteUnseen)
    }
}

/// A handler that passes each call to a function.
pub(super) struct Reporter<F>(pub(super) F);

impl<F: FnMut(Call) + Send + 'static> EventHandler<Value> for Reporter<F> {
    fn on_add(&mut self, object: Arc<Object<Value>>, is_in_initial_list: bool) -> impl Future<Output = ()> + Send {
        let kind = if is_in_initial_list { Kind::Initial } else { Kind::Add };
        (self.0)(call(kind, object.key().as_str(), "", object.resource_version()));
        ready(())
    }

    fn on_update(&mut self, old: Arc<Object<Value>>, new: Arc<Object<Value>>) -> impl Future<Output = ()> + Send {
        (self.0)(call(Kind::Update, new.key().as_str(), old.resource_version(), new.resource_version()));
        ready(())
    }

    fn on_delete(&mut self, deleted: Deleted<Value>) -> impl Future<Output = ()> + Send {
        let kind = match deleted {
            Deleted::Known(_) => Kind::Delete,
            Deleted::FinalStateUnknown(_) => Kind::DeleteUnseen,
        };
        let version = deleted.last_known().map_or("", |object| object.resource_version());
        (self.0)(call(kind, deleted.key().as_str(), "", version));
        ready(())
    }
}

fn call(kind: Kind, key: &str, old: &str, new: &str) -> Call {
    Call { kind, key: key.to_owned(), old: old.to_owned(), new: new.to_owned() }
}

/// The last state of each object that a handler knows. It accepts the calls of an informer that may
/// skip states after an outage, but never goes back, and never forgets an object that it reported.
#[derive(Default)]
pub(super) struct History {
    objects: HashMap<String, Known>,
}

#[derive(Clone, Copy)]
struct Known {
    version: u64,
    exists: bool,
}

impl History {
    /// Takes the next call.
    ///
    /// # Errors
    /// The call, and what was known before it, if the two do not fit.
    pub(super) fn accept(&mut self, call: &Call) -> Result<(), String> {
        let known = self.objects.get(&call.key).copied();
        let version: u64 = call.new.parse().map_err(|_| format!("{call:?}: no version"))?;
        let fits = match (call.kind, known) {
            (Kind::Initial | Kind::Add, None) => true,
            (Kind::Initial | Kind::Add, Some(known)) => !known.exists && version > known.version,
            // After a relist, an object may be reported again in its old state.
            (Kind::Update, Some(known)) => {
                known.exists && call.old == known.version.to_string() && version >= known.version
            }
            (Kind::Delete, Some(known)) => known.exists && version > known.version,
            (Kind::DeleteUnseen, Some(known)) => known.exists && version == known.version,
            (_, None) => false,
        };
        if !fits {
            let known = known.map(|Known { version, exists }| format!("version {version}, exists: {exists}"));
            return Err(format!("{call:?} after {}", known.unwrap_or("nothing".to_owned())));
        }
        self.objects.insert(call.key.clone(), Known { version, exists: !call.is_delete() });
        Ok(())
    }

    /// The versions of the objects that exist, by key.
    pub(super) fn versions(&self) -> BTreeMap<String, String> {
        let existing = self.objects.iter().filter(|(_, known)| known.exists);
        existing.map(|(key, known)| (key.clone(), known.version.to_string())).collect()
    }
}

async fn a_sequence_of_calls_that_goes_back_or_forgets_an_object_is_refused() {
    let accepted = |calls: &[Call]| {
        let mut history = History::default();
        calls.iter().all(|call| history.accept(call).is_ok())
    };
    let initial = || call(Kind::Initial, "a", "", "5");
    assert!(accepted(&[
        initial(),
        call(Kind::Update, "a", "5", "9"),
        call(Kind::Update, "a", "9", "9"),
        call(Kind::DeleteUnseen, "a", "", "9"),
        call(Kind::Add, "a", "", "12"),
        call(Kind::Delete, "a", "", "13"),
    ]));
    let refused = [
        call(Kind::Add, "a", "", "6"),
        call(Kind::Update, "a", "4", "9"),
        call(Kind::Update, "a", "5", "4"),
        call(Kind::Update, "b", "5", "6"),
        call(Kind::Delete, "a", "", "5"),
        call(Kind::Delete, "b", "", "6"),
        call(Kind::DeleteUnseen, "a", "", "6"),
        call(Kind::DeleteUnseen, "a", "", ""),
    ];
    for second in refused {
        assert!(!accepted(&[initial(), second.clone()]), "{second:?}");
    }
    let deleted = || [initial(), call(Kind::Delete, "a", "", "6")];
    for third in [call(Kind::Add, "a", "", "6"), call(Kind::Update, "a", "6", "7"), call(Kind::Delete, "a", "", "7")] {
        assert!(!accepted(&[&deleted()[..], std::slice::from_ref(&third)].concat()), "{third:?}");
    }
}
