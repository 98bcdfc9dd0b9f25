//! The bytes of a view's log, and the tenant that they are charged to.
//!
//! A log is charged to the tenant with the fewest bytes of those that read it. If it were charged
//! to its first reader, that tenant could fill the budget with other logs, and all readers of this
//! log would lose history with it. Thousands of tenants may read one log, and they come and go
//! inside the hub's critical section. So all readers are compared only when a log may have to be
//! shortened.

use std::sync::Arc;

use smallvec::SmallVec;

use kubefan_cache::{
    budget::Share,
    tenant_bytes::{Tenant, TenantBytes},
};

/// The bytes of one log.
#[derive(Debug)]
pub struct LogBytes {
    share: Share,
    /// The tenants that read the log, in the order of their keys.
    readers: SmallVec<[Reader; 1]>,
}

/// A tenant that reads a log.
#[derive(Debug)]
struct Reader {
    /// A copy of the key in `bytes`, so that a search reads no other memory.
    tenant: Tenant,
    bytes: Arc<TenantBytes>,
    subscriptions: usize,
}

impl LogBytes {
    /// Counts the bytes with `share`. Nothing reads the log yet.
    pub(super) fn new(share: Share) -> Self {
        Self { share, readers: SmallVec::new() }
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.share.add(bytes);
    }

    pub(super) fn subtract(&mut self, bytes: usize) {
        self.share.subtract(bytes);
    }

    /// The bytes of all logs of the tenant that this log is charged to.
    pub fn tenant_bytes(&self) -> usize {
        self.share.tenant_bytes()
    }

    /// Returns where the tenant is among the readers, or where it is to be inserted.
    fn find(&self, tenant: Tenant) -> Result<usize, usize> {
        self.readers.binary_search_by_key(&tenant, |reader| reader.tenant)
    }

    /// Adds a subscription of a tenant. Charges the log to this tenant if it has fewer bytes of
    /// other logs than the tenant before.
    pub fn join(&mut self, bytes: &Arc<TenantBytes>) {
        let tenant = bytes.tenant();
        match self.find(tenant) {
            Ok(at) => self.readers[at].subscriptions += 1,
            Err(at) => {
                // The bytes of the tenant before include this log.
                let has_fewer = bytes.get() + self.share.bytes() < self.share.tenant_bytes();
                if self.readers.is_empty() || has_fewer {
                    self.share.charge_to(Some(bytes.clone()));
                }
                self.readers.insert(at, Reader { tenant, bytes: bytes.clone(), subscriptions: 1 });
            }
        }
    }

    /// Removes a subscription of a tenant. If it was the last one of the tenant that the log is
    /// charged to, any other reader is charged, until [`Self::charge_to_smallest`].
    pub fn leave(&mut self, tenant: Tenant) {
        let Ok(at) = self.find(tenant) else { return };
        self.readers[at].subscriptions -= 1;
        if self.readers[at].subscriptions == 0 {
            self.readers.remove(at);
            if self.share.is_charged_to(tenant) {
                self.share.charge_to(self.readers.first().map(|reader| reader.bytes.clone()));
            }
        }
    }

    /// Charges the log to the tenant that now has the fewest bytes of other logs, of its readers.
    pub fn charge_to_smallest(&mut self) {
        // First to none, so that all are compared without this log.
        self.share.charge_to(None);
        let least = self.readers.iter().map(|reader| &reader.bytes).min_by_key(|bytes| bytes.get());
        self.share.charge_to(least.cloned());
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use kubefan_cache::budget::Budget;

    use super::*;

    #[test]
    fn a_log_is_charged_to_the_tenant_with_the_fewest_bytes_of_those_that_read_it() {
        let budget = Budget::alone(1000);
        let [one, two] = [1, 2].map(NonZeroU64::new);
        let first = budget.bytes_of(one);
        let second = budget.bytes_of(two);
        let mut log = LogBytes::new(budget.share());
        log.add(100);
        log.join(&first);
        log.join(&first);
        assert_eq!((first.get(), log.tenant_bytes()), (100, 100));
        log.join(&second);
        assert_eq!((first.get(), second.get()), (100, 0), "both have nothing else");
        let mut other = LogBytes::new(budget.share());
        other.join(&first);
        other.add(500);
        log.charge_to_smallest();
        assert_eq!((first.get(), second.get()), (500, 100));
        log.add(50);
        log.leave(two);
        assert_eq!((first.get(), second.get()), (650, 0), "no other tenant reads it");
        log.leave(one);
        assert_eq!(first.get(), 650, "it has a second subscription");
        log.leave(one);
        assert_eq!((first.get(), log.tenant_bytes(), budget.used()), (500, 0, 650));
        drop(log);
        drop(other);
        assert_eq!((first.get(), budget.used()), (0, 0));
    }
}
