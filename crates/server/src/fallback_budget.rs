//! The budget of clients that turn to the apiserver while kubefan is away.
//!
//! The hazard is a fleet that loses kubefan and lists everything at the apiserver at once. Clients
//! do not know of each other. So kubefan tells them with each answer how many they are, and how
//! many requests all of them together may start per second.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use http::{HeaderMap, HeaderName, HeaderValue};

/// Tells the budget: a Dictionary (RFC 9651). Over gRPC it is initial metadata of this name.
pub const KUBEFAN_FALLBACK: HeaderName = HeaderName::from_static("kubefan-fallback");

/// Returns the number of this replica's clients.
pub type OwnClients = Arc<dyn Fn() -> usize + Send + Sync>;

/// The budget of all clients.
pub struct FallbackBudget {
    own_clients: OwnClients,
    /// Clients of the other replicas, as far as they are known.
    other_clients: AtomicU64,
    /// Requests that all clients together may start per second. `None` if their number is not
    /// known, so that nothing is told.
    starts_per_second: Option<u32>,
}

impl FallbackBudget {
    /// Returns the budget of the clients of this replica, and of no other one yet.
    pub fn new(own_clients: OwnClients, starts_per_second: Option<u32>) -> Self {
        Self { own_clients, other_clients: AtomicU64::new(0), starts_per_second }
    }

    /// Sets the number of the other replicas' clients.
    pub fn set_other_clients(&self, clients: u64) {
        self.other_clients.store(clients, Ordering::Relaxed);
    }

    /// Sets [`KUBEFAN_FALLBACK`]. The client that gets it is one of the clients.
    pub fn put(&self, headers: &mut HeaderMap) {
        let Some(rate) = self.starts_per_second else { return };
        let own = (self.own_clients)() as u64;
        let clients = own.saturating_add(self.other_clients.load(Ordering::Relaxed)).max(1);
        if let Ok(value) = HeaderValue::try_from(format!("clients={clients}, rate={rate}")) {
            headers.insert(KUBEFAN_FALLBACK, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_client_is_told_how_many_share_how_many_starts() {
        let own = Arc::new(AtomicUsize::new(0));
        let counted = own.clone();
        let budget = FallbackBudget::new(Arc::new(move || counted.load(Ordering::Relaxed)), Some(50));
        let told = || told(&budget).expect("a budget");
        assert_eq!(told(), "clients=1, rate=50", "the first client is not counted yet");
        own.store(20, Ordering::Relaxed);
        assert_eq!(told(), "clients=20, rate=50");
        budget.set_other_clients(2980);
        assert_eq!(told(), "clients=3000, rate=50");
        budget.set_other_clients(u64::MAX);
        assert_eq!(told(), format!("clients={}, rate=50", u64::MAX));
    }

    #[test]
    fn nothing_is_told_if_nobody_knows_all_clients() {
        assert_eq!(told(&FallbackBudget::new(Arc::new(|| 3), None)), None);
    }

    fn told(budget: &FallbackBudget) -> Option<HeaderValue> {
        let mut headers = HeaderMap::new();
        budget.put(&mut headers);
        headers.remove(KUBEFAN_FALLBACK)
    }
}
