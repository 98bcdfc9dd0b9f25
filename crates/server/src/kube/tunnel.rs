//! A connection after an upgrade (status 101): bytes are copied both ways until both sides have
//! ended.
//!
//! The connection's own task does that, so the connection limit and the drain still apply.

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;

/// The work of an HTTP/1.1 connection after an upgrade. Requests on connections that can be
/// upgraded carry it in their extensions, and so do forwarded responses that upgrade one.
#[derive(Clone, Default)]
pub struct Tunnel(Arc<Mutex<Option<BoxFuture<'static, ()>>>>);

impl Tunnel {
    /// Copies bytes between both sides once both have switched. `guards` is dropped at the end.
    pub fn connect(&self, caller: OnUpgrade, upstream: OnUpgrade, guards: impl Send + 'static) {
        let copying = Box::pin(async move {
            let _guards = guards;
            match tokio::try_join!(caller, upstream) {
                Ok((caller, upstream)) => {
                    // An error is a usual end.
                    let copied = copy_bidirectional(&mut TokioIo::new(caller), &mut TokioIo::new(upstream)).await;
                    tracing::debug!(?copied, "a tunnel has ended");
                }
                Err(error) => tracing::debug!(%error, "an upgrade failed"),
            }
        });
        self.set(copying);
    }

    /// Sets the work of the connection after the upgrade.
    pub fn set(&self, next: BoxFuture<'static, ()>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
    }

    /// Ends the work of the connection after the upgrade when `end` completes.
    pub fn end_when(&self, end: impl Future<Output = ()> + Send + 'static) {
        let Some(next) = self.take() else { return };
        self.set(Box::pin(async move {
            tokio::select! {
                () = next => {}
                () = end => {}
            }
        }));
    }

    /// Takes the work of the connection after the upgrade, if it was upgraded.
    pub fn take(&self) -> Option<BoxFuture<'static, ()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
