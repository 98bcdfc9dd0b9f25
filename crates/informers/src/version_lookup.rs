//! The resource version that the cluster has reached, for readers that ask for a version which the
//! cache has not reached.
//!
//! After a restart many readers may come back with such a version. One request to upstream answers
//! all readers that began to wait before it was sent. Readers wait for the cache first, so a cache
//! sends at most one request per such wait, whatever versions clients name.

use std::time::Duration;

use kubefan_cache::Refusal;
use kubefan_common::planted::{self, Bug};
use kubefan_fanout::Served;
use kubefan_model::ResourceVersion;
use kubefan_upstream::reflector::Target;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use super::upstream_context::CacheContext;

/// Maximum wait for upstream. The subscriber retries.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

type Answer = Result<ResourceVersion, Refusal>;

/// The cluster version as seen by one cache.
pub(super) struct ClusterVersion {
    context: CacheContext,
    target: Target,
    /// Time of the last request, and its answer. Locked while a request is under way.
    last: Mutex<Option<(Instant, Answer)>>,
}

impl ClusterVersion {
    pub(super) fn new(context: CacheContext, served: &Served) -> Self {
        Self { target: context.target(served), context, last: Mutex::default() }
    }

    /// Returns the version that the cluster has reached, by a request that was sent after `asked`.
    pub(super) async fn known_after(&self, asked: Instant) -> Answer {
        let mut last = self.last.lock().await;
        if let Some((at, answer)) = &*last
            && (*at > asked || planted::is(Bug::OldLookUpCounts))
        {
            return answer.clone();
        }
        let at = Instant::now();
        let answer = match timeout(ANSWER_TIMEOUT, self.context.cluster_version(&self.target)).await {
            Ok(answer) => answer.map_err(|error| self.refusal(error.to_string())),
            Err(_) => Err(self.refusal(format!("no answer within {ANSWER_TIMEOUT:?}"))),
        };
        *last = Some((at, answer.clone()));
        answer
    }

    fn refusal(&self, message: String) -> Refusal {
        Refusal::Unavailable(format!("the version of {} is not known: {message}", self.target.gvr))
    }
}
