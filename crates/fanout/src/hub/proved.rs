//! States that upstream has proved to be current.
//!
//! If the objects of a cache at version c equal those of a list at a later version R, then the
//! cache's state at c is the state at R. But its events up to R may still be on their way: an
//! object that was created and deleted in between is in neither state. The hazard is a cache that
//! has received the creation only: its version is above c, and it shows an object that was gone
//! before R. So a reader of R is served the state at c, or the cache once it has reached R, and
//! nothing in between. Its watch skips the events up to R.

use kubefan_cache::{CachedState, Refusal, SAME_VERSION_WAIT, Store};
use kubefan_model::ResourceVersion;
use tokio::time::{Instant, timeout_at};

use super::core::Hub;

/// The source of an answer to a read.
#[derive(Clone, Default)]
pub enum ReadSource {
    /// The cache, as it is now or at any later time.
    #[default]
    Cache,
    /// The cache, unless it is below this version, which it had reached: a history that starts
    /// meanwhile may go back.
    CacheAtLeast(ResourceVersion),
    /// The proved state, to serve until the cache has reached its version.
    Proved(ProvedState),
}

/// The state of the cluster at a version that the cache may not have reached.
#[derive(Clone)]
pub struct ProvedState {
    /// Names the history of the cache that the objects are from.
    pub epoch: u64,
    /// The objects.
    pub store: Store,
    /// The version of the cache that had them.
    pub cached_at: ResourceVersion,
    /// The version of the list that has these objects.
    pub version: ResourceVersion,
}

impl ReadSource {
    /// Returns the proved state, if a reader has to be served it instead of the cache.
    ///
    /// # Errors
    /// [`Refusal::Unavailable`] if another history of the cache has started since the proof, or if
    /// unchanged objects have other bytes since. [`Refusal::Future`] if the cache went back.
    pub(crate) fn instead_of(&self, cached: &CachedState) -> Result<Option<&ProvedState>, Refusal> {
        match self {
            Self::Cache => Ok(None),
            Self::CacheAtLeast(requested) => cached.check_reached(*requested).map(|()| None),
            Self::Proved(proved) if proved.epoch != cached.epoch || cached.reencoded > Some(proved.cached_at) => {
                Err(Refusal::Unavailable("the resource was listed again since its state was proved".to_owned()))
            }
            Self::Proved(proved) => Ok((cached.version < proved.version).then_some(proved)),
        }
    }
}

impl std::fmt::Debug for ReadSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cache => f.write_str("Cache"),
            Self::CacheAtLeast(version) => write!(f, "CacheAtLeast({version})"),
            Self::Proved(ProvedState { epoch, version, .. }) => write!(f, "Proved({version} in epoch {epoch})"),
        }
    }
}

impl Hub {
    /// Lets readers be served a state that upstream has proved. Upstream has reached the proved
    /// version. So a later list with a lower version is of another history, even if the cache has
    /// not reached the proved version.
    pub fn serve_proved(&self, proved: ProvedState) -> ReadSource {
        let mut state = self.lock();
        if state.published.state_of(proved.epoch).is_some() {
            state.served_ahead = state.served_ahead.max(Some(proved.version));
        }
        ReadSource::Proved(proved)
    }

    /// Returns the state, for a list or a get.
    pub fn snapshot(&self) -> Result<(Store, ResourceVersion), Refusal> {
        self.snapshot_of(&ReadSource::Cache)
    }

    /// Like [`Self::snapshot_of`], for a reader that continues after the whole version. If the
    /// version has several events, it waits until a later one arrives or none has arrived for
    /// [`SAME_VERSION_WAIT`], and at most twice that long.
    pub async fn whole_snapshot_of(&self, source: &ReadSource) -> Result<(Store, ResourceVersion), Refusal> {
        let deadline = Instant::now() + 2 * SAME_VERSION_WAIT;
        let mut head = self.head.subscribe();
        loop {
            head.mark_unchanged();
            let (store, version) = self.snapshot_of(source)?;
            let waits_until = version.is_between_events().then(|| self.newest_received()).flatten();
            let waits_until = waits_until.map(|at| deadline.min(at + SAME_VERSION_WAIT));
            let Some(until) = waits_until.filter(|until| *until > Instant::now()) else { return Ok((store, version)) };
            drop(store);
            // The state is taken again in either case.
            let _ = timeout_at(until, head.changed()).await;
        }
    }

    fn newest_received(&self) -> Option<Instant> {
        self.lock().published.state()?.history.ring().newest_received()
    }

    /// Returns the state that a read may be served, for a list or a get.
    pub fn snapshot_of(&self, source: &ReadSource) -> Result<(Store, ResourceVersion), Refusal> {
        let mut state = self.lock();
        state.used_at = Instant::now();
        let cached = state.published.serving(state.used_at)?;
        Ok(match source.instead_of(cached)? {
            Some(ProvedState { store, version, .. }) => (store.clone(), *version),
            None => (cached.store.clone(), cached.version),
        })
    }
}
