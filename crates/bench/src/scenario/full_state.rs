//! The cost of sending all objects to clients, through watches or lists.

use std::io;

use tokio::time::Instant;

use crate::{
    counters::Counts,
    figures::{Figure, Figures},
    process::Meter,
};

/// The values at the start of the measurement.
pub(super) struct FullStateCost {
    resident_bytes: u64,
    has_peak: bool,
    cpu_nanos: u64,
    start: Instant,
}

impl FullStateCost {
    /// Starts the measurement. `resident_bytes` is the memory in use before the clients connected.
    pub(super) fn start(meter: &mut Meter, resident_bytes: u64) -> io::Result<Self> {
        let has_peak = meter.reset_peak().is_ok();
        Ok(Self { resident_bytes, has_peak, cpu_nanos: meter.cpu_nanos()?, start: Instant::now() })
    }

    /// The figures after all clients together have received `deliveries` objects. `counts`, which
    /// returns their bytes, is called after the clock has stopped.
    pub(super) fn finish(
        self,
        meter: &mut Meter,
        clients: usize,
        deliveries: usize,
        counts: impl FnOnce() -> Counts,
    ) -> io::Result<Figures> {
        let seconds = self.start.elapsed().as_secs_f64();
        let cpu = (meter.cpu_nanos()? - self.cpu_nanos) as f64;
        let deliveries = deliveries as f64;
        let mut figures = Figures::default();
        figures.set(Figure::CpuPerDelivery, cpu / 1e3 / deliveries);
        figures.set(Figure::CpuPerClient, cpu / 1e6 / clients as f64);
        figures.set(Figure::DeliveriesPerSecond, deliveries / seconds);
        let counts = counts();
        figures.set(Figure::BodyBytesPerDelivery, counts.body_bytes as f64 / deliveries);
        figures.set(Figure::BytesPerDelivery, counts.bytes as f64 / deliveries);
        figures.set(Figure::Seconds, seconds);
        if self.has_peak {
            figures.set(Figure::RssAddedPeak, meter.peak_bytes()?.saturating_sub(self.resident_bytes) as f64);
        }
        Ok(figures)
    }
}
