//! Watches over HTTP: where one begins, and what it is told when it cannot.

use std::time::Duration;

use axum::body::Body;
use tokio::time::Instant;

use super::{
    Answer, Front, Otherwise,
    options::{Begin, Freshness, WatchOptions},
    path::Path,
    status::Failure,
};
use crate::{
    fanout::{Bell, Catalog, Patience, Refusal, Start, Terms},
    model::format::Format,
    server::reader::{FRESHNESS_TIMEOUT, Opened, Speech},
};

/// The silence after which a bookmark is sent, as the apiserver does it.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// A watch that names no timeout ends after one to two times this (`--min-request-timeout` of the apiserver), so that watches
/// find their way to other replicas.
const TIMEOUT_MIN: Duration = Duration::from_secs(1800);

impl<C: Catalog> Front<C> {
    pub(super) async fn watch(
        &self,
        path: &Path,
        options: WatchOptions,
        format: Format,
        bell: Bell,
    ) -> Result<Answer, Otherwise> {
        let WatchOptions { label_selector, field_selector, begin, bookmarks, timeout } = options;
        let permit = self.reader.admit()?;
        let selected = self.select(path, (label_selector, field_selector), true).await?;
        let hub = &selected.served.hub;
        let start = match begin {
            Begin::State(freshness) => {
                if let Err(otherwise) = self.freshen(&selected.served, freshness, Patience::Bookmark).await {
                    return match (otherwise, freshness) {
                        // A watch has begun by the time that this is known.
                        (Otherwise::Failed(failure), Freshness::NotOlderThan(_)) => Ok(last_line(&failure)),
                        (otherwise, _) => Err(otherwise),
                    };
                }
                Start::Snapshot
            }
            Begin::Now(freshness) => {
                self.freshen(&selected.served, freshness, Patience::Bookmark).await?;
                Start::After(hub.snapshot()?.1)
            }
            Begin::After(version) => {
                // From the future: upstream is silent until it gets there, and so is its watch.
                hub.reached(version, FRESHNESS_TIMEOUT).await?;
                Start::After(version)
            }
        };
        let terms = Terms { marks_end: bookmarks, ..start.into() };
        let subscription = match self.reader.subscribe(&selected.served, selected.selection, format, terms, bell).await
        {
            Ok(subscription) => subscription,
            Err(Refusal::Expired(expired)) => return Ok(last_line(&Failure::watch_expired(&expired))),
            Err(refusal) => return Err(refusal.into()),
        };
        let timeout = timeout.unwrap_or_else(|| TIMEOUT_MIN.mul_f64(1.0 + self.spread()));
        Ok(Answer::Watch(Opened {
            subscription,
            bookmark_interval: bookmarks.then_some(BOOKMARK_INTERVAL),
            timeout_at: Some(Instant::now() + timeout),
            speech: Speech::Lines,
            permit,
        }))
    }
}

/// A watch whose only event is an error: the response itself is a success.
fn last_line(failure: &Failure) -> Answer {
    Answer::Read(super::json(Body::from(failure.line())))
}
