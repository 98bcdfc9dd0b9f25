//! A limited number of places, shared fairly among tenants, workloads or addresses, and
//! connections.
//!
//! The hazard is one client that takes every place, so that all others are refused. A small fixed
//! limit per client would refuse honest ones: a proxy may carry thousands of subscribers on a few
//! connections. So a holder may take any number of places while there are plenty. The last ones are
//! refused to those that hold more than an equal part of the rest: first per connection, then per
//! workload or address, then per tenant. So some places are left for newcomers. An operator who
//! knows the honest clients may set a limit for each identity beside it.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasher, RandomState},
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU64,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use kubefan_common::planted::{self, Bug};

/// The levels of a share, from the largest holder to the smallest.
pub(super) const LEVELS: usize = 3;
/// At each level, the last places, one in this many, are only for holders that hold less than an
/// equal part of those that are left.
const LAST_PARTS: [usize; LEVELS] = [32, 16, 8];

/// The holder of a place: a connection, the address at its other end, and, once they are known, its
/// user, the tenant that the user belongs to, and the workload that acts as that user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    connection: u64,
    /// `None` for a Unix socket.
    address: Option<IpAddr>,
    tenant: Option<NonZeroU64>,
    user: Option<NonZeroU64>,
    workload: Option<NonZeroU64>,
}

/// A holder at one level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LevelKey {
    /// kubefan itself, which has no share.
    Own,
    /// All tenants that are not known.
    UnknownTenant,
    /// A tenant.
    Tenant(NonZeroU64),
    /// A user, which has no share of its own but may have a limit.
    User(NonZeroU64),
    /// A workload of a user.
    Workload(NonZeroU64),
    /// An address, if the workload is not known; `None` for a Unix socket.
    Address(Option<IpAddr>),
    /// A connection.
    Connection(u64),
}

impl Holder {
    /// The connection with this number. IPv6 addresses count by their network of 64 bits, which one
    /// machine may have alone.
    pub fn new(connection: u64, address: Option<IpAddr>) -> Self {
        let network = |address: Ipv6Addr| Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX));
        let address = address.map(|address| match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(network(address)),
            v4 @ IpAddr::V4(_) => v4,
        });
        Self { connection, address, tenant: None, user: None, workload: None }
    }

    /// The same holder as a user, which is a tenant of its own. `workload` tells apart clients that
    /// act as one user, whatever their addresses: the pods of a DaemonSet have one service account,
    /// and may come through one gateway. Without it their addresses tell them apart.
    #[must_use]
    pub fn identified(self, user: &str, workload: Option<&str>) -> Self {
        let user = Some(key_of(user));
        Self { tenant: user, user, workload: workload.map(key_of), ..self }
    }

    /// Returns the same holder as one of several that share a tenant's part.
    #[must_use]
    pub fn of_tenant(self, tenant: &str) -> Self {
        Self { tenant: Some(key_of(tenant)), ..self }
    }

    /// The number of the connection.
    pub fn connection(&self) -> u64 {
        self.connection
    }

    /// The key of the tenant; `None` if it is not known.
    pub fn tenant(&self) -> Option<NonZeroU64> {
        self.tenant
    }
}

/// A short key of a name. Two names have the same only by chance; then they share a share.
fn key_of(name: &str) -> NonZeroU64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    NonZeroU64::new(KEYS.hash_one(name)).unwrap_or(NonZeroU64::MIN)
}

/// The keys of a holder at each level; `None` is kubefan itself.
pub(super) fn level_keys(holder: Option<Holder>) -> [LevelKey; LEVELS] {
    let Some(Holder { connection, address, tenant, workload, .. }) = holder else { return [LevelKey::Own; LEVELS] };
    [
        tenant.map_or(LevelKey::UnknownTenant, LevelKey::Tenant),
        workload.map_or(LevelKey::Address(address), LevelKey::Workload),
        LevelKey::Connection(connection),
    ]
}

/// Numbers of places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PermitLimits {
    /// All permits.
    pub all: usize,
    /// Permits that one identity may hold: a workload if it is known, otherwise a user, otherwise
    /// an address. `None`: no limit.
    pub per_identity: Option<usize>,
}

impl From<usize> for PermitLimits {
    fn from(all: usize) -> Self {
        Self { all, per_identity: None }
    }
}

/// The places, and the number that each holder has.
#[derive(Debug)]
pub struct Shares {
    places_max: usize,
    per_identity_max: Option<usize>,
    held: usize,
    /// The places of each holder, by level. Every count is above zero.
    levels: [HashMap<LevelKey, usize>; LEVELS],
    /// The places of each identity, which may be limited.
    identities: HashMap<LevelKey, usize>,
}

impl Shares {
    /// Returns a pool with this many free places.
    pub fn new(places_max: impl Into<PermitLimits>) -> Self {
        let PermitLimits { all, per_identity } = places_max.into();
        Self {
            places_max: all,
            per_identity_max: per_identity,
            held: 0,
            levels: Default::default(),
            identities: HashMap::new(),
        }
    }

    /// The number of places.
    pub fn places_max(&self) -> usize {
        self.places_max
    }

    /// Changes the number of places. Those that are held stay held, even if they are more.
    pub fn set_places_max(&mut self, places_max: usize) {
        self.places_max = places_max;
    }

    /// Changes both numbers. Places that are held stay held, even if they are more.
    fn set(&mut self, PermitLimits { all, per_identity }: PermitLimits) {
        self.places_max = all;
        self.per_identity_max = per_identity;
    }

