//! A limited number of places, shared fairly among connections and peer addresses.
//!
//! The hazard is one client that takes every place, so that all others are refused. A small fixed
//! limit per client would refuse honest ones: a proxy may carry thousands of subscribers on a few
//! connections. So a holder may take as many places as it likes while there are plenty. The last
//! ones are refused to those that hold more than their share, first per connection, then per
//! address. What is left is for newcomers.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kubefan_common::planted::{self, Bug};

/// The last places, one in this many, are only for connections that hold less than their share.
const FOR_CONNECTIONS: usize = 8;
/// The very last places, one in this many, are only for addresses that hold less than their share.
const FOR_ADDRESSES: usize = 16;

/// Who holds a place: a connection, and the address at its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    connection: u64,
    address: Address,
}

/// `None` for a Unix socket.
type Address = Option<IpAddr>;

impl Holder {
    /// The connection with this number. IPv6 addresses count by their network of 64 bits, which one
    /// machine may have alone.
    pub fn new(connection: u64, address: Option<IpAddr>) -> Self {
        let network = |address: Ipv6Addr| Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX));
        let address = address.map(|address| match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(network(address)),
            v4 @ IpAddr::V4(_) => v4,
        });
        Self { connection, address }
    }

    /// The number of the connection.
    pub fn connection(&self) -> u64 {
        self.connection
    }

    /// The address, or the network that it belongs to.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }
}

/// The places, and who holds how many. Every count is above zero.
#[derive(Debug)]
pub struct Shares {
    places_max: usize,
    held: usize,
    connections: HashMap<u64, usize>,
    addresses: HashMap<Address, usize>,
}

impl Shares {
    /// `places_max` free places.
    pub fn new(places_max: usize) -> Self {
        Self { places_max, held: 0, connections: HashMap::new(), addresses: HashMap::new() }
    }

    /// The number of places.
    pub fn places_max(&self) -> usize {
        self.places_max
    }

    /// Changes the number of places. Those that are held stay held, even if they are more.
    pub fn set_places_max(&mut self, places_max: usize) {
        self.places_max = places_max;
    }

    /// The number of places that nothing holds.
    pub fn free(&self) -> usize {
        self.places_max.saturating_sub(self.held)
    }

    /// Whether an address may take a place.
    pub fn admits_address(&self, address: Option<IpAddr>) -> bool {
        let free = self.free();
        free > self.places_max / FOR_ADDRESSES || (free > 0 && self.is_below_share(&self.addresses, &address))
    }

    /// Whether a connection may take a place. `None` stands for kubefan itself, which has no share.
    pub fn admits(&self, holder: Option<Holder>) -> bool {
        let Some(Holder { connection, address }) = holder else { return self.free() > 0 };
        self.admits_address(address)
            && (self.free() > self.places_max / FOR_CONNECTIONS || self.is_below_share(&self.connections, &connection))
    }

    /// Whether `holder` has less than an equal part of all places, if one more came.
    fn is_below_share<K: Hash + Eq>(&self, holders: &HashMap<K, usize>, holder: &K) -> bool {
        let share = (self.places_max / (holders.len() + 1)).max(1);
        holders.get(holder).is_none_or(|held| *held < share)
    }

    /// Takes a place without a check.
    pub fn take(&mut self, holder: Option<Holder>) {
        self.held += 1;
        if let Some(Holder { connection, address }) = holder {
            *self.connections.entry(connection).or_default() += 1;
            *self.addresses.entry(address).or_default() += 1;
        }
    }

    /// Gives a place back.
    pub fn give_back(&mut self, holder: Option<Holder>) {
        // The number may have been lowered meanwhile.
        if self.held <= self.places_max || !planted::is(Bug::WithheldPermitsLost) {
            self.held = self.held.saturating_sub(1);
        }
        if let Some(Holder { connection, address }) = holder {
            count_down(&mut self.connections, connection);
            count_down(&mut self.addresses, address);
        }
    }
}

fn count_down<K: Hash + Eq>(counts: &mut HashMap<K, usize>, key: K) {
    if let Entry::Occupied(mut count) = counts.entry(key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

/// Places that are taken at once or not at all.
#[derive(Debug)]
pub struct FairPool(Mutex<Shares>);

/// A place in a pool, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    pool: Arc<FairPool>,
    holder: Option<Holder>,
}

impl FairPool {
    /// A pool of `places_max` places.
    pub fn new(places_max: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Shares::new(places_max))))
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of places.
    pub fn places_max(&self) -> usize {
        self.shares().places_max()
    }

    /// A place, if one is free and the holder may take it.
    pub fn try_take(self: &Arc<Self>, holder: Option<Holder>) -> Option<Place> {
        let mut shares = self.shares();
        if !shares.admits(holder) {
            return None;
        }
        shares.take(holder);
        drop(shares);
        Some(Place { pool: self.clone(), holder })
    }
}

impl Place {
    /// Who holds it; `None` for kubefan itself.
    pub fn holder(&self) -> Option<Holder> {
        self.holder
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pool.shares().give_back(self.holder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(connection: u64, last_byte: u8) -> Option<Holder> {
        Some(Holder::new(connection, Some(IpAddr::from([10, 0, 0, last_byte]))))
    }

    fn fill(pool: &Arc<FairPool>, holders: impl Iterator<Item = Option<Holder>>) -> Vec<Place> {
        holders.map_while(|holder| pool.try_take(holder)).collect()
    }

    #[test]
    fn one_connection_leaves_places_for_others() {
        let pool = FairPool::new(160);
        let mut greedy = fill(&pool, std::iter::repeat(holder(1, 1)));
        assert_eq!(greedy.len(), 140, "an eighth is left");
        let _others = fill(&pool, (2..).map(|connection| holder(connection, 1)));
        assert_eq!(pool.shares().free(), 10, "of which a sixteenth is for other addresses");
        assert!(pool.try_take(holder(200, 2)).is_some() && pool.try_take(None).is_some());
        greedy.truncate(100);
        assert!(pool.try_take(holder(1, 1)).is_some(), "there are plenty again");
        drop((greedy, _others));
        let shares = pool.shares();
        assert_eq!((shares.free(), shares.connections.len(), shares.addresses.len()), (160, 0, 0));
    }

    #[test]
    fn many_small_holders_take_every_place() {
        let pool = FairPool::new(160);
        let all = fill(&pool, (0..200).map(|number| holder(number, number as u8)));
        assert_eq!(all.len(), 160);
        assert!(pool.try_take(None).is_none());
    }

    #[test]
    fn a_few_places_are_not_divided() {
        let pool = FairPool::new(3);
        assert_eq!(fill(&pool, std::iter::repeat(holder(1, 1))).len(), 3);
    }

    #[test]
    fn addresses_of_one_network_are_one_holder() {
        let of = |text: &str| Holder::new(1, Some(text.parse().unwrap()));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
