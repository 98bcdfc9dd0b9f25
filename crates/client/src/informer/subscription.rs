//! The calls of an informer's handler as a stream.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt, Stream};
use tokio::sync::mpsc;

use super::{
    error::InformerError,
    handler::EventHandler,
    registration::{HandlerOptions, Registration},
    shared_informer::SharedInformer,
};
use crate::{
    object::{Decode, Object},
    store::Deleted,
};

/// A call of a handler: see [`EventHandler`].
#[derive(Debug)]
pub enum HandlerCall<K> {
    /// An object is new.
    Added {
        /// The object.
        object: Arc<Object<K>>,
        /// Whether it existed when the subscription or the informer started.
        is_in_initial_list: bool,
    },
    /// An object changed.
    Updated {
        /// The previous state.
        old: Arc<Object<K>>,
        /// The new state. A resync delivers the same object twice.
        new: Arc<Object<K>>,
    },
    /// An object is gone.
    Deleted(Deleted<K>),
}

/// The calls of a handler, as a stream. It ends when the informer stops. Dropping it removes the
/// handler.
pub struct Subscription<K> {
    calls: mpsc::Receiver<HandlerCall<K>>,
    registration: Registration,
}

struct HandlerQueue<K>(mpsc::Sender<HandlerCall<K>>);

impl<K> HandlerQueue<K> {
    async fn send(&self, call: HandlerCall<K>) {
        // After the subscription was dropped, its handler is about to end.
        let _ = self.0.send(call).await;
    }
}

impl<K: Send + Sync + 'static> EventHandler<K> for HandlerQueue<K> {
    async fn on_add(&mut self, object: Arc<Object<K>>, is_in_initial_list: bool) {
        self.send(HandlerCall::Added { object, is_in_initial_list }).await;
    }

    async fn on_update(&mut self, old: Arc<Object<K>>, new: Arc<Object<K>>) {
        self.send(HandlerCall::Updated { old, new }).await;
    }

    async fn on_delete(&mut self, deleted: Deleted<K>) {
        self.send(HandlerCall::Deleted(deleted)).await;
    }
}

impl<K: Decode> SharedInformer<K> {
    /// Returns the changes as a stream: first the current objects, as additions of the initial
    /// list, then each change. A slow reader is a slow handler: see the backlog in `options`.
    ///
    /// # Errors
    /// As [`Self::add_event_handler`].
    pub fn subscribe(&self, options: HandlerOptions) -> Result<Subscription<K>, InformerError> {
        // The handler's backlog has the limit. This queue only hands calls over.
        let (sender, calls) = mpsc::channel(1);
        let registration = self.add_event_handler_with_options(HandlerQueue(sender), options)?;
        Ok(Subscription { calls, registration })
    }
}

impl<K> Subscription<K> {
    /// The handler behind the stream. It has synced when the last object of the initial list is the
    /// next item, or was returned.
    pub fn registration(&self) -> &Registration {
        &self.registration
    }
}

impl<K> Stream for Subscription<K> {
    type Item = HandlerCall<K>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<HandlerCall<K>>> {
        self.get_mut().calls.poll_recv(context)
    }
}

impl<K> Drop for Subscription<K> {
    fn drop(&mut self) {
        // The first poll asks for the removal. Its end is not waited for.
        let _ = self.registration.remove().now_or_never();
    }
}

impl<K> fmt::Debug for Subscription<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Subscription").field("registration", &self.registration).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures::StreamExt;

    use super::*;
    use crate::{FakeListWatch, HandlerEnd};

    fn text(call: Option<HandlerCall<u64>>) -> String {
        match call {
            Some(HandlerCall::Added { object, is_in_initial_list }) => {
                format!("add {} {is_in_initial_list}", object.key())
            }
            Some(HandlerCall::Updated { old, new }) => format!("update {} to {}", old.value(), new.value()),
            Some(HandlerCall::Deleted(deleted)) => format!("delete {}", deleted.key()),
            None => "end".to_owned(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_subscription_has_every_call_and_ends_with_the_informer() {
        let fake = FakeListWatch::new();
        fake.put("a/1", "1");
        let informer = SharedInformer::<u64>::new(fake.clone());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = informer.clone();
        tokio::spawn(async move { running.run(async move { drop(stopped.await) }).await });
        informer.synced().await.unwrap();
        let mut calls = informer.subscribe(HandlerOptions::default()).unwrap();
        fake.put("a/1", "2");
        fake.put("a/2", "3");
        fake.delete("a/1");
        for expected in ["add a/1 true", "update 1 to 2", "add a/2 false", "delete a/1"] {
            assert_eq!(text(calls.next().await), expected);
        }
        drop(stop);
        assert_eq!(text(calls.next().await), "end");
    }

    #[tokio::test(start_paused = true)]
    async fn dropping_a_subscription_removes_its_handler() {
        let informer = SharedInformer::<u64>::new(FakeListWatch::new());
        let running = informer.clone();
        tokio::spawn(async move { running.run(pending::<()>()).await });
        let calls = informer.subscribe(HandlerOptions::default()).unwrap();
        let registration = calls.registration().clone();
        drop(calls);
        assert_eq!(registration.ended().await, HandlerEnd::Removed);
    }
}