    /// The number of places that nothing holds.
    pub fn free(&self) -> usize {
        self.places_max.saturating_sub(self.held)
    }

    /// Whether a connection may take this many places. `None` stands for kubefan itself, which has
    /// no share.
    pub fn admits(&self, holder: Option<Holder>, count: usize) -> bool {
        level_keys(holder).into_iter().enumerate().all(|(level, key)| self.admits_at(level, key, count))
            && self.identity_has_room(holder, count)
    }

    /// Whether the identity of a holder may hold this many places more.
    fn identity_has_room(&self, holder: Option<Holder>, count: usize) -> bool {
        let held = |key| self.identities.get(&key).copied().unwrap_or(0);
        self.per_identity_max.zip(identity(holder)).is_none_or(|(most, key)| held(key) + count <= most)
    }

    /// Whether a holder may take this many places, as far as one level decides that. The last of
    /// them decides: each leaves less for the next.
    pub(super) fn admits_at(&self, level: usize, key: LevelKey, count: usize) -> bool {
        let before = count.saturating_sub(1);
        let Some(free) = self.free().checked_sub(before).filter(|free| *free > 0) else { return false };
        if free > self.places_max / LAST_PARTS[level] || !has_share(key) {
            return true;
        }
        // Less than an equal part of the places that are left. A part of all places would be too
        // much: two holders of a half each would leave nothing.
        let held = self.levels[level].get(&key).copied().unwrap_or(0);
        let holders = self.levels[level].len() + usize::from(held == 0);
        held + before < (free / holders).max(1)
    }

    /// Takes places without a check.
    pub fn take(&mut self, holder: Option<Holder>, count: usize) {
        self.held += count;
        for (counts, key) in self.levels.iter_mut().zip(level_keys(holder)) {
            if has_share(key) {
                *counts.entry(key).or_default() += count;
            }
        }
        if let Some(key) = identity(holder) {
            *self.identities.entry(key).or_default() += count;
        }
    }

    /// Gives places back.
    pub fn give_back(&mut self, holder: Option<Holder>, count: usize) {
        // The number may have been lowered meanwhile.
        if self.held <= self.places_max || !planted::is(Bug::WithheldPermitsLost) {
            self.held = self.held.saturating_sub(count);
        }
        for (counts, key) in self.levels.iter_mut().zip(level_keys(holder)) {
            count_down(counts, key, count);
        }
        if let Some(key) = identity(holder) {
            count_down(&mut self.identities, key, count);
        }
    }
}

/// Returns the identity whose limit counts a holder: its workload, or else its user, or else its
/// address. `None` for kubefan itself, and for a Unix socket, where nothing tells the clients
/// apart.
fn identity(holder: Option<Holder>) -> Option<LevelKey> {
    let Holder { address, user, workload, .. } = holder?;
    let known = workload.map(LevelKey::Workload).or(user.map(LevelKey::User));
    known.or(address.map(|address| LevelKey::Address(Some(address))))
}

fn has_share(key: LevelKey) -> bool {
    !matches!(key, LevelKey::Own | LevelKey::UnknownTenant)
}

fn count_down(counts: &mut HashMap<LevelKey, usize>, key: LevelKey, count: usize) {
    if let Entry::Occupied(mut held) = counts.entry(key) {
        *held.get_mut() -= count;
        if *held.get() == 0 {
            held.remove();
        }
    }
}

/// Places that are taken at once or not at all.
#[derive(Debug)]
pub struct FairPool(Mutex<Shares>);

/// One place in a pool, or several, given back when it is dropped.
#[derive(Debug)]
pub struct FairPermit {
    pool: Arc<FairPool>,
    holder: Option<Holder>,
    count: usize,
}

impl FairPool {
    /// Returns a pool of this many places.
    pub fn new(places_max: impl Into<PermitLimits>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Shares::new(places_max))))
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the number of places. Those that are held stay held, even if they are more.
    pub fn set(&self, places_max: PermitLimits) {
        self.shares().set(places_max);
    }

    /// The number of places.
    pub fn places_max(&self) -> usize {
        self.shares().places_max()
    }

    /// Whether places are so scarce that shares decide about them.
    pub fn is_scarce(&self) -> bool {
        let shares = self.shares();
        LAST_PARTS.iter().any(|part| shares.free() <= shares.places_max / part)
    }

    /// The places that one identity may hold, if this holder's identity holds them all.
    pub fn identity_max(&self, holder: Option<Holder>) -> Option<usize> {
        let shares = self.shares();
        shares.per_identity_max.filter(|_| !shares.identity_has_room(holder, 1))
    }

    /// A place, if one is free and the holder may take it.
    pub fn try_take(self: &Arc<Self>, holder: Option<Holder>) -> Option<FairPermit> {
        self.try_take_many(holder, 1)
    }

    /// Takes this many places, if the holder may take them all.
    pub fn try_take_many(self: &Arc<Self>, holder: Option<Holder>, count: usize) -> Option<FairPermit> {
        let mut shares = self.shares();
        if !shares.admits(holder, count) {
            return None;
        }
        shares.take(holder, count);
        drop(shares);
        Some(FairPermit { pool: self.clone(), holder, count })
    }
}

impl FairPermit {
    /// The holder; `None` for kubefan itself.
    pub fn holder(&self) -> Option<Holder> {
        self.holder
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        self.pool.shares().give_back(self.holder, self.count);
    }
}

#[cfg(test)]
mod tests;
