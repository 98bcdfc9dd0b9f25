//! State that the watches of one source share.

use std::sync::{Arc, atomic::AtomicU64};

use super::outage::Outage;
use crate::lister_watcher::ListerWatcher;

pub(super) struct Servers {
    pub(super) kubefan: Arc<dyn ListerWatcher>,
    pub(super) apiserver: Arc<dyn ListerWatcher>,
    /// `None`: never falls back.
    pub(super) outage: Option<Outage>,
    /// Lists and watches that were started at the apiserver.
    pub(super) apiserver_starts: AtomicU64,
}
