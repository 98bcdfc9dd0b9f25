//! The modes in force, and the open watches that a change of them concerns.
//!
//! The hazard is a switch that works for new requests only: a watch may stay open for days. So
//! every open watch is known here, and ends if another mode would answer it now. Its client comes
//! back, resumes, and is answered in the new mode. Were all of them to end at once, all would come
//! back at once; so they end in slices, in no order.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use kubefan_cache::StreamEnd;
use tokio::time::sleep;

use super::{
    authentication::caller::Caller,
    modes::{Mode, Modes},
    user::Identity,
};

/// Watches that end per second at a change of the modes.
pub const ENDS_PER_SECOND: u32 = 500;
/// The number of slices in which watches end per second.
const SLICES_PER_SECOND: u32 = 10;

/// The mode because of which a read is not answered from the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switched {
    /// `Passthrough` or `Deny`.
    pub mode: Mode,
    /// The plural, with the group.
    pub resource: String,
}

impl Switched {
    /// The mode of a resource.
    pub fn new(mode: Mode, group: &str, resource: &str) -> Self {
        Self { mode, resource: qualified(group, resource) }
    }

    /// Returns the message for the caller. It names the switch and the way out.
    pub fn message(&self) -> String {
        let Self { mode, resource } = self;
        match mode {
            Mode::Deny => format!(
                "kubefan's operator has switched off this read of {resource} (mode Deny, under modes in kubefan's configuration \
                 file); ask the apiserver itself, or the operator"
            ),
            Mode::Passthrough | Mode::Cache => format!(
                "kubefan's operator has switched {resource} to the apiserver (mode Passthrough, under modes in kubefan's \
                 configuration file), or an alarm of kubefan fires (tuning.passthroughOnAlarm): kubefan forwards its reads \
                 over HTTP, and answers none over gRPC; try again later, or read from the apiserver"
            ),
        }
    }
}

/// The modes in force.
pub struct Switches {
    modes: ArcSwap<Modes>,
    /// Whether `Passthrough` takes the place of `Cache`.
    bypasses_caches: AtomicBool,
    /// `None` if the modes never change.
    open: Option<Mutex<HashMap<u64, Arc<RegisteredWatch>>>>,
    /// The number of the last watch.
    last: AtomicU64,
}

/// The server of an open watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answerer {
    /// A cache.
    Cache,
    /// The apiserver, because of the mode.
    ApiserverByMode,
    /// The apiserver, because no cache could answer.
    ApiserverWithoutCache,
}

/// The facts that the mode of an open watch depends on, and its server.
pub struct ModeWatch {
    /// The group of its resource.
    pub group: String,
    /// The plural of its resource.
    pub resource: String,
    /// The caller; `None` if it is not known.
    pub caller: Option<Caller>,
    /// The server that answers.
    pub by: Answerer,
}

struct RegisteredWatch {
    watch: ModeWatch,
    end: Arc<OnceLock<StreamEnd>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// Keeps a watch known. Dropping it forgets the watch.
pub struct ModeWatchGuard {
    switches: Arc<Switches>,
    number: u64,
}

impl Drop for ModeWatchGuard {
    fn drop(&mut self) {
        if let Some(mut open) = self.switches.open() {
            open.remove(&self.number);
        }
    }
}

/// The identity of a caller, if callers are distinguished. Rules that name callers need that.
fn identity(caller: Option<&Caller>) -> Option<&Identity> {
    match caller {
        Some(Caller::Known(known)) => Some(&known.identity),
        Some(Caller::Any) | None => None,
    }
}

impl Switches {
    /// Modes that never change: no watch needs to be known.
    pub fn fixed(modes: Modes) -> Arc<Self> {
        Self::build(modes, None)
    }

    /// Modes that may change.
    pub fn new(modes: Modes) -> Arc<Self> {
        Self::build(modes, Some(Mutex::default()))
    }

    fn build(modes: Modes, open: Option<Mutex<HashMap<u64, Arc<RegisteredWatch>>>>) -> Arc<Self> {
        let modes = ArcSwap::from_pointee(modes);
        Arc::new(Self { modes, bypasses_caches: AtomicBool::new(false), open, last: AtomicU64::new(0) })
    }

