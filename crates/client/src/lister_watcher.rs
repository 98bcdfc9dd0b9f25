//! Reads of a reflector from a server: list and watch, whatever the protocol.
//!
//! The trait follows client-go's `ListerWatcher`, with two additions that Kubernetes' protocol does
//! not have and kubefan's does. A watch may start over with a snapshot, and several events may form
//! one batch: the events of a gap or a catch-up are only true together. An HTTP endpoint sends a
//! snapshot only at the start of a watch-list, and no batches.

use std::time::Duration;

use futures::{future::BoxFuture, stream::BoxStream};

use crate::{
    budget::FallbackBudget,
    error::ClientError,
    object::{ObjectKey, RawObject},
};

/// Options of a list or a watch, like Kubernetes' `ListOptions`. Selectors and the namespace belong
/// to the [`ListerWatcher`] itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// List: empty for a consistent read, `"0"` for any cached state, otherwise a state not older
    /// than this. Watch: the events after this version.
    pub resource_version: String,
    /// List: at most this many objects in a page. 0 for no limit.
    pub limit: u32,
    /// List: the next page. The token of the page before.
    pub continue_token: String,
    /// Watch: the current state first, between [`WatchEventKind::SnapshotBegin`] and
    /// [`WatchEventKind::SnapshotEnd`] (Kubernetes' watch-list). `resource_version` is then a
    /// minimum.
    pub send_initial_events: bool,
    /// Watch: the server ends it after this. `None` for the server's default.
    pub timeout: Option<Duration>,
}

/// A page of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The version of the state.
    pub resource_version: String,
    /// The objects, in key order.
    pub objects: Vec<RawObject>,
    /// For the next page. Empty at the end.
    pub continue_token: String,
}

/// An event of a watch.
#[derive(Debug, Clone, PartialEq)]
pub struct WatchEvent {
    /// The kind of the event.
    pub kind: WatchEventKind,
    /// Set if everything at or below this version has been received: a watch may resume from it.
    /// Not set inside a snapshot or a batch until its end.
    pub resume_version: Option<String>,
}

/// The kinds of events in a watch.
#[derive(Debug, Clone, PartialEq)]
pub enum WatchEventKind {
    /// The object was created, or has begun to match the selectors.
    Added(RawObject),
    /// The object was changed.
    Modified(RawObject),
    /// The object was deleted, or has ceased to match. Its last state is included.
    Deleted(RawObject),
    /// The object was deleted, and its last state is not known.
    DeletedFinalStateUnknown(ObjectKey),
    /// Only `resume_version` has moved.
    Bookmark,
    /// A complete state starts. Nothing received before it counts any more once it is complete. The
    /// events up to [`Self::SnapshotEnd`] are [`Self::Added`]; a change or deletion among them
    /// belongs to the state.
    SnapshotBegin,
    /// The state is complete.
    SnapshotEnd,
    /// The events up to [`Self::BatchEnd`] take effect together. If the stream breaks before the
    /// end, they have no effect.
    BatchBegin,
    /// The batch is complete.
    BatchEnd,
    /// An event whose object has no readable metadata. The watch continues.
    Unreadable(String),
    /// The connection broke, and the watch reconnects by itself. A snapshot or batch that was not
    /// complete starts again.
    Disconnected(ClientError),
    /// The connection is back.
    Reconnected,
}

impl WatchEventKind {
    /// Returns an event of this kind, with a version to resume from.
    pub fn at(self, resume_version: &str) -> WatchEvent {
        WatchEvent { kind: self, resume_version: Some(resume_version.to_owned()) }
    }
}

/// Returns an event without a version to resume from.
impl From<WatchEventKind> for WatchEvent {
    fn from(kind: WatchEventKind) -> Self {
        Self { kind, resume_version: None }
    }
}

/// The events of a watch. `None` ends it: the server's timeout has passed. After an error the watch
/// has ended.
pub type WatchEvents = BoxStream<'static, Result<WatchEvent, ClientError>>;

/// Reads one resource from a server.
///
/// [`ListWatch`](crate::ListWatch) is the implementation for kubefan and for Kubernetes,
/// [`FakeListWatch`](crate::FakeListWatch) the one for tests.
pub trait ListerWatcher: Send + Sync + 'static {
    /// Returns a page of the list.
    ///
    /// # Errors
    /// The server's error. [`ClientError::is_expired`] means that the continue token or the version
    /// is too old.
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>>;

    /// Starts a watch.
    ///
    /// # Errors
    /// The server's error. [`ClientError::is_expired`] means that the watch cannot resume from the
    /// version: list again.
    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>>;

    /// Whether to ask for the first state by a watch with `send_initial_events`. If the server then
    /// answers that it does not know that option, the reflector lists instead.
    fn supports_watch_list(&self) -> bool {
        true
    }

    /// Whether a watch reconnects by itself, and so starts before the server has answered. It then
    /// reports [`WatchEventKind::Disconnected`] and [`WatchEventKind::Reconnected`].
    fn watch_reconnects(&self) -> bool {
        false
    }

    /// Returns the budget of requests at the apiserver that kubefan named last, for
    /// [`Fallback::Budgeted`](crate::Fallback::Budgeted). `None` if it has named none.
    fn fallback_budget(&self) -> Option<FallbackBudget> {
        None
    }

    /// Describes the resource and the server, for messages: `pods from 127.0.0.1:7443`.
    fn describe(&self) -> String;
}

impl<T: ListerWatcher + ?Sized> ListerWatcher for std::sync::Arc<T> {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        (**self).list(options)
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        (**self).watch(options)
    }

    fn supports_watch_list(&self) -> bool {
        (**self).supports_watch_list()
    }

    fn watch_reconnects(&self) -> bool {
        (**self).watch_reconnects()
    }

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        (**self).fallback_budget()
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}
