//! Watches over HTTP: where a watch starts, and how it is refused.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use kubefan_admission::{FairPermit, Holder};
use kubefan_audit::AuditRecord;
use kubefan_cache::Refusal;
use kubefan_common::{
    planted::{self, Bug},
    spread::spread,
};
use kubefan_fanout::{Catalog, Fresh, Start, StreamWaker, SubscribeOptions};
use kubefan_model::Media;
use tokio::time::Instant;

use super::{
    answer::{self, Answer},
    cache_reads::{CacheReads, ResolvedRead},
    options::{Freshness, WatchOptions, WatchStart},
    read_error::ReadError,
    status::Failure,
};
use crate::{
    client_info::RequestOrigin,
    watch::{OpenedWatch, WatchProtocol},
};

/// A bookmark is sent after this time without events, as the apiserver does.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest timeout of a watch that names none (`--min-request-timeout` of the apiserver). The
/// longest is twice as long.
const TIMEOUT_MIN: Duration = Duration::from_secs(1800);

/// Timeouts for watches that name none. They are spread evenly, so that watches that start together
/// do not end together, and move to other replicas over time.
#[derive(Default)]
pub struct DefaultTimeouts {
    watches: AtomicU32,
}

impl DefaultTimeouts {
    /// The timeout of the next watch.
    fn next(&self) -> Duration {
        TIMEOUT_MIN.mul_f64(1.0 + spread(self.watches.fetch_add(1, Ordering::Relaxed).into()))
    }
}

/// Opens a watch, which keeps `place`. Its subscription wakes `stream_waker`.
///
/// # Errors
/// Why it is not answered from the cache.
pub async fn open<C: Catalog>(
    reads: &CacheReads<C>,
    timeouts: &DefaultTimeouts,
    ResolvedRead { selected, format, arrived_at, read, .. }: ResolvedRead<'_>,
    options: WatchOptions,
    (place, sender): (FairPermit, RequestOrigin),
    stream_waker: StreamWaker,
) -> Result<Answer, ReadError> {
    let WatchOptions { start, bookmarks, marks_end, timeout, .. } = options;
    let (hub, media) = (&selected.served.hub, selected.served.parser.media());
    let mut fresh = Fresh::Cache;
    // The version of a cluster may be ahead of a quiet resource's cache. The apiserver, too, is
    // silent until it gets there.
    let after = |version| match hub.head() {
        Some(head) if head < version && planted::is(Bug::AheadIsNow) => Start::Resume(head),
        Some(head) if head < version => Start::Await(version.end()),
        // As the apiserver: its versions do not say how many events of one were sent. What comes
        // later is sent.
        Some(head) if head.is_at(version) => Start::Resume(head),
        _ => Start::Resume(version.end()),
    };
    let start = match start {
        WatchStart::State(freshness) => {
            let proof = (Some(&selected.selection), reads.patience());
            fresh = match reads.wait_until_fresh(&selected.served, freshness, proof, arrived_at).await {
                Ok(fresh) => fresh,
                // The apiserver has sent the headers of the watch before it knows this.
                Err(ReadError::Final(failure)) if matches!(freshness, Freshness::NotOlderThan(_)) => {
                    return Ok(error_event(&failure, media));
                }
                Err(error) => return Err(error),
            };
            Start::Snapshot
        }
        WatchStart::Now(freshness) => {
            // Upstream would read no object for it.
            let proof = (None, reads.patience());
            let fresh = reads.wait_until_fresh(&selected.served, freshness, proof, arrived_at).await?;
            after(hub.snapshot_of(&fresh)?.1)
        }
        WatchStart::After(version) => after(version),
    };
    let terms = SubscribeOptions { marks_end, fresh, holder: place.holder(), ..start.into() };
    let (of_stream, of_registered) = (stream_waker.of_stream(), stream_waker.of_stream());
    let subscribed = reads.reader.subscribe(&selected.served, selected.selection, format, terms, stream_waker).await;
    let subscription = match subscribed {
        Ok(subscription) => subscription,
        Err(Refusal::Expired(expired)) => return Ok(error_event(&Failure::watch_expired(&expired), media)),
        Err(refusal) => return Err(refusal.into()),
    };
    let timeout = timeout.unwrap_or_else(|| timeouts.next());
    let holder = place.holder().unwrap_or_else(|| Holder::new(0, None));
    let registered = reads.reader.register(&read, sender, &selected.served, &subscription, of_registered);
    let lease = reads.reader.lease(read, &selected.served.gvr, holder, of_stream);
    Ok(Answer::Watch(Box::new(OpenedWatch {
        subscription,
        bookmark_interval: bookmarks.then_some(BOOKMARK_INTERVAL),
        timeout_at: Some(Instant::now() + timeout),
        protocol: WatchProtocol::Kube(media),
        place,
        lease,
        registered,
        cross_origin: Arc::default(),
        record: AuditRecord::default(),
    })))
}

/// A watch whose only event is an error; the status of the response is 200.
fn error_event(failure: &Failure, media: Media) -> Answer {
    Answer::Response(answer::from_cache(media.watch_content_type(), Body::from(failure.event(media))))
}
