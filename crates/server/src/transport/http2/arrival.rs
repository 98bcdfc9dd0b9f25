//! The arrival of a gRPC call's request: until then the call holds a place among the pending ones,
//! and has a limited time.
//!
//! The hazard is a client that opens calls and sends nothing. Each costs memory before any other
//! limit counts it, and would hold up a drain.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
};

use kubefan_admission::{FairPermit, FairPool, Holder};
use kubefan_cache::Refusal;
use prometheus::IntGauge;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::{grpc::status, transport::limits::REQUEST_TIMEOUT};

/// The places of calls whose request has not arrived yet.
pub struct PendingCalls {
    places: Arc<FairPool>,
    gauge: IntGauge,
}

/// A place of a pending call.
struct PendingPlace {
    _place: FairPermit,
    gauge: IntGauge,
}

impl PendingCalls {
    /// `calls_max` places; `gauge` shows how many are taken.
    pub fn new(calls_max: usize, gauge: IntGauge) -> Self {
        Self { places: FairPool::new(calls_max), gauge }
    }
}

impl Drop for PendingPlace {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

/// A call whose request has not arrived yet, or has since.
#[derive(Clone)]
pub struct Arrival {
    place: Arc<Mutex<Option<PendingPlace>>>,
    has_arrived: CancellationToken,
    deadline_at: Instant,
}

impl Arrival {
    /// Takes a place among the pending calls.
    ///
    /// # Errors
    /// The status of the call if there is none.
    pub fn new(pending: &PendingCalls, holder: Holder) -> Result<Self, Status> {
        let place = pending.places.try_take(Some(holder));
        let place = place.ok_or_else(|| status::too_many_pending(pending.places.places_max()))?;
        pending.gauge.inc();
        let place = PendingPlace { _place: place, gauge: pending.gauge.clone() };
        let deadline_at = Instant::now() + REQUEST_TIMEOUT;
        Ok(Self { place: Arc::new(Mutex::new(Some(place))), has_arrived: CancellationToken::new(), deadline_at })
    }

    /// The request has arrived: gives the place back.
    pub fn arrived(&self) {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.has_arrived.cancel();
    }

    /// Waits until the call must end because its request has not arrived, and returns its status.
    /// Never ends otherwise, unless the call `ends_with_drain`, although its request has arrived.
    pub fn failed(
        &self,
        drain: CancellationToken,
        ends_with_drain: bool,
    ) -> impl Future<Output = Status> + Send + use<> {
        let has_arrived = self.has_arrived.clone();
        let deadline_at = self.deadline_at;
        async move {
            tokio::select! {
                biased;
                () = has_arrived.cancelled() => {}
                () = drain.cancelled() => return status::refused(&Refusal::Draining),
                () = sleep_until(deadline_at) => return status::request_timeout(REQUEST_TIMEOUT),
            }
            if !ends_with_drain {
                return std::future::pending().await;
            }
            drain.cancelled().await;
            status::refused(&Refusal::Draining)
        }
    }
}
