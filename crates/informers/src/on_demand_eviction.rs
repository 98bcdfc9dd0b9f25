//! The choice of the on-demand cache that makes room for another, as a pure function.
//!
//! The hazard is a reader that takes every place, so that the resources of all others are read
//! upstream. Any reader may take a free place. If none is free, a tenant may take an idle place of
//! a tenant that holds at least as many as itself. If there is none, it takes one from the tenant
//! that holds the most, unless it would hold more than that one afterwards.

use std::{collections::HashMap, sync::Arc};

use tokio::time::Instant;

use kubefan_model::{GroupVersionResource, Scope};

/// A resource in one scope, in all encodings: the unit of `limits.onDemandResourcesMax`.
pub(super) type ScopedResource = (GroupVersionResource, Scope);

/// A place that readers have taken.
#[derive(Debug, Clone)]
pub(super) struct OnDemandPlace {
    /// Time of its last read, if that is long enough ago to give the place away. Otherwise `None`.
    pub(super) idle_since: Option<Instant>,
    /// The number of its watches.
    pub(super) subscribers: usize,
    /// The tenant that took it; `None` if callers are not distinguished.
    pub(super) tenant: Option<Arc<str>>,
    /// Time at which the tenant took it.
    pub(super) at: Instant,
}

impl OnDemandPlace {
    /// Adds another encoding of the same place.
    pub(super) fn add(&mut self, other: &OnDemandPlace) {
        // A place is as idle as the encoding that was read last.
        self.idle_since = self.idle_since.zip(other.idle_since).map(|(one, other)| one.max(other));
        self.subscribers += other.subscribers;
        if other.at < self.at {
            self.tenant = other.tenant.clone();
            self.at = other.at;
        }
    }
}

/// The room for another cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Room {
    /// A place is free.
    Free,
    /// The resource that has been without readers for the longest time.
    Idle(ScopedResource),
    /// A resource of a tenant that has one too many.
    OfLargest(ScopedResource),
}

/// Finds room for a cache of `tenant` beside the places of other caches; `None` if all are in use.
pub(super) fn find(
    taken: &HashMap<ScopedResource, OnDemandPlace>,
    places_max: usize,
    tenant: Option<&str>,
) -> Option<Room> {
    if taken.len() < places_max {
        return Some(Room::Free);
    }
    let mut held = HashMap::<&str, usize>::new();
    for tenant in taken.values().filter_map(|taken| taken.tenant.as_deref()) {
        *held.entry(tenant).or_default() += 1;
    }
    let held_by = |tenant: &str| held.get(tenant).copied().unwrap_or(0);
    let own = tenant.map_or(0, held_by);
    let may_take = |taken: &OnDemandPlace| taken.tenant.as_deref().is_none_or(|tenant| held_by(tenant) >= own);
    let idle = taken.iter().filter(|(_, taken)| may_take(taken));
    let idle = idle.filter_map(|(place, taken)| Some((taken.idle_since?, place)));
    if let Some((_, place)) = idle.min_by_key(|(idle_since, _)| *idle_since) {
        return Some(Room::Idle(place.clone()));
    }
    // Only a tenant can hold fewer than another.
    tenant?;
    let (largest, most) = held.into_iter().max_by_key(|(name, count)| (*count, *name))?;
    if most < own + 2 {
        return None;
    }
    // The place with the fewest watches.
    let places = taken.iter().filter(|(_, taken)| taken.tenant.as_deref() == Some(largest));
    let place = places.min_by_key(|(place, taken)| (taken.subscribers, place.0.to_string(), place.1.namespace()));
    place.map(|(place, _)| Room::OfLargest(place.clone()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn place(name: &str) -> ScopedResource {
        (GroupVersionResource::new("", "v1", name), Scope::Cluster)
    }

    fn in_use(places: &[(&str, &str, usize)]) -> HashMap<ScopedResource, OnDemandPlace> {
        let at = Instant::now();
        let taken = |tenant: &str, subscribers| OnDemandPlace {
            idle_since: None,
            subscribers,
            tenant: Some(tenant.into()),
            at,
        };
        places.iter().map(|(name, tenant, subscribers)| (place(name), taken(tenant, *subscribers))).collect()
    }

    #[test]
    fn the_tenant_with_the_most_places_makes_room() {
        let taken = in_use(&[("a", "greedy", 1), ("b", "greedy", 9), ("c", "greedy", 1), ("d", "honest", 0)]);
        assert_eq!(find(&taken, 5, Some("new")), Some(Room::Free));
        assert_eq!(find(&taken, 4, Some("new")), Some(Room::OfLargest(place("a"))));
        assert_eq!(find(&taken, 4, Some("honest")), Some(Room::OfLargest(place("a"))));
        assert_eq!(find(&taken, 4, Some("greedy")), None);
        assert_eq!(find(&taken, 4, None), None);
        let even = in_use(&[("a", "one", 1), ("b", "two", 1)]);
        assert_eq!(find(&even, 2, Some("three")), None, "nobody holds more than it would");
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_is_of_the_tenant_that_started_its_first_encoding() {
        let encoding = |tenant: &str, idle_since| OnDemandPlace {
            idle_since,
            subscribers: 2,
            tenant: Some(tenant.into()),
            at: Instant::now(),
        };
        let first = encoding("first", None);
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = encoding("second", Some(Instant::now()));
        for (one, other) in [(&first, &second), (&second, &first)] {
            let mut taken = one.clone();
            taken.add(other);
            assert_eq!((taken.tenant.as_deref(), taken.subscribers, taken.idle_since), (Some("first"), 4, None));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_place_is_taken_first_but_not_by_a_tenant_that_holds_more() {
        let mut taken = in_use(&[("a", "greedy", 1), ("b", "greedy", 1), ("c", "honest", 1)]);
        taken.get_mut(&place("c")).unwrap().idle_since = Some(Instant::now());
        assert_eq!(find(&taken, 3, Some("honest")), Some(Room::Idle(place("c"))), "its own");
        assert_eq!(find(&taken, 3, Some("new")), Some(Room::Idle(place("c"))));
        assert_eq!(find(&taken, 3, None), Some(Room::Idle(place("c"))));
        assert_eq!(find(&taken, 3, Some("greedy")), None);
        taken.get_mut(&place("a")).unwrap().idle_since = Some(Instant::now());
        assert_eq!(find(&taken, 3, Some("greedy")), Some(Room::Idle(place("a"))), "its own");
    }
}
