//! The budget of requests that clients may start at the apiserver while kubefan is gone.
//!
//! Clients do not know of each other. So kubefan names their budget in its answers, as the
//! header `Kubefan-Fallback` and the gRPC metadata `kubefan-fallback`: `clients=3000, rate=50`. It
//! is a Dictionary (RFC 9651).

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The name of the header and of the metadata.
pub(crate) const HEADER: &str = "kubefan-fallback";

/// A client must not wait for ever, whatever the numbers are.
const WINDOW_MAX: Duration = Duration::from_secs(10 * 60);

/// A smaller number of clients counts after only smaller ones were named for this long: a kubefan
/// that has just started does not know all of its clients yet.
const CLIENTS_KEPT: Duration = Duration::from_secs(10 * 60);

/// Limits the requests that clients start at the apiserver while kubefan is gone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FallbackBudget {
    /// Number of programs that share the budget, such as the nodes of a DaemonSet. Default: 100.
    pub clients: u32,
    /// Requests that all of them together start at the apiserver in a second. Default: 10.
    pub starts_per_second: f64,
}

impl Default for FallbackBudget {
    fn default() -> Self {
        Self { clients: 100, starts_per_second: 10.0 }
    }
}

impl FallbackBudget {
    /// Returns the time in which each program may start one request: clients / rate, and at most
    /// ten minutes.
    pub fn window(self) -> Duration {
        let seconds = f64::from(self.clients.max(1)) / self.starts_per_second;
        if seconds.is_nan() || seconds < 0.0 || seconds > WINDOW_MAX.as_secs_f64() {
            return WINDOW_MAX;
        }
        Duration::from_secs_f64(seconds)
    }

    /// Reads the value of a header: `clients=N, rate=R`. Returns `None` if a member is missing or
    /// wrong. Other members, and parameters, are ignored.
    pub fn parse(value: &str) -> Option<Self> {
        let mut clients = None;
        let mut rate = None;
        for member in value.split(',') {
            let member = member.split(';').next().unwrap_or_default();
            let Some((name, value)) = member.trim().split_once('=') else { continue };
            // Digits and a point only: a float may also be "inf" or "1e9".
            let is_decimal = value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
            match name {
                "clients" => clients = value.parse::<u32>().ok().filter(|clients| is_decimal && *clients > 0),
                "rate" => rate = value.parse::<f64>().ok().filter(|rate| is_decimal && *rate > 0.0),
                _ => {}
            }
        }
        Some(Self { clients: clients?, starts_per_second: rate? })
    }
}

/// The budget that a server named last. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct NamedBudget(Arc<Mutex<Option<Named>>>);

#[derive(Debug, Clone, Copy)]
struct Named {
    budget: FallbackBudget,
    /// The time since which only smaller numbers of clients were named.
    smaller_since: Option<Instant>,
}

impl NamedBudget {
    /// Notes the value in an answer of kubefan. One that cannot be read says nothing.
    pub(crate) fn note(&self, value: &str) {
        let Some(budget) = FallbackBudget::parse(value) else { return };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let larger = known.filter(|known| budget.clients < known.budget.clients);
        let since = larger.map(|known| known.smaller_since.unwrap_or(now));
        *known = Some(match (larger, since) {
            (Some(larger), Some(since)) if now < since + CLIENTS_KEPT => {
                let clients = larger.budget.clients;
                Named { budget: FallbackBudget { clients, ..budget }, smaller_since: Some(since) }
            }
            _ => Named { budget, smaller_since: None },
        });
    }

    /// The last one; `None` if the server has named none.
    pub(crate) fn last(&self) -> Option<FallbackBudget> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|named| named.budget)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[test]
    fn a_budget_is_read_as_a_dictionary_and_ignored_as_a_whole_if_a_member_is_wrong() {
        let named = |clients, starts_per_second| Some(FallbackBudget { clients, starts_per_second });
        for (value, expected) in [
            ("clients=3000, rate=50", named(3000, 50.0)),
            ("rate=0.5,clients=1", named(1, 0.5)),
            (" clients=2;x=y , other, rate=1.5;z", named(2, 1.5)),
            ("clients=2, rate=1, clients=3", named(3, 1.0)),
            ("rate=0.5,clients=2;a=1, other=7", named(2, 0.5)),
            ("clients=3000", None),
            ("rate=50", None),
            ("clients=0, rate=50", None),
            ("clients=-1, rate=50", None),
            ("clients=1, rate=0", None),
            ("clients=5, rate=0", None),
            ("clients=1, rate=inf", None),
            ("clients=1, rate=1e9", None),
            ("clients=1.5, rate=1", None),
            ("clients=1, rate=1, rate=x", None),
            ("", None),
        ] {
            assert_eq!(FallbackBudget::parse(value), expected, "{value:?}");
        }
    }

    #[test]
    fn a_window_has_at_most_ten_minutes() {
        let window = |clients, starts_per_second| FallbackBudget { clients, starts_per_second }.window();
        assert_eq!(window(3000, 50.0), Duration::from_secs(60));
        assert_eq!(window(100, 0.1), Duration::from_secs(600));
        assert_eq!(window(u32::MAX, 0.001), Duration::from_secs(600));
        assert_eq!(window(1, 1e-300), Duration::from_secs(600));
        for rate in [0.0, -1.0, f64::NAN] {
            assert_eq!(window(1, rate), Duration::from_secs(600), "{rate}");
        }
        assert_eq!(FallbackBudget::default().window(), Duration::from_secs(10));
    }

    #[test]
    fn a_value_that_cannot_be_read_leaves_the_last_budget() {
        let named = NamedBudget::default();
        assert_eq!(named.last(), None);
        named.note("clients=2, rate=1");
        named.note("clients=2");
        assert_eq!(named.last(), Some(FallbackBudget { clients: 2, starts_per_second: 1.0 }));
    }

    #[tokio::test(start_paused = true)]
    async fn a_kubefan_that_has_just_started_does_not_shrink_the_fleet() {
        let named = NamedBudget::default();
        let last = || named.last().map(|budget| (budget.clients, budget.starts_per_second));
        named.note("clients=3000, rate=50");
        advance(10 * CLIENTS_KEPT).await;
        named.note("clients=7, rate=20");
        assert_eq!(last(), Some((3000, 20.0)), "a watch may last long");
        advance(CLIENTS_KEPT / 2).await;
        named.note("clients=3500, rate=20");
        named.note("clients=7, rate=20");
        advance(CLIENTS_KEPT - Duration::from_secs(1)).await;
        named.note("clients=8, rate=20");
        assert_eq!(last(), Some((3500, 20.0)));
        advance(Duration::from_secs(1)).await;
        named.note("clients=7, rate=20");
        assert_eq!(last(), Some((7, 20.0)));
    }
}
