//! The section "Traces".

use std::path::PathBuf;

use clap::ValueEnum;
use kubefan_telemetry::traces::{Protocol, TraceSettings};

use super::{
    ConfigError,
    rules::{any, optional, unusable},
    section::{SecondVariable, section},
};

/// The endpoint's variable of OpenTelemetry, which its operator sets in pods.
pub(super) const ENDPOINT: SecondVariable = SecondVariable {
    field: "otlp_endpoint",
    first: "KUBEFAN_OTLP_ENDPOINT",
    second: "OTEL_EXPORTER_OTLP_ENDPOINT",
    is_foreign: true,
};

/// The protocol's variable of OpenTelemetry. The setting has no flag, and the variable counts more
/// than its key in the file.
pub const PROTOCOL_VARIABLE: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";

section! {
    heading: "Traces";
    /// The options for sending traces, as given.
    options: TraceOptions;
    /// The settings for sending traces.
    config: TraceConfig {
        /// `None` without tracing.
        settings: Option<TraceSettings>, settings;
    }

    /// Send a trace of each request to this collector, by OTLP: a URL such as
    /// http://collector:4317. OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER
    /// count as for other programs [default: $OTEL_EXPORTER_OTLP_ENDPOINT, or no traces]
    otlp_endpoint("URL"): String;

    [keys]
    /// Protocol in which traces are sent; $OTEL_EXPORTER_OTLP_PROTOCOL counts too. Set it to what
    /// the collector takes.
    tuning.otlp_protocol("grpc or http/protobuf"): Protocol = Protocol::Grpc => protocol: Protocol, any;
    /// Send the headers in this file with them, one a line as in `authorization: Bearer TOKEN`. Set
    /// it if the collector wants a token.
    tuning.otlp_headers_file("FILE"): PathBuf;
    /// The part of traces that begin at kubefan, from 0 to 1; a caller's decision about its own
    /// trace comes first. Lower it if traces cost too much.
    /// [default: $OTEL_TRACES_SAMPLER, or all]
    tuning.otlp_sampling_ratio("RATIO"): f64 => sampling_ratio: Option<f64>, optional(ratio);
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
        is_foreign: false,
        protocol: options.otlp_protocol.unwrap_or(Protocol::Grpc),
        headers_file: options.otlp_headers_file.clone(),
        sampling_ratio: options.otlp_sampling_ratio,
    }))
}

impl TraceOptions {
    /// Takes over the value of [`PROTOCOL_VARIABLE`], if it names a protocol that kubefan has: a
    /// variable that is set for all programs cannot keep it from starting.
    pub fn read_protocol(&mut self, variable: Option<&str>) {
        let known = variable.and_then(|value| Protocol::from_str(value, false).ok());
        self.otlp_protocol = known.or(self.otlp_protocol);
    }
}

impl TraceConfig {
    /// Says which environment variable the endpoint is of, if any. One that is set for all programs
    /// cannot keep kubefan from starting.
    pub fn is_of_variable(&mut self, variable: Option<&str>) {
        if let Some(settings) = &mut self.settings {
            settings.is_foreign = variable == Some(ENDPOINT.second);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_of_the_variable_counts_if_kubefan_has_it() {
        for (variable, protocol) in [
            (Some("grpc"), Some(Protocol::Grpc)),
            (Some("http/protobuf"), Some(Protocol::HttpProtobuf)),
            (Some("http/json"), None),
            (None, None),
        ] {
            let mut options = TraceOptions::default();
            options.read_protocol(variable);
            assert_eq!(options.otlp_protocol, protocol, "{variable:?}");
        }
    }

    #[test]
    fn an_endpoint_is_foreign_only_if_its_variable_is() {
        let options = TraceOptions { otlp_endpoint: Some("http://collector:4317".to_owned()), ..Default::default() };
        let mut config = options.resolve().unwrap();
        for (variable, is_foreign) in
            [(Some("OTEL_EXPORTER_OTLP_ENDPOINT"), true), (Some("KUBEFAN_OTLP_ENDPOINT"), false), (None, false)]
        {
            config.is_of_variable(variable);
            assert_eq!(config.settings.as_ref().unwrap().is_foreign, is_foreign, "{variable:?}");
        }
    }
}
