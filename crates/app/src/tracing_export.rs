//! The traces and their export, by the configuration.

use kubefan_telemetry::{
    metrics::Metrics,
    traces::{Exporter, TraceError, Traces},
};
use tracing::warn;

use crate::config::ServeConfig;

/// kubefan's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The traces of one kubefan; the default is none.
#[derive(Default)]
pub(super) struct ExportedTraces {
    pub(super) traces: Traces,
    /// Sends them.
    pub(super) exporter: Option<Exporter>,
}

impl ExportedTraces {
    /// Starts the export. An address from a variable that is set for all programs cannot keep
    /// kubefan from starting.
    ///
    /// # Errors
    /// The mistake in the settings.
    pub(super) fn build(config: &ServeConfig, metrics: &Metrics) -> Result<Self, TraceError> {
        let Some(settings) = &config.traces.settings else { return Ok(Self::default()) };
        match Traces::start(settings, VERSION, metrics.traces().clone()) {
            Ok((traces, exporter)) => Ok(Self { traces, exporter: Some(exporter) }),
            Err(error @ TraceError::Endpoint { .. }) if settings.is_foreign => {
                warn!(%error, "no traces: this address of OTEL_EXPORTER_OTLP_ENDPOINT cannot be used");
                Ok(Self::default())
            }
            Err(error) => Err(error),
        }
    }
}
