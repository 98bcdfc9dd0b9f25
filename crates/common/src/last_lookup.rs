//! The addresses that the last look-up of a name found, for a time without a DNS server: that of a
//! cluster may have been on the same node as the replica that is gone.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::timeout;

/// The longest wait for a look-up if addresses of an earlier one are known. A resolver waits for
/// a server that is gone for 5 s, which is longer than a connection may take.
const LOOKUP_MAX: Duration = Duration::from_secs(1);

/// The addresses of the names that one client looks up. These are of its settings, so there are
/// few.
#[derive(Debug, Default)]
pub struct LastLookups(Mutex<HashMap<String, Vec<SocketAddr>>>);

impl LastLookups {
    /// Waits for the look-up of a name. If it fails or takes longer than a second, the result is
    /// that of an earlier one.
    ///
    /// # Errors
    /// The look-up has failed, and so have all before it.
    pub async fn or_last(
        &self,
        name: &str,
        looked_up: impl Future<Output = io::Result<Vec<SocketAddr>>>,
    ) -> io::Result<Vec<SocketAddr>> {
        let last = self.last().get(name).cloned();
        let addresses = match last {
            None => looked_up.await?,
            Some(last) => match timeout(LOOKUP_MAX, looked_up).await {
                Ok(Ok(addresses)) if !addresses.is_empty() => addresses,
                _ => return Ok(last),
            },
        };
        if !addresses.is_empty() {
            self.last().insert(name.to_owned(), addresses.clone());
        }
        Ok(addresses)
    }

    fn last(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<SocketAddr>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const FOUND: [SocketAddr; 1] = [SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 6443)];

    #[tokio::test(start_paused = true)]
    async fn without_a_resolver_the_addresses_of_the_last_lookup_are_used() {
        let lookups = LastLookups::default();
        let failed = || ready(Err(io::Error::from(io::ErrorKind::NotFound)));
        lookups.or_last("a", failed()).await.unwrap_err();
        assert_eq!(lookups.or_last("a", ready(Ok(Vec::new()))).await.unwrap(), []);
        assert_eq!(lookups.or_last("a", ready(Ok(FOUND.to_vec()))).await.unwrap(), FOUND);
        assert_eq!(lookups.or_last("a", failed()).await.unwrap(), FOUND);
        assert_eq!(lookups.or_last("a", ready(Ok(Vec::new()))).await.unwrap(), FOUND);
        assert_eq!(lookups.or_last("a", pending()).await.unwrap(), FOUND);
        lookups.or_last("b", failed()).await.unwrap_err();
    }
}
