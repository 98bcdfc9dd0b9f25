//! The demo's output if stdout is not a terminal: one line per second.

use std::io::{self, Write};

use super::{Activity, Meter, Phase, Route, Sample, text};

/// Writes the plain lines.
pub struct Plain<W> {
    out: W,
    /// The route announced last.
    route: Option<Route>,
    hints: Vec<String>,
}

impl<W: Write> Plain<W> {
    /// Writes to `out`. The hints are printed once kubefan serves.
    pub fn new(out: W, hints: Vec<String>) -> Self {
        Self { out, route: None, hints }
    }

    /// Announces a new route, and writes the current state if there is a new sample.
    ///
    /// # Errors
    /// The I/O error of the output.
    pub fn show(&mut self, meter: &Meter, sampled: bool) -> io::Result<()> {
        let Phase { route, activity, elapsed } = meter.phase();
        let subscribers = text::count(meter.options().subscribers as u64);
        if activity != Activity::Filling && self.route != Some(route) {
            self.route = Some(route);
            match route {
                Route::Direct => writeln!(self.out, "direct: {subscribers} subscribers watch the apiserver itself")?,
                Route::Kubefan => {
                    writeln!(
                        self.out,
                        "through kubefan: the same {subscribers} subscribers watch kubefan; try from another terminal:"
                    )?;
                    for hint in &self.hints {
                        writeln!(self.out, "  {hint}")?;
                    }
                }
            }
        }
        if sampled {
            let seconds = elapsed.as_secs();
            match activity {
                Activity::Filling => writeln!(self.out, "creating the objects")?,
                Activity::Settling => writeln!(self.out, "{seconds:>3}s {}: changes have stopped", route.as_str())?,
                Activity::Connecting => {
                    let ready = text::count(meter.ready() as u64);
                    writeln!(
                        self.out,
                        "{seconds:>3}s {}: {ready} of {subscribers} have their initial state",
                        route.as_str()
                    )?;
                }
                Activity::Churning => {
                    if let Some(sample) = meter.sample_of(route) {
                        writeln!(self.out, "{seconds:>3}s {}: {}", route.as_str(), line(sample))?;
                    }
                }
            }
        }
        self.out.flush()
    }
}

fn line(sample: &Sample) -> String {
    let rate = |rate: f64| text::count(rate.round() as u64);
    let lag = sample
        .lag
        .map_or_else(String::new, |lag| format!(", lag p50 {} p99 {}", text::span(lag.p50), text::span(lag.p99)));
    let memory =
        sample.resident_bytes.map_or_else(String::new, |bytes| format!(", memory {}", text::bytes(bytes as f64)));
    format!(
        "watches {}, changes/s {}, apiserver sends/s {} events {}, deliveries/s {}{lag}{memory}",
        text::count(sample.pod_watches),
        rate(sample.changes),
        rate(sample.events),
        text::bytes(sample.bytes),
        rate(sample.deliveries),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Quantiles;

    #[test]
    fn a_line_names_every_number() {
        let lag = Quantiles { p50: Duration::from_micros(1_200), p99: Duration::from_millis(9) };
        let sample = Sample {
            pod_watches: 1,
            changes: 199.6,
            events: 200.2,
            bytes: 1_048_576.0,
            deliveries: 7_214.0,
            lag: Some(lag),
            resident_bytes: Some(300 << 20),
        };
        let expected = "watches 1, changes/s 200, apiserver sends/s 200 events 1.0 MiB, deliveries/s 7,214, lag p50 1.2 ms \
                        p99 9.0 ms, memory 300.0 MiB";
        assert_eq!(line(&sample), expected);
        assert!(line(&Sample { lag: None, resident_bytes: None, ..sample }).ends_with("deliveries/s 7,214"));
    }
}
