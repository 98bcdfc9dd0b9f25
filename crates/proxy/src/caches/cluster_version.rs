//! How far the cluster is, for those whose version this cache has not reached.
//!
//! Everybody may come back at once with such a version, so one question serves all who began to wait before it was asked. It is asked only
//! after the wait for the cache, so a cache asks at most once in that time, whatever clients ask for.

use std::time::Duration;

use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use super::informer::Shared;
use crate::{
    fanout::{Refusal, Served},
    upstream::reflector::Target,
};
use kubefan_model::ResourceVersion;

/// How long an answer is waited for; the subscriber comes back.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

type Answer = Result<ResourceVersion, Refusal>;

/// The questions of one cache.
pub(super) struct ClusterVersion {
    shared: Shared,
    target: Target,
    /// When it was last asked for, and the answer. Held while upstream is asked.
    last: Mutex<Option<(Instant, Answer)>>,
}

impl ClusterVersion {
    pub(super) fn new(shared: Shared, served: &Served) -> Self {
        Self { target: shared.target(served), shared, last: Mutex::default() }
    }

    /// The version reached, by a question that began after `asked`.
    pub(super) async fn known_after(&self, asked: Instant) -> Answer {
        let mut last = self.last.lock().await;
        if let Some((at, answer)) = &*last
            && *at > asked
        {
            return answer.clone();
        }
        let at = Instant::now();
        let answer = match timeout(ANSWER_TIMEOUT, self.shared.cluster_version(&self.target)).await {
            Ok(answer) => answer.map_err(|error| self.refusal(error)),
            Err(_) => Err(self.refusal(format!("no answer within {ANSWER_TIMEOUT:?}"))),
        };
        *last = Some((at, answer.clone()));
        answer
    }

    fn refusal(&self, message: String) -> Refusal {
        Refusal::Unavailable(format!("the version of {} is not known: {message}", self.target.gvr))
    }
}
