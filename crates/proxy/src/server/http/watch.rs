//! Watches over HTTP: where one begins, and what it is told when it cannot.

use std::time::Duration;

use axum::body::Body;
use tokio::time::Instant;

use super::{
    Answer, Front, Otherwise, Read,
    options::{Begin, Freshness, WatchOptions},
    status::Failure,
};
use crate::{
    fanout::{Catalog, Refusal, Start, StreamWaker, SubscribeOptions},
    server::reader::{Opened, Speech},
};
use kubefan_model::Media;

/// The silence after which a bookmark is sent, as the apiserver does it.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// A watch that names no timeout ends after one to two times this (`--min-request-timeout` of the apiserver), so that watches
/// find their way to other replicas.
const TIMEOUT_MIN: Duration = Duration::from_secs(1800);

impl<C: Catalog> Front<C> {
    pub(super) async fn watch(
        &self,
        Read { selected, format, .. }: Read<'_>,
        options: WatchOptions,
        bell: StreamWaker,
    ) -> Result<Answer, Otherwise> {
        let WatchOptions { begin, bookmarks, marks_end, timeout, .. } = options;
        let permit = self.reader.admit()?;
        let (hub, media) = (&selected.served.hub, selected.served.parser.media());
        let start = match begin {
            Begin::State(freshness) => {
                if let Err(otherwise) = self.freshen(&selected.served, freshness, self.patience()).await {
                    return match (otherwise, freshness) {
                        // A watch has begun by the time that this is known.
                        (Otherwise::Failed(failure), Freshness::NotOlderThan(_)) => Ok(last_word(&failure, media)),
                        (otherwise, _) => Err(otherwise),
                    };
                }
                Start::Snapshot
            }
            Begin::Now(freshness) => {
                self.freshen(&selected.served, freshness, self.patience()).await?;
                Start::Resume(hub.snapshot()?.1)
            }
            // A version of the cluster's may be ahead of a quiet resource's cache; upstream is silent until it gets there, too.
            Begin::After(version) => match hub.head() {
                Some(head) if head < version => Start::Await(version),
                _ => Start::Resume(version),
            },
        };
        let terms = SubscribeOptions { marks_end, ..start.into() };
        let subscription = match self.reader.subscribe(&selected.served, selected.selection, format, terms, bell).await
        {
            Ok(subscription) => subscription,
            Err(Refusal::Expired(expired)) => return Ok(last_word(&Failure::watch_expired(&expired), media)),
            Err(refusal) => return Err(refusal.into()),
        };
        let timeout = timeout.unwrap_or_else(|| TIMEOUT_MIN.mul_f64(1.0 + self.spread()));
        Ok(Answer::Watch(Opened {
            subscription,
            bookmark_interval: bookmarks.then_some(BOOKMARK_INTERVAL),
            timeout_at: Some(Instant::now() + timeout),
            speech: Speech::Http(media),
            permit,
        }))
    }
}

/// A watch whose only event is an error: the response itself is a success.
fn last_word(failure: &Failure, media: Media) -> Answer {
    Answer::Read(super::response(media.watch_content_type(), Body::from(failure.event(media))))
}
