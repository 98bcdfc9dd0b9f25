//! Lists and watches of one kubefan, as a reflector reads them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use kubefan_common::{
    encoding::Encoding,
    proto::v1alpha1::{self, DeleteReason, Event, EventType, Target},
    reasons::ErrorReason,
};

use super::{
    client::{Client, ObjectList, ReadOptions},
    watch::{WatchItem, WatchOptions, WatchStream},
};
use crate::{
    budget::FallbackBudget,
    error::ClientError,
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents},
    object::{ObjectKey, RawObject},
    random::{generator, watch_timeout},
    version::number,
};

/// A state older than a version that is already known is refused this often. Replicas catch up
/// sooner. A cluster that was restored from a backup may not for a long time.
const OLD_SNAPSHOTS_MAX: u32 = 10;

/// Reads one resource from a kubefan over gRPC.
///
/// A watch reconnects by itself, resumes, and starts over with a snapshot if it cannot resume. A
/// list is one page: kubefan sends it in chunks, all at one version.
#[derive(Debug, Clone)]
pub struct GrpcListWatch {
    client: Client,
    target: Target,
    options: WatchOptions,
    known: Arc<Mutex<Known>>,
}

/// State that one watch leaves to the next.
#[derive(Debug, Default)]
struct Known {
    /// The cluster that the last version came from. A later watch from that version passes it on.
    cluster: String,
    /// The version that has expired. A state from a replica that lags must not go back behind it.
    /// 0 if there is none.
    expired: u64,
    /// The states that were refused in a row.
    refused: u32,
}

impl GrpcListWatch {
    /// Returns the reader of `target`. The resource version, the cluster and the timeout in
    /// `options` are set for each watch.
    pub fn new(client: Client, target: Target, options: WatchOptions) -> Self {
        Self { client, target, options, known: Arc::default() }
    }

    async fn list_all(&self, options: ListOptions) -> Result<ListPage, ClientError> {
        // Kubernetes' "0" means any state, as an empty version does to kubefan.
        let resource_version = if options.resource_version == "0" { String::new() } else { options.resource_version };
        // A list is not compressed. In these encodings its objects are JSON, as in the watch.
        let encoding = match self.options.encoding {
            Encoding::Json | Encoding::Zstd | Encoding::ZstdDelta => Encoding::Json,
            Encoding::Protobuf => Encoding::Protobuf,
        };
        let read = ReadOptions { resource_version, projection: self.options.projection.clone(), encoding };
        self.page(self.client.list(self.target.clone(), read).await?)
    }

    fn page(&self, list: ObjectList) -> Result<ListPage, ClientError> {
        self.check_state(&list.resource_version)?;
        self.set_cluster(&list.cluster);
        Ok(ListPage {
            resource_version: list.resource_version,
            objects: list.objects.into_iter().map(raw_object).collect(),
            continue_token: String::new(),
        })
    }

    fn start_watch(&self, options: ListOptions) -> WatchEvents {
        let cluster = self.known().cluster.clone();
        // With initial events the version is only a minimum. Every snapshot of kubefan is at least
        // as new as the version it restarts from. For the first snapshot of a watch the server has
        // no minimum, so the reader compares it with the version that has expired.
        let resource_version = if options.send_initial_events { String::new() } else { options.resource_version };
        let watch = self.client.watch(
            self.target.clone(),
            WatchOptions {
                cluster: if resource_version.is_empty() { String::new() } else { cluster },
                resource_version: resource_version.clone(),
                // A proxy in between may keep a connection open that leads nowhere, and answer its
                // PINGs. To resume costs little.
                timeout: Some(options.timeout.unwrap_or_else(|| watch_timeout(&mut generator(self.options.seed)))),
                ..self.options.clone()
            },
        );
        let reader = Reader { watch, last: resource_version, source: self.clone() };
        stream::unfold(reader, |mut reader| async move { Some((reader.next().await?, reader)) }).boxed()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_cluster(&self, cluster: &str) {
        let mut known = self.known();
        if known.cluster != cluster {
            cluster.clone_into(&mut known.cluster);
        }
    }

    /// Remembers a version that has expired, unless another history has replaced its own.
    fn ended(&self, error: &ClientError, version: &str) {
        if error.is_expired() {
            let version = number(version).filter(|_| error.reason() == ErrorReason::TooOld);
            let mut known = self.known();
            known.expired = version.unwrap_or(0);
            known.refused = 0;
        }
    }

    /// Refuses a state that would go back in time.
    fn check_state(&self, version: &str) -> Result<(), ClientError> {
        let mut known = self.known();
        let is_old = number(version).is_some_and(|version| version < known.expired);
        if !is_old || known.refused >= OLD_SNAPSHOTS_MAX {
            known.expired = 0;
            known.refused = 0;
            return Ok(());
        }
        known.refused += 1;
        let message = format!("this replica is at version {version}, behind version {}", known.expired);
        Err(ClientError::Unreachable { address: self.client.address().to_owned(), message })
    }
}

impl ListerWatcher for GrpcListWatch {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        self.list_all(options).boxed()
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        std::future::ready(Ok(self.start_watch(options))).boxed()
    }

