//! Passes on the results of an informer's source, notes everything that the oracle needs, and reads
//! as slowly as the faults demand.

use std::sync::Arc;

use futures::{StreamExt, future::BoxFuture, stream};
use kubefan_client::{ClientError, ListOptions, ListPage, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents};

use super::{InformerRecorder, InformerSpec, Observed, Protocol};
use crate::{history::version, world::World};

/// A source whose answers are noted.
#[derive(Clone)]
pub(super) struct ObservedSource {
    source: Arc<dyn ListerWatcher>,
    world: Arc<World>,
    spec: InformerSpec,
    recorder: InformerRecorder,
}

impl ObservedSource {
    pub(super) fn new(
        source: Arc<dyn ListerWatcher>,
        world: Arc<World>,
        spec: InformerSpec,
        recorder: InformerRecorder,
    ) -> ObservedSource {
        ObservedSource { source, world, spec, recorder }
    }

    fn failure(&self, error: &ClientError) -> Observed {
        match error {
            // Over gRPC a delta may have another base, and the client asks again.
            ClientError::Undecodable { message, .. } if self.spec.protocol != Protocol::Grpc => {
                Observed::Undecodable(message.clone())
            }
            error => Observed::Failed(format!("{:?}: {error}", error.code())),
        }
    }

    fn failed<T>(&self, result: Result<T, ClientError>) -> Result<T, ClientError> {
        if let Err(error) = &result {
            self.recorder.note(self.failure(error));
        }
        result
    }

    fn note(&self, event: &WatchEvent) {
        if let Some(given) = event.resume_version.as_deref().and_then(version) {
            self.recorder.give(Some(given));
        }
        match &event.kind {
            WatchEventKind::SnapshotEnd => {
                let place = event.resume_version.as_deref().and_then(version);
                self.recorder.note(Observed::Complete(place));
            }
            WatchEventKind::BatchEnd => self.recorder.note(Observed::Batch),
            WatchEventKind::Disconnected(error) => self.recorder.note(self.failure(error)),
            WatchEventKind::Unreadable(message) => panic!("an event cannot be read: {message}"),
            _ => {}
        }
    }
}

impl ListerWatcher for ObservedSource {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        Box::pin(async move {
            self.world.controls[self.spec.number].stay_away().await;
            let page = self.failed(self.source.list(options).await)?;
            if page.continue_token.is_empty() {
                // It is applied a little later, after it was decoded.
                self.recorder.give(None);
                self.recorder.note(Observed::Complete(version(&page.resource_version)));
            }
            Ok(page)
        })
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        Box::pin(async move {
            self.world.controls[self.spec.number].stay_away().await;
            let from = version(&options.resource_version).filter(|_| !options.send_initial_events);
            let events = self.failed(self.source.watch(options).await)?;
            if let Some(from) = from.filter(|_| self.spec.protocol != Protocol::Grpc) {
                self.recorder.note(Observed::Resumed(from));
            }
            let source = self.clone();
            let observed = stream::unfold((events, source), |(mut events, source)| async move {
                let control = &source.world.controls[source.spec.number];
                control.pause().await;
                let event = source.failed(events.next().await?);
                if let Ok(event) = &event {
                    source.note(event);
                }
                Some((event, (events, source)))
            });
            Ok(observed.boxed())
        })
    }

    fn supports_watch_list(&self) -> bool {
        !self.spec.lists
    }

    fn describe(&self) -> String {
        self.source.describe()
    }
}
