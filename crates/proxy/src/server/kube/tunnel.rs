//! A connection that has become something else: after a 101 both sides are read and written as they come, until both have ended.
//!
//! It is still served by the connection's own task, so that what limits connections and ends them at a drain holds here too.

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;

/// What an HTTP/1.1 connection does once it no longer speaks HTTP. Requests carry it where their connection can become something else.
#[derive(Clone, Default)]
pub struct Tunnel(Arc<Mutex<Option<BoxFuture<'static, ()>>>>);

impl Tunnel {
    /// Copies bytes between the two, as soon as both have switched; `held` is dropped when that ends.
    pub fn between(&self, caller: OnUpgrade, upstream: OnUpgrade, held: impl Send + 'static) {
        let copying = Box::pin(async move {
            let _held = held;
            match tokio::try_join!(caller, upstream) {
                Ok((caller, upstream)) => {
                    // A side that breaks off is how many of them end.
                    let copied = copy_bidirectional(&mut TokioIo::new(caller), &mut TokioIo::new(upstream)).await;
                    tracing::debug!(?copied, "a tunnel has ended");
                }
                Err(error) => tracing::debug!(%error, "a tunnel did not come about"),
            }
        });
        self.becomes(copying);
    }

    /// Does `next`, once HTTP is over.
    pub fn becomes(&self, next: BoxFuture<'static, ()>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
    }

    /// What is to be done, if anything.
    pub fn take(&self) -> Option<BoxFuture<'static, ()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
