//! Durations and sizes as Kubernetes writes them, in flags, the environment and the file.

use std::{fmt, str::FromStr, time};

use serde::{Deserialize, Deserializer, de};

/// A span of time such as `30s`, `1m30s` or `500ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Duration(pub time::Duration);

/// A number of bytes such as `64Mi`, `1Gi` or `65536`: a Kubernetes quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A text that is not a duration or a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUnit {
    /// Not a duration.
    #[error("{:?} is no duration; write it like 30s, 1m30s or 500ms{}", .0, hint(.0))]
    Duration(String),
    /// Not a size.
    #[error("{0:?} is no size; write it like 64Mi, 1Gi or 65536")]
    ByteSize(String),
}

/// The probable meaning of a wrong duration, as the end of a sentence.
fn hint(text: &str) -> String {
    let days = text.strip_suffix('d').and_then(|days| days.parse::<u32>().ok());
    match days {
        Some(days) => format!("; there is no unit for days: write {}h", u64::from(days) * 24),
        None if text.starts_with('-') => "; it cannot be negative".to_owned(),
        None => String::new(),
    }
}

impl Duration {
    /// A duration of whole seconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(time::Duration::from_secs(seconds))
    }
}

impl FromStr for Duration {
    type Err = InvalidUnit;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // jiff also takes ISO 8601 and words; Kubernetes does not.
        let go_like = text.chars().all(|c| c.is_ascii_digit() || "hmsuµn.".contains(c));
        let parsed = go_like.then(|| text.parse::<jiff::SignedDuration>().ok()).flatten();
        parsed
            .and_then(|duration| time::Duration::try_from(duration).ok())
            .map(Self)
            .ok_or_else(|| InvalidUnit::Duration(text.chars().take(64).collect()))
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let millis = self.0.subsec_millis();
        let parts = [(seconds / 3600, "h"), (seconds / 60 % 60, "m"), (seconds % 60, "s"), (u64::from(millis), "ms")];
        if parts.iter().all(|(count, _)| *count == 0) {
            return f.write_str("0s");
        }
        parts.iter().filter(|(count, _)| *count > 0).try_for_each(|(count, unit)| write!(f, "{count}{unit}"))
    }
}

const SUFFIXES: [(&str, u64); 9] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("", 1),
];

impl FromStr for ByteSize {
    type Err = InvalidUnit;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, suffix) = text.split_at(split);
        let unit = SUFFIXES.iter().find(|(name, _)| *name == suffix).map(|(_, unit)| *unit);
        let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        digits
            .then(|| number.parse::<u64>().ok()?.checked_mul(unit?))
            .flatten()
            .map(Self)
            .ok_or_else(|| InvalidUnit::ByteSize(text.chars().take(64).collect()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = SUFFIXES[..4].iter().rev().find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        match binary {
            Some((suffix, unit)) => write!(f, "{}{suffix}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // YAML reads plain bytes as a number; as a string they mean the same.
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_kubernetes_writes_them() {
        for text in ["30s", "1m30s", "500ms", "2h", "1h0m5s", "0s", "1h1m1s1ms"] {
            let duration: Duration = text.parse().unwrap();
            assert_eq!(duration.to_string().parse(), Ok(duration), "{text}");
        }
        assert_eq!("1.5s".parse(), Ok(Duration(time::Duration::from_millis(1500))));
        assert_eq!(Duration(time::Duration::from_secs(90)).to_string(), "1m30s");
        for text in ["", "30", "-1s", "1 minute", "PT30S", "s", "1d", "1x", "99999999999999999999h"] {
            assert_eq!(text.parse::<Duration>(), Err(InvalidUnit::Duration(text.to_owned())));
        }
    }

    #[test]
    fn a_wrong_duration_has_a_hint() {
        let error = |text: &str| text.parse::<Duration>().unwrap_err().to_string();
        let plain = "is no duration; write it like 30s, 1m30s or 500ms";
        assert_eq!(error("10d"), format!("\"10d\" {plain}; there is no unit for days: write 240h"));
        assert_eq!(error("-5m"), format!("\"-5m\" {plain}; it cannot be negative"));
        for text in ["10", "d", "99999999999d", "10x"] {
            assert_eq!(error(text), format!("{text:?} {plain}"));
        }
    }

    #[test]
    fn sizes_are_kubernetes_quantities() {
        for (text, bytes) in [("64Mi", 64 << 20), ("1Gi", 1 << 30), ("65536", 65_536), ("10k", 10_000), ("0", 0)] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        assert_eq!(ByteSize(64 << 20).to_string(), "64Mi");
        assert_eq!(ByteSize(1000).to_string(), "1000");
        for text in ["", "Mi", "64MB", "64 Mi", "-1", "1.5Gi", "64m", "99999999Ti"] {
            assert_eq!(text.parse::<ByteSize>(), Err(InvalidUnit::ByteSize(text.to_owned())));
        }
    }
}