    fn watch_reconnects(&self) -> bool {
        true
    }

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.client.fallback_budget()
    }

    fn describe(&self) -> String {
        format!("{} from kubefan at {}", self.target.resource, self.client.address())
    }
}

/// Converts the items of a watch.
struct Reader {
    watch: WatchStream,
    /// The last version that was passed on.
    last: String,
    source: GrpcListWatch,
}

impl Reader {
    async fn next(&mut self) -> Option<Result<WatchEvent, ClientError>> {
        let item = match self.watch.next().await? {
            Ok(item) => item,
            Err(error) => {
                self.source.ended(&error, &self.last);
                return Some(Err(error));
            }
        };
        if let WatchItem::SnapshotBegin { resource_version, .. } = &item
            && let Err(error) = self.source.check_state(resource_version)
        {
            return Some(Err(error));
        }
        if let WatchItem::Restarted { error } = &item {
            self.source.ended(error, &self.last);
        }
        let ends = matches!(item, WatchItem::SnapshotEnd { .. } | WatchItem::GapEnd | WatchItem::CatchUpEnd);
        let kind = match item {
            WatchItem::Event(event) => event_kind(event),
            WatchItem::SnapshotBegin { .. } => WatchEventKind::SnapshotBegin,
            WatchItem::SnapshotEnd { .. } => WatchEventKind::SnapshotEnd,
            WatchItem::GapBegin { .. } | WatchItem::CatchUpBegin { .. } => WatchEventKind::BatchBegin,
            WatchItem::GapEnd | WatchItem::CatchUpEnd => WatchEventKind::BatchEnd,
            WatchItem::Bookmark => WatchEventKind::Bookmark,
            WatchItem::Disconnected { error, .. } | WatchItem::Restarted { error } => {
                WatchEventKind::Disconnected(error)
            }
            WatchItem::Reconnected { .. } => WatchEventKind::Reconnected,
        };
        let version = self.watch.resume_version();
        let moved = !version.is_empty() && (ends || version != self.last);
        let resume_version = moved.then(|| version.to_owned());
        if let Some(version) = &resume_version {
            self.last.clone_from(version);
            self.source.set_cluster(self.watch.cluster());
        }
        Some(Ok(WatchEvent { kind, resume_version }))
    }
}

fn event_kind(event: Event) -> WatchEventKind {
    let kind = event.r#type();
    let reason = event.delete_reason();
    let key = ObjectKey::new(&event.namespace, &event.name);
    if kind == EventType::Deleted && reason == DeleteReason::FinalStateUnknown {
        return WatchEventKind::DeletedFinalStateUnknown(key);
    }
    let object =
        RawObject { key, uid: event.uid.into(), resource_version: event.resource_version.into(), json: event.object };
    match kind {
        EventType::Added => WatchEventKind::Added(object),
        EventType::Modified => WatchEventKind::Modified(object),
        EventType::Deleted => WatchEventKind::Deleted(object),
        EventType::Unspecified => {
            WatchEventKind::Unreadable(format!("{}: an event of an unknown type; is this library too old?", object.key))
        }
    }
}

fn raw_object(object: v1alpha1::Object) -> RawObject {
    RawObject {
        key: ObjectKey::new(&object.namespace, &object.name),
        uid: object.uid.into(),
        resource_version: object.resource_version.into(),
        json: object.object,
    }
}

#[cfg(test)]
mod tests;