    fn open(&self) -> Option<MutexGuard<'_, HashMap<u64, Arc<RegisteredWatch>>>> {
        Some(self.open.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether any read may be answered in another mode than `Cache`.
    pub fn is_any_set(&self) -> bool {
        self.bypasses_caches.load(Ordering::Acquire) || !self.modes.load().rules().is_empty()
    }

    /// Returns the mode of a caller's reads of a resource. `None` if that depends on the caller,
    /// which is not known.
    pub fn mode(&self, group: &str, resource: &str, caller: Option<&Caller>) -> Option<Mode> {
        match self.modes.load().mode(group, resource, identity(caller)) {
            Some(Mode::Cache) if self.bypasses_caches.load(Ordering::Acquire) => Some(Mode::Passthrough),
            mode => mode,
        }
    }

    /// Succeeds if a cache may answer the caller. A caller that is not known may read nothing that
    /// depends on it.
    ///
    /// # Errors
    /// The mode that says otherwise.
    pub fn check(&self, group: &str, resource: &str, caller: &Caller) -> Result<(), Switched> {
        match self.mode(group, resource, Some(caller)).unwrap_or(Mode::Deny) {
            Mode::Cache => Ok(()),
            mode => Err(Switched::new(mode, group, resource)),
        }
    }

    /// Replaces the modes. Watches that are open continue until [`Self::end_concerned`].
    pub fn replace(&self, modes: Modes) {
        self.modes.store(Arc::new(modes));
    }

    /// Sets whether the apiserver answers all reads that a cache would answer. As with
    /// [`Self::replace`], open watches continue until [`Self::end_concerned`].
    pub fn bypass_caches(&self, bypasses: bool) {
        self.bypasses_caches.store(bypasses, Ordering::Release);
    }

    /// Makes a watch known. If another mode answers it, `end` is set and `wake` is called.
    pub fn register(
        self: &Arc<Self>,
        watch: ModeWatch,
        end: Arc<OnceLock<StreamEnd>>,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Option<ModeWatchGuard> {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let opened = Arc::new(RegisteredWatch { watch, end, wake: Box::new(wake) });
        self.open()?.insert(number, opened.clone());
        // The modes may have changed after the watch was let in, and before it was known.
        self.end_if_concerned(&opened);
        Some(ModeWatchGuard { switches: self.clone(), number })
    }

    fn must_end(&self, ModeWatch { group, resource, caller, by }: &ModeWatch) -> bool {
        match (by, self.mode(group, resource, caller.as_ref())) {
            // Its caller must be known now.
            (_, None) => true,
            (Answerer::Cache | Answerer::ApiserverWithoutCache, Some(Mode::Cache)) => false,
            (Answerer::ApiserverByMode | Answerer::ApiserverWithoutCache, Some(Mode::Passthrough)) => false,
            _ => true,
        }
    }

    fn end_if_concerned(&self, open: &RegisteredWatch) -> bool {
        if !self.must_end(&open.watch) {
            return false;
        }
        let resource = qualified(&open.watch.group, &open.watch.resource);
        let _ = open.end.set(StreamEnd::Switched(resource));
        (open.wake)();
        true
    }

    /// Ends the watches that another mode would answer now, so many per second. Each is judged by
    /// the modes of the moment. Returns how many have ended.
    pub async fn end_concerned(&self, per_second: u32) -> usize {
        let slice = (per_second / SLICES_PER_SECOND).max(1);
        let interval = Duration::from_secs(1) * slice / per_second.max(1);
        let all: Vec<Arc<RegisteredWatch>> = match self.open() {
            Some(open) => open.values().filter(|open| self.must_end(&open.watch)).cloned().collect(),
            None => return 0,
        };
        let mut ended = 0;
        for slice in all.chunks(slice as usize) {
            ended += slice.iter().filter(|open| self.end_if_concerned(open)).count();
            sleep(interval).await;
        }
        ended
    }
}

/// The plural, with the group if there is one.
fn qualified(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

#[cfg(test)]
mod tests;
