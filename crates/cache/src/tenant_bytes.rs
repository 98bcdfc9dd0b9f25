//! The bytes that each tenant has in a budget, in all caches together.
//!
//! One tenant could fill a budget, and all others would lose their bytes in it. So if a budget is
//! exceeded, only the tenants with the most bytes must release some. Their bytes are counted in all
//! caches together: counted for each cache, a tenant with many bytes in one would seem small in the
//! next.

use std::{
    collections::HashMap,
    num::NonZeroU64,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The key of a tenant, which is a user or all service accounts of a namespace. `None` if callers
/// are not distinguished, and for kubefan itself.
pub type Tenant = Option<NonZeroU64>;

/// While fewer tenants are known, unused entries are not removed.
const SWEPT_LEAST: usize = 64;

/// The tenants that have bytes.
#[derive(Debug, Default)]
pub(super) struct Tenants(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    tenants: HashMap<Tenant, Weak<TenantBytes>>,
    /// The number of tenants at which those that are gone are removed.
    swept_at: usize,
}

/// The bytes of one tenant.
#[derive(Debug)]
pub struct TenantBytes {
    tenant: Tenant,
    bytes: AtomicUsize,
}

impl Tenants {
    /// Returns the count of a tenant. Each tenant has one.
    pub(super) fn of(&self, tenant: Tenant) -> Arc<TenantBytes> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = known.tenants.get(&tenant).and_then(Weak::upgrade) {
            return bytes;
        }
        // Not for each tenant that is added: thousands may come at once.
        if known.tenants.len() >= known.swept_at.max(SWEPT_LEAST) {
            known.tenants.retain(|_, bytes| bytes.strong_count() > 0);
            known.swept_at = 2 * known.tenants.len();
        }
        let added = Arc::new(TenantBytes { tenant, bytes: AtomicUsize::new(0) });
        known.tenants.insert(tenant, Arc::downgrade(&added));
        added
    }

    /// Returns the most bytes that each tenant may have so that all together have at most
    /// `bytes_max`. `None` if callers are not distinguished.
    pub(super) fn each_max(&self, bytes_max: usize) -> Option<usize> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.tenants.keys().all(Option::is_none) {
            return None;
        }
        let held = known.tenants.values().filter_map(Weak::upgrade).map(|bytes| bytes.get());
        Some(fair_limit(held.collect(), bytes_max))
    }
}

impl TenantBytes {
    /// The key of the tenant.
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// The number of bytes.
    pub fn get(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn subtract(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Returns the limit for each that leaves all together at most `bytes_max` (max-min fairness): a
/// tenant with less keeps all its bytes. `usize::MAX` if all of them fit.
fn fair_limit(mut held: Vec<usize>, bytes_max: usize) -> usize {
    held.sort_unstable();
    let mut left = bytes_max;
    for (before, bytes) in held.iter().enumerate() {
        let part = left / (held.len() - before);
        if *bytes > part {
            return part;
        }
        left -= bytes;
    }
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_tenants_make_room_and_the_others_keep_their_bytes() {
        assert_eq!(fair_limit(vec![10, 1000], 500), 490);
        assert_eq!(fair_limit(vec![1000, 300, 10, 300], 500), 163);
        assert_eq!(fair_limit(vec![300, 300], 500), 250);
        assert_eq!(fair_limit(vec![490, 10], 500), usize::MAX);
        assert_eq!(fair_limit(vec![], 0), usize::MAX);
    }

    #[test]
    fn a_tenant_has_one_count_and_those_that_are_gone_have_none() {
        let tenants = Tenants::default();
        let one = NonZeroU64::new(1);
        let other = NonZeroU64::new(2);
        let unknown = tenants.of(None);
        unknown.add(70);
        assert_eq!(tenants.each_max(50), None, "callers are not distinguished");
        let first = tenants.of(one);
        first.add(20);
        assert!(Arc::ptr_eq(&first, &tenants.of(one)));
        assert_eq!((first.tenant(), tenants.each_max(50)), (one, Some(30)));
        drop(first);
        let third = tenants.of(other);
        third.add(40);
        third.subtract(30);
        assert_eq!(tenants.each_max(50), Some(40));
        for key in 3..1000 {
            drop(tenants.of(NonZeroU64::new(key)));
        }
        let known = tenants.0.lock().unwrap().tenants.len();
        assert!(known <= SWEPT_LEAST, "{known} tenants are remembered, of which two are left");
    }
}
