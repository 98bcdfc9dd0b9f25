//! The share of a client in the requests that all clients of a kubefan together may start at the
//! apiserver while the kubefan is away.
//!
//! A kubefan tells its clients `Kubefan-Fallback: clients=3000, rate=50`, a Dictionary (RFC 9651):
//! `clients` is the number of clients that share the budget, and `rate` the number of requests per
//! second that all of them may start. Other members and parameters are ignored. A text without
//! both, or with a wrong value, is ignored as a whole.

use std::time::Duration;

/// The longest time between two starts of one client.
const WINDOW_MAX: Duration = Duration::from_secs(600);

/// The requests that clients may start at the apiserver.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FallbackBudget {
    /// Clients that share the rate.
    pub clients: u32,
    /// Starts per second of all clients together.
    pub starts_per_second: f64,
}

impl Default for FallbackBudget {
    fn default() -> Self {
        Self { clients: 500, starts_per_second: 50.0 }
    }
}

impl FallbackBudget {
    /// Reads the text of a kubefan. `None` if it is not complete or has a wrong value.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut clients = None;
        let mut rate = None;
        for member in text.split(',') {
            let member = member.split(';').next().unwrap_or_default();
            match member.trim().split_once('=') {
                Some(("clients", value)) => clients = value.parse::<u32>().ok(),
                Some(("rate", value)) => rate = decimal(value),
                _ => {}
            }
        }
        let clients = clients.filter(|clients| *clients > 0)?;
        let starts_per_second = rate.filter(|rate| *rate > 0.0)?;
        Some(Self { clients, starts_per_second })
    }

    /// Returns a budget of at least as many clients as `configured`, and of at most its rate.
    pub(super) fn bounded_by(self, configured: Self) -> Self {
        Self {
            clients: self.clients.max(configured.clients),
            starts_per_second: self.starts_per_second.min(configured.starts_per_second),
        }
    }

    /// Returns this budget with at least half the clients of the `last` one: a kubefan that has
    /// just started does not know all of them yet. Too many only make each slower.
    pub(super) fn after(self, last: Self) -> Self {
        Self { clients: self.clients.max(last.clients / 2), ..self }
    }

    /// The time in which each client may start one request.
    pub(super) fn window(self) -> Duration {
        let window = Duration::try_from_secs_f64(f64::from(self.clients) / self.starts_per_second);
        window.unwrap_or(WINDOW_MAX).min(WINDOW_MAX)
    }
}

/// Reads digits and a point only: the standard library also reads `inf` and `1e9`.
fn decimal(text: &str) -> Option<f64> {
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if is_decimal { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_both_members_is_a_budget() {
        for (text, expected) in [
            ("clients=3000, rate=50", Some((3000, 50.0))),
            ("rate=0.5,clients=2;a=1, other=7", Some((2, 0.5))),
            ("clients=3000", None),
            ("clients=0, rate=5", None),
            ("clients=5, rate=0", None),
            ("clients=5, rate=inf", None),
            ("clients=5, rate=1e9", None),
            ("clients=-5, rate=1", None),
            ("", None),
        ] {
            let found = FallbackBudget::parse(text).map(|budget| (budget.clients, budget.starts_per_second));
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn a_kubefan_can_only_slow_the_configured_pace() {
        let budget = |clients, starts_per_second| FallbackBudget { clients, starts_per_second };
        let configured = budget(500, 50.0);
        assert_eq!(budget(3000, 20.0).bounded_by(configured), budget(3000, 20.0));
        assert_eq!(budget(1, 1e6).bounded_by(configured), configured);
    }

    #[test]
    fn a_kubefan_that_has_just_started_is_not_believed_at_once() {
        let told = FallbackBudget { clients: 1, starts_per_second: 50.0 };
        let mut budget = FallbackBudget { clients: 3000, starts_per_second: 50.0 };
        let mut windows = Vec::new();
        for _ in 0..4 {
            budget = told.after(budget);
            windows.push(budget.window().as_secs());
        }
        assert_eq!(windows, [30, 15, 7, 3]);
    }

    #[test]
    fn a_window_is_at_most_ten_minutes() {
        let window = |clients, starts_per_second| FallbackBudget { clients, starts_per_second }.window().as_secs();
        assert_eq!((window(3000, 50.0), window(u32::MAX, 0.001), window(1, 1e-300)), (60, 600, 600));
    }
}
