//! Sizing of kubefan and the apiserver, by objects, events, subscribers and lists: the coefficients
//! of `kubefan estimate` and `kubefan check`, and the formulas over them.
//!
//! Each coefficient was measured; `source` names the page. docs/sizing.md states the same numbers,
//! as a test checks.

use std::time::Duration;

use serde::Serialize;

/// A number that was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Coefficient {
    pub(super) value: f64,
    /// The row of docs/sizing.md.
    pub(super) name: &'static str,
    /// The value and its unit, as docs/sizing.md writes them.
    pub(super) text: &'static str,
    /// The place of the measurement in docs/.
    pub(super) source: &'static str,
}

macro_rules! coefficients {
    ($($(#[$doc:meta])* $name:ident = $value:expr, $row:literal, $text:literal, $source:literal;)*) => {
        $($(#[$doc])* pub(super) const $name: Coefficient =
            Coefficient { value: $value, name: $row, text: $text, source: $source };)*

        /// All coefficients, in the order of docs/sizing.md.
        pub(super) const COEFFICIENTS: &[Coefficient] = &[$($name),*];
    };
}

coefficients! {
    /// Bytes.
    PROCESS_BYTES = 17e6, "the process, before it caches anything", "17 MB", "#checked";
    /// Bytes per byte of JSON.
    CACHE_PER_JSON = 1.28, "a cache with its history, per byte of JSON", "1.28", "benchmarks.md#memory";
    /// Bytes per byte of JSON.
    PACKED_CACHE_PER_JSON = 0.21, "… with `tuning.cacheCompression: zstd`", "0.21", "benchmarks.md#memory";
    /// Bytes per byte of JSON.
    RELIST_PER_JSON = 1.35, "the peak of a relist, per byte of JSON", "1.35", "benchmarks.md#memory";
    /// Bytes.
    CONNECTION_BYTES = 32.9e3, "a connection with TLS and one stream", "32.9 kB", "benchmarks.md#memory";
    /// Seconds.
    INGEST_SECONDS = 20e-6, "an event of the apiserver: parsed and applied", "20 µs", "benchmarks.md#micro-benchmarks";
    /// Seconds.
    WRITE_SECONDS = 24e-6, "a write to a subscriber, of which there are ten thousand", "24 µs", "scale.md#checked";
    /// Seconds per byte of the message.
    MESSAGE_SECONDS_PER_BYTE = 0.6e-9, "a message in a write, per byte", "0.6 ns", "scale.md#the-model";
    /// Bytes.
    METADATA_BYTES = 740.0, "a message of `METADATA`", "740 B", "scale.md#the-model";
    /// Bytes.
    DELTA_BYTES = 440.0, "a message of `ZSTD_DELTA`", "440 B", "scale.md#the-model";
    /// Seconds.
    APISERVER_DELIVERY_SECONDS = 35e-6, "a delivery by kube-apiserver", "35 µs", "benchmarks.md#beside-kube-apiserver";
    /// Seconds per byte of JSON.
    APISERVER_LIST_SECONDS_PER_BYTE = 21e-9, "a list by kube-apiserver, per byte of JSON", "21 ns", "benchmarks.md#beside-kube-apiserver";
}

/// Returns the memory of caches with this much JSON, in bytes.
pub(super) fn cache_bytes(json_bytes: f64, is_packed: bool) -> f64 {
    json_bytes * if is_packed { PACKED_CACHE_PER_JSON.value } else { CACHE_PER_JSON.value }
}

/// The load of subscribers: events per second to all of them together, and their mean size.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Deliveries {
    pub(super) per_second: f64,
    pub(super) message_bytes: f64,
}

impl Deliveries {
    /// The cores that they need at least, however many events gather for a write.
    pub(super) fn cores_min(self) -> f64 {
        self.per_second * self.message_bytes * MESSAGE_SECONDS_PER_BYTE.value
    }

    /// The cores that they need if every event is a write of its own. More have no effect.
    pub(super) fn cores_max(self) -> f64 {
        self.cores_min() + self.per_second * WRITE_SECONDS.value
    }

    pub(super) fn bytes_per_second(self) -> f64 {
        self.per_second * self.message_bytes
    }

    /// With this number of cores, the time between two waves to all subscribers: the longest that
    /// one waits. `None` if the cores are too few. `events_per_second` is the rate of one
    /// subscriber.
    pub(super) fn wave(self, cores: f64, events_per_second: f64) -> Option<Duration> {
        let least = self.cores_min();
        let writes = self.per_second * WRITE_SECONDS.value;
        if cores <= least || events_per_second <= 0.0 {
            return None;
        }
        let messages_per_write = (writes / (cores - least)).max(1.0);
        Duration::try_from_secs_f64(messages_per_write / events_per_second).ok()
    }

    /// The cores that kube-apiserver needs for them.
    pub(super) fn apiserver_cores(self) -> f64 {
        self.per_second * APISERVER_DELIVERY_SECONDS.value
    }
}

/// A size as people write it, in bytes.
pub(super) fn human_bytes(bytes: f64) -> String {
    scaled(bytes, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// A rate or a count as people write it: `0.3`, `12`, `5.0k`, `1.2M`.
pub(super) fn human_count(count: f64) -> String {
    match count {
        count if count < 1000.0 => rounded(count),
        count => scaled(count, &["", "k", "M", "G"]).replace(' ', ""),
    }
}

/// A number of cores, with more digits the less it is.
pub(super) fn human_cores(cores: f64) -> String {
    match cores {
        cores if cores < 0.001 => "< 0.001".to_owned(),
        cores if cores < 0.1 => format!("{cores:.3}"),
        cores if cores < 1.0 => format!("{cores:.2}"),
        cores => rounded(cores),
    }
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or_default();
    while value >= 999.5
        && let Some(next) = units.next()
    {
        value /= 1000.0;
        unit = next;
    }
    format!("{} {unit}", rounded(value))
}

fn rounded(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 9.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_states_the_same_coefficients() {
        let document = include_str!("../../docs/sizing.md");
        for Coefficient { name, text, source, .. } in COEFFICIENTS {
            let row = document.lines().find(|line| line.starts_with(&format!("| {name} |")));
            let row = row.unwrap_or_else(|| panic!("docs/sizing.md has no row {name:?}"));
            assert!(row.contains(&format!("| {text} |")) && row.contains(&format!("({source})")), "{row}");
        }
    }

    #[test]
    fn the_texts_of_the_coefficients_are_their_values() {
        let units = [(" MB", 1e6), (" kB", 1e3), (" B", 1.0), (" µs", 1e-6), (" ns", 1e-9), ("", 1.0)];
        for Coefficient { name, text, value, .. } in COEFFICIENTS {
            let parsed =
                units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
            let parsed = parsed.unwrap_or_else(|| panic!("{name}: {text}"));
            assert!((parsed - value).abs() <= value * 1e-9, "{name}: {text} is not {value}");
        }
    }

    #[test]
    fn the_model_is_that_of_the_page_about_scale() {
        // 25,000 agents, 200 changes per second, and the table of docs/scale.md.
        let json = Deliveries { per_second: 5e6, message_bytes: 6000.0 };
        assert!((17.0..19.0).contains(&json.cores_min()), "{}", json.cores_min());
        assert!((29e9..31e9).contains(&json.bytes_per_second()));
        assert!((150.0..190.0).contains(&json.apiserver_cores()));
        let wave = json.wave(32.0, 200.0).unwrap().as_millis();
        assert!((38..46).contains(&wave), "{wave} ms");
        assert_eq!(json.wave(17.0, 200.0), None, "too few cores");
        let all = json.wave(json.cores_max() * 2.0, 200.0).unwrap();
        assert_eq!(all.as_millis(), 5, "each change is a wave of its own");
    }

    #[test]
    fn numbers_are_written_with_two_digits() {
        let cases =
            [(0.0, "0 B"), (7.0, "7.0 B"), (740.0, "740 B"), (32.9e3, "33 kB"), (999.6e3, "1.0 MB"), (9e9, "9.0 GB")];
        for (bytes, text) in cases {
            assert_eq!(human_bytes(bytes), text);
        }
        for (count, text) in [(0.0, "0"), (0.34, "0.3"), (12.4, "12"), (5000.0, "5.0k"), (5e6, "5.0M")] {
            assert_eq!(human_count(count), text);
        }
        for (cores, text) in [(0.0, "< 0.001"), (0.0069, "0.007"), (0.25, "0.25"), (1.7, "1.7"), (123.4, "123")] {
            assert_eq!(human_cores(cores), text);
        }
    }
}
