//! The bounds of the budget that the kubefan above tells: the starts at the apiserver that all of
//! its clients share. [`FallbackBudget`] reads it, as for each client.

use kubefan_client::FallbackBudget;

/// Returns a budget of at least as many clients as `configured`, and of at most its rate.
pub(super) fn bounded_by(told: FallbackBudget, configured: FallbackBudget) -> FallbackBudget {
    FallbackBudget {
        clients: told.clients.max(configured.clients),
        starts_per_second: told.starts_per_second.min(configured.starts_per_second),
    }
}

/// Returns this budget with at least half the clients of the `last` one: a kubefan that has just
/// started does not know all of them yet. Too many only make each slower.
pub(super) fn after(told: FallbackBudget, last: FallbackBudget) -> FallbackBudget {
    FallbackBudget { clients: told.clients.max(last.clients / 2), ..told }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubefan_can_only_slow_the_configured_pace() {
        let budget = |clients, starts_per_second| FallbackBudget { clients, starts_per_second };
        let configured = budget(500, 50.0);
        assert_eq!(bounded_by(budget(3000, 20.0), configured), budget(3000, 20.0));
        assert_eq!(bounded_by(budget(1, 1e6), configured), configured);
    }

    #[test]
    fn a_kubefan_that_has_just_started_is_not_believed_at_once() {
        let told = FallbackBudget { clients: 1, starts_per_second: 50.0 };
        let mut budget = FallbackBudget { clients: 3000, starts_per_second: 50.0 };
        let mut windows = Vec::new();
        for _ in 0..4 {
            budget = after(told, budget);
            windows.push(budget.window().as_secs());
        }
        assert_eq!(windows, [30, 15, 7, 3]);
    }
}
