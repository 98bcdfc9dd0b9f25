//! The section "Traces".

use std::path::PathBuf;

use super::{
    ConfigError,
    rules::{any, optional, unusable},
    section::{SecondVariable, display_choice, section},
};
use crate::telemetry::traces::{Protocol, TraceSettings};

display_choice!(Protocol);

/// The variable of OpenTelemetry for `--otlp-endpoint`, which its operator sets in pods.
pub(super) const ENDPOINT_VARIABLE: SecondVariable =
    SecondVariable { field: "otlp_endpoint", first: "KUBEFAN_OTLP_ENDPOINT", second: "OTEL_EXPORTER_OTLP_ENDPOINT" };

section! {
    heading: "Traces";
    /// Where traces are sent, as given.
    options: TraceOptions;
    /// Where traces are sent.
    config: TraceConfig {
        /// `None` without tracing.
        settings: Option<TraceSettings>, settings;
    }

    /// Send a trace of each request to this collector, by OTLP: a URL such as
    /// http://collector:4317. OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER
    /// count as for other programs [default: $OTEL_EXPORTER_OTLP_ENDPOINT, or no traces]
    otlp_endpoint("URL"): String;
    /// How traces are sent.
    otlp_protocol("PROTOCOL"): Protocol = Protocol::Grpc => protocol: Protocol, any;
    /// Send the headers in this file with them, one a line as in `authorization: Bearer TOKEN`.
    otlp_headers_file("FILE"): PathBuf;
    /// The part of traces that begin at kubefan, from 0 to 1; a caller's decision about its own
    /// trace comes first [default: $OTEL_TRACES_SAMPLER, or all]
    otlp_sampling_ratio("RATIO"): f64 => sampling_ratio: Option<f64>, optional(ratio);
}

fn ratio(flag: &'static str, given: f64) -> Result<f64, ConfigError> {
    match given {
        0.0..=1.0 => Ok(given),
        _ => Err(unusable(flag, given, "must be from 0 to 1")),
    }
}

fn settings(options: &TraceOptions) -> Result<Option<TraceSettings>, ConfigError> {
    Ok(options.otlp_endpoint.clone().map(|endpoint| TraceSettings {
        endpoint,
        protocol: options.otlp_protocol.unwrap_or(Protocol::Grpc),
        headers_file: options.otlp_headers_file.clone(),
        sampling_ratio: options.otlp_sampling_ratio,
    }))
}

impl TraceOptions {
    /// Refuses what has no effect without a collector.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let given = [
            ("--otlp-protocol", self.otlp_protocol.is_some()),
            ("--otlp-headers-file", self.otlp_headers_file.is_some()),
            ("--otlp-sampling-ratio", self.otlp_sampling_ratio.is_some()),
        ];
        match given.iter().find(|(_, given)| *given && self.otlp_endpoint.is_none()) {
            Some((flag, _)) => ConfigError::contradiction(format!(
                "{flag} has no effect without --otlp-endpoint; give both or neither"
            )),
            None => Ok(()),
        }
    }
}
