//! The bytes of a view's log, and the tenant that they count to.
//!
//! A log counts to the tenant with the fewest bytes of those that read it. If it counted to the one
//! that came first, that one could fill the budget with other logs, and all readers of this log
//! would lose history with it. Thousands of tenants may read one log, and they come and go inside
//! the hub's critical section. So only a log that is to be shortened is compared with all of them.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::cache::{
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
    /// A copy of its key, so that it is found without a look at the memory of others.
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

    /// The bytes of all logs of the tenant that this log counts to.
    pub fn of_tenant(&self) -> usize {
        self.share.tenant_bytes()
    }

    fn find(&self, tenant: Tenant) -> Result<usize, usize> {
        self.readers.binary_search_by_key(&tenant, |reader| reader.tenant)
    }

    /// Adds a subscription of a tenant. The log counts to it, if it has fewer bytes than the one
    /// that the log counts to.
    pub fn join(&mut self, bytes: &Arc<TenantBytes>) {
        let tenant = bytes.tenant();
        match self.find(tenant) {
            Ok(at) => self.readers[at].subscriptions += 1,
            Err(at) => {
                // They are compared without this log, which the other one has.
                let has_fewer = bytes.get() + self.share.bytes() < self.share.tenant_bytes();
                if self.readers.is_empty() || has_fewer {
                    self.share.count_to(Some(bytes.clone()));
                }
                self.readers.insert(at, Reader { tenant, bytes: bytes.clone(), subscriptions: 1 });
            }
        }
    }

    /// Removes a subscription of a tenant. If the log counts to it and it has no other, it counts
    /// to any that is left, until it is [counted again](Self::recount).
    pub fn leave(&mut self, tenant: Tenant) {
        let Ok(at) = self.find(tenant) else { return };
        self.readers[at].subscriptions -= 1;
        if self.readers[at].subscriptions == 0 {
            self.readers.remove(at);
            if self.share.counts_to(tenant) {
                self.share.count_to(self.readers.first().map(|reader| reader.bytes.clone()));
            }
        }
    }

    /// Counts the log to the tenant that now has the fewest bytes, of those that read it.
    pub fn recount(&mut self) {
        // They are compared without this log, which one of them has.
        self.share.count_to(None);
        let least = self.readers.iter().map(|reader| &reader.bytes).min_by_key(|bytes| bytes.get());
        self.share.count_to(least.cloned());
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::cache::budget::Budget;

    #[test]
    fn a_log_counts_to_the_tenant_with_the_fewest_bytes_of_those_that_read_it() {
        let budget = Budget::alone(1000);
        let [one, two] = [1, 2].map(NonZeroU64::new);
        let (first, second) = (budget.tenant(one), budget.tenant(two));
        let mut log = LogBytes::new(budget.share());
        log.add(100);
        log.join(&first);
        log.join(&first);
        assert_eq!((first.get(), log.of_tenant()), (100, 100));
        log.join(&second);
        assert_eq!((first.get(), second.get()), (100, 0), "both have nothing else");
        let mut other = LogBytes::new(budget.share());
        other.join(&first);
        other.add(500);
        log.recount();
        assert_eq!((first.get(), second.get()), (500, 100));
        log.add(50);
        log.leave(two);
        assert_eq!((first.get(), second.get()), (650, 0), "no other tenant reads it");
        log.leave(one);
        assert_eq!(first.get(), 650, "it has a second subscription");
        log.leave(one);
        assert_eq!((first.get(), log.of_tenant(), budget.used()), (500, 0, 650));
        drop((log, other));
        assert_eq!((first.get(), budget.used()), (0, 0));
    }
}
