//! The right of a caller to its stream, which is reviewed again while the stream lasts.
//!
//! The hazard is a right that was taken away: kube-apiserver checks a watch only when it starts,
//! and a stream of kubefan may last for days. So each stream has a task that asks again. It asks by
//! the caller's identity, because tokens are not kept. The stream ends when the right is gone, when
//! the credential expires, after an object that its token is bound to was deleted, at its greatest
//! age, and if there was no verdict for too long; then its client comes back with a new credential,
//! and resumes. A caller can delay its own review by sending many others. So a stream without a
//! verdict ends, as a refused one does.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use kubefan_admission::Holder;
use kubefan_cache::{Refusal, StreamEnd};
use kubefan_model::GroupVersionResource;
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use super::{
    access_control::{AccessControl, StreamOptions},
    authorization::{Authorized, read::Read},
    bound_object::BoundObject,
    denial::Denial,
    switches::{Answerer, ModeWatch, ModeWatchGuard},
};

/// A verdict counts in a review again if it is not older than this part of the interval: streams of
/// one user share it.
const RECENT: u32 = 10;
/// The time until the next attempt if there was no verdict.
const RETRY: Duration = Duration::from_secs(30);
const UNREVIEWED: &str = "the right to this stream could not be reviewed for too long";

/// Interval of the look-ups of the objects that a token is bound to.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(20);
const UNBOUND: &str = "an object that the token of this stream is bound to was deleted";

/// The right to a stream. Dropping it ends the reviews.
pub struct Lease(Option<Box<Held>>);

struct Held {
    end: Arc<OnceLock<StreamEnd>>,
    /// `None` if callers are not distinguished.
    reviews: Option<AbortHandle>,
    /// `None` if the modes never change.
    _open: Option<ModeWatchGuard>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(reviews) = &self.reviews {
            reviews.abort();
        }
    }
}

impl Lease {
    /// Starts the reviews of a stream's right to read the resource `gvr`, unless callers are not
    /// distinguished. `exists` tells whether an object exists, if that is known. `wake` is called
    /// when the stream must end.
    pub fn start(
        access: &Arc<AccessControl>,
        read: Authorized<Read>,
        gvr: &GroupVersionResource,
        holder: Holder,
        exists: impl Fn(&BoundObject) -> Option<bool> + Send + 'static,
        wake: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Self {
        let end = Arc::new(OnceLock::new());
        let GroupVersionResource { group, resource, .. } = gvr.clone();
        let watch = ModeWatch { group, resource, caller: Some(read.caller().clone()), by: Answerer::Cache };
        let open = access.switches().register(watch, end.clone(), wake.clone());
        let reviews = Self::review(access, read, holder, exists, end.clone(), wake);
        match (&reviews, &open) {
            (None, None) => Self(None),
            _ => Self(Some(Box::new(Held { end, reviews, _open: open }))),
        }
    }

    fn review(
        access: &Arc<AccessControl>,
        read: Authorized<Read>,
        holder: Holder,
        exists: impl Fn(&BoundObject) -> Option<bool> + Send + 'static,
        ended: Arc<OnceLock<StreamEnd>>,
        wake: impl Fn() + Send + 'static,
    ) -> Option<AbortHandle> {
        let (options, spread) = access.next_stream()?;
        let access = access.clone();
        let task = tokio::spawn(async move {
            let reason = tokio::select! {
                reason = until_it_ends(&access, &read, holder, options) => reason,
                () = until_unbound(read.caller().bound(), spread, exists) => StreamEnd::Reauthenticate(UNBOUND),
            };
            let _ = ended.set(reason);
            wake();
        });
        Some(task.abort_handle())
    }

    /// Reason to end the stream; `None` while it may continue.
    pub fn end(&self) -> Option<StreamEnd> {
        self.0.as_ref()?.end.get().cloned()
    }
}

async fn until_it_ends(
    access: &AccessControl,
    read: &Authorized<Read>,
    holder: Holder,
    StreamOptions { reauthorize_interval, age_max }: StreamOptions,
) -> StreamEnd {
    let expires =
        read.caller().expires_at().map(|at| (at, "the token or client certificate of this stream has expired"));
    let too_old = age_max.and_then(|age| Instant::now().checked_add(age));
    let too_old = too_old.map(|at| (at, "the stream has reached its greatest age (limits.streamAgeMax)"));
    let reviewing = until_revoked(access, read, holder, reauthorize_interval);
    match expires.into_iter().chain(too_old).min_by_key(|(at, _)| *at) {
        None => reviewing.await,
        Some((at, why)) => timeout_at(at, reviewing).await.unwrap_or(StreamEnd::Reauthenticate(why)),
    }
}

async fn until_revoked(
    access: &AccessControl,
    read: &Authorized<Read>,
    holder: Holder,
    interval: Duration,
) -> StreamEnd {
    // In an outage the last verdict has counted for the grace before.
    let unreviewed_max = 2 * interval;
    let mut pause = interval;
    let mut allowed_at = Instant::now();
    loop {
        sleep(pause).await;
        pause = match access.authorize_again(read, holder, interval / RECENT).await {
            Ok(()) => {
                allowed_at = Instant::now();
                interval
            }
            Err(Denial::Unavailable(_) | Denial::Busy(_)) if allowed_at.elapsed() >= unreviewed_max => {
                return StreamEnd::Reauthenticate(UNREVIEWED);
            }
            Err(Denial::Unavailable(_) | Denial::Busy(_)) => RETRY.min(interval),
            Err(denial) => return StreamEnd::Revoked(Refusal::from(denial).to_string()),
        };
    }
}

/// Waits until one of the objects is deleted. One counts as deleted if it existed before: a cache
/// that is behind does not have a new pod yet. `spread` (0 to 1) is the part of the interval until
/// the second look-up.
async fn until_unbound(bound: &[BoundObject], spread: f64, exists: impl Fn(&BoundObject) -> Option<bool>) {
    if bound.is_empty() {
        return std::future::pending().await;
    }
    let mut existed = vec![false; bound.len()];
    let mut pause = LOOKUP_INTERVAL.mul_f64(spread);
    loop {
        for (object, existed) in bound.iter().zip(&mut existed) {
            match exists(object) {
                Some(true) => *existed = true,
                Some(false) if *existed => return,
                Some(false) | None => {}
            }
        }
        sleep(pause).await;
        pause = LOOKUP_INTERVAL;
    }
}

#[cfg(test)]
mod tests;
