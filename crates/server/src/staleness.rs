//! The headers of answers from a state that the process before has saved, and that upstream has not
//! confirmed. Each answer has its age. client-go logs each warning, so a connection gets one.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use http::{HeaderMap, HeaderName, HeaderValue, header};
use kubefan_cache::warnings::Warnings;
use kubefan_fanout::SavedAge;

/// Marks answers from the cache (RFC 9211).
pub const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// Whether a connection has received the warning. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct StaleWarning(Arc<AtomicBool>);

impl StaleWarning {
    /// Returns true the first time.
    fn is_due(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}

/// The staleness of an answer. The default is a confirmed state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Staleness(Option<Unconfirmed>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unconfirmed {
    age: SavedAge,
    warns: bool,
}

impl Staleness {
    /// The staleness of an answer on the connection of `warning`, from a state of this age.
    pub fn of(unconfirmed: Option<SavedAge>, warning: &StaleWarning) -> Self {
        Self(unconfirmed.map(|age| Unconfirmed { age, warns: warning.is_due() }))
    }

    /// Puts the headers, which replace that of an answer from the cache.
    pub fn put(self, headers: &mut HeaderMap) {
        let Some(Unconfirmed { age, warns }) = self.0 else { return };
        let mut status = "kubefan; hit; detail=saved-state".to_owned();
        let mut old = "of unknown age".to_owned();
        if let SavedAge(Some(age)) = age {
            let seconds = age.as_secs();
            headers.insert(header::AGE, HeaderValue::from(seconds));
            status = format!("kubefan; hit; ttl=-{seconds}; detail=saved-state");
            old = format!("{seconds}s old");
        }
        // Cannot fail: there are no control characters.
        if let Ok(status) = HeaderValue::from_str(&status) {
            headers.insert(CACHE_STATUS, status);
        }
        if warns {
            let text = format!("kubefan serves a saved state, {old}, which the apiserver has not confirmed yet");
            Warnings::own(&text).put(headers);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn headers(staleness: Staleness) -> Vec<String> {
        let mut headers = HeaderMap::new();
        headers.insert(CACHE_STATUS, HeaderValue::from_static("kubefan; hit"));
        staleness.put(&mut headers);
        let line = |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        let mut lines: Vec<_> = headers.iter().map(line).collect();
        lines.sort();
        lines
    }

    #[test]
    fn each_answer_has_the_age_and_each_connection_one_warning() {
        let connection = StaleWarning::default();
        let of = |seconds: u64, connection: &StaleWarning| {
            headers(Staleness::of(Some(SavedAge(Some(Duration::from_secs(seconds)))), connection))
        };
        let warned = [
            "age: 75",
            "cache-status: kubefan; hit; ttl=-75; detail=saved-state",
            "warning: 299 kubefan \"kubefan serves a saved state, 75s old, which the apiserver has not confirmed yet\"",
        ];
        assert_eq!(of(75, &connection.clone()), warned);
        assert_eq!(of(76, &connection), ["age: 76", "cache-status: kubefan; hit; ttl=-76; detail=saved-state"]);
        assert_eq!(of(75, &StaleWarning::default()), warned, "another connection");
    }

    #[test]
    fn a_confirmed_state_has_no_age_and_an_unknown_age_is_not_zero() {
        let connection = StaleWarning::default();
        assert_eq!(headers(Staleness::of(None, &connection)), ["cache-status: kubefan; hit"]);
        let unknown = headers(Staleness::of(Some(SavedAge(None)), &connection));
        assert_eq!(unknown[0], "cache-status: kubefan; hit; detail=saved-state");
        assert!(unknown[1].contains("of unknown age"), "{unknown:?}");
    }
}
