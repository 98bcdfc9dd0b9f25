//! A live subscription, as observers see it.
//!
//! The task that sends a subscription writes its place here, in memory that no other subscription
//! has a part in. Nothing is computed until a caller asks: the lag follows from its place and from
//! the log of its view, whose lock is held for a moment.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_model::{ResourceVersion, format::Format, selection::Selection};
use kubefan_telemetry::metrics::Resume;
use tokio::time::Instant;

use crate::{
    hub::Hub,
    views::{
        log::{Behind, Cursor},
        view::View,
    },
};

/// The place of a subscription. Written by the task that sends it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The place in the log of its view.
    item: AtomicU64,
    /// The last version to resume from that was sent; 0 before the first.
    version: AtomicU64,
    /// Bytes of messages that were handed to its connection.
    bytes: AtomicU64,
    in_backlog: AtomicBool,
}

impl Progress {
    /// A subscription at its start point.
    pub(super) fn at(cursor: Cursor, resume: Option<ResourceVersion>, in_backlog: bool) -> Arc<Self> {
        let progress = Self::default();
        progress.moved(cursor, resume, in_backlog, 0);
        Arc::new(progress)
    }

    /// Records a new place, and how many bytes were sent on the way there.
    pub(super) fn moved(&self, cursor: Cursor, resume: Option<ResourceVersion>, in_backlog: bool, sent: usize) {
        // It has one writer, so no operation needs to be atomic as a whole.
        self.item.store(cursor.item(), Ordering::Relaxed);
        self.version.store(resume.map_or(0, ResourceVersion::get), Ordering::Relaxed);
        self.in_backlog.store(in_backlog, Ordering::Relaxed);
        if sent > 0 {
            self.bytes.store(self.bytes.load(Ordering::Relaxed) + sent as u64, Ordering::Relaxed);
        }
    }
}

/// Observes a subscription, and keeps nothing of it alive but a few numbers.
#[derive(Clone)]
pub struct Observer {
    hub: Weak<Hub>,
    view: Weak<View>,
    progress: Arc<Progress>,
    way: &'static str,
}

/// A subscription at one moment.
#[derive(Debug, Clone)]
pub struct Observed {
    /// Resource of the subscription.
    pub resource: ResolvedResource,
    /// Selection of the subscription.
    pub selection: Selection,
    /// Format of the subscription.
    pub format: Format,
    /// The last version to resume from that was sent.
    pub version: Option<ResourceVersion>,
}

impl Observer {
    pub(super) fn new(hub: &Arc<Hub>, view: &Arc<View>, progress: Arc<Progress>, way: Option<Resume>) -> Self {
        let way = way.map_or("snapshot", Resume::as_str);
        Self { hub: Arc::downgrade(hub), view: Arc::downgrade(view), progress, way }
    }

    /// Returns its start: `snapshot`, or the way of its resume, as `kubefan_resumes_total` has it.
    pub fn way(&self) -> &'static str {
        self.way
    }

    /// Whether it is still sent its backlog.
    pub fn in_backlog(&self) -> bool {
        self.progress.in_backlog.load(Ordering::Relaxed)
    }

    /// The bytes of messages that were handed to its connection.
    pub fn bytes(&self) -> u64 {
        self.progress.bytes.load(Ordering::Relaxed)
    }

    /// Returns its lag.
    pub fn behind(&self, now: Instant) -> Behind {
        let view = self.view.upgrade();
        view.map(|view| view.behind(self.progress.item.load(Ordering::Relaxed), now)).unwrap_or_default()
    }

    /// The rest; `None` if it has ended.
    pub fn observe(&self) -> Option<Observed> {
        let hub = self.hub.upgrade()?;
        let view = self.view.upgrade()?;
        let version = ResourceVersion::new(self.progress.version.load(Ordering::Relaxed));
        Some(Observed {
            resource: hub.resource().clone(),
            selection: view.selection().clone(),
            format: view.encoder().format().clone(),
            version,
        })
    }
}
