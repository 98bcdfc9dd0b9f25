//! Tests of the shares of holders.

use super::*;

fn holder(connection: u64, last_byte: u8) -> Option<Holder> {
    Some(Holder::new(connection, Some(IpAddr::from([10, 0, 0, last_byte]))))
}

#[test]
fn many_places_are_taken_all_or_none() {
    let pool = FairPool::new(160);
    let held = pool.try_take_many(holder(1, 1), 100).unwrap();
    assert!(pool.try_take_many(holder(1, 1), 100).is_none());
    assert_eq!(pool.shares().free(), 60, "none is lost");
    assert!(pool.try_take_many(holder(2, 2), 10).is_some());
    drop(held);
    assert_eq!(pool.shares().free(), 160);
}

#[test]
fn any_number_of_places_is_taken_and_given_back_at_once() {
    // One by one it would take days.
    const PLACES: usize = 1 << 46;
    let pool = FairPool::new(PLACES);
    let held = pool.try_take_many(holder(1, 1), PLACES / 2).unwrap();
    assert_eq!(pool.shares().free(), PLACES / 2);
    drop(held);
    assert_eq!(pool.shares().free(), PLACES);
}

#[test]
fn many_places_are_taken_as_if_one_by_one() {
    for (all, per_identity) in [(3, None), (64, None), (200, None), (200, Some(30))] {
        for held in 0..all {
            let filled = || {
                let pool = FairPool::new(PermitLimits { all, per_identity });
                // Some by the same connection, address or user.
                let of = |number: u64| {
                    let holder = holder(number % 5, (number % 3) as u8);
                    if number.is_multiple_of(2) { holder.map(|it| it.identified("even", None)) } else { holder }
                };
                let places = fill(&pool, (0..held as u64).map(of));
                (pool, places)
            };
            let asked = holder(1, 1).map(|it| it.identified("even", None));
            for count in [1, 2, 3, 7, 8, 20, 31, 64, all] {
                let (one_by_one, _held) = filled();
                let (at_once, _also_held) = filled();
                let singles = fill(&one_by_one, std::iter::repeat_n(asked, count));
                let taken = at_once.try_take_many(asked, count);
                assert_eq!(taken.is_some(), singles.len() == count, "{count} of {all}, of which {held} are held");
                if taken.is_some() {
                    let one = one_by_one.shares();
                    let many = at_once.shares();
                    assert_eq!((one.held, &one.levels), (many.held, &many.levels));
                }
            }
        }
    }
}

#[test]
fn a_limit_that_is_set_later_counts_places_already_held() {
    let pool = FairPool::new(100);
    let held = [pool.try_take(holder(1, 1)), pool.try_take(holder(2, 1))];
    pool.set(PermitLimits { all: 100, per_identity: Some(2) });
    assert!(pool.try_take(holder(3, 1)).is_none() && pool.try_take(holder(4, 2)).is_some());
    drop(held);
    assert!(pool.try_take(holder(3, 1)).is_some());
    pool.set(PermitLimits { all: 0, per_identity: None });
    assert!(pool.try_take(holder(3, 1)).is_none());
}

fn fill(pool: &Arc<FairPool>, holders: impl Iterator<Item = Option<Holder>>) -> Vec<FairPermit> {
    holders.map_while(|holder| pool.try_take(holder)).collect()
}

#[test]
fn one_connection_leaves_places_for_others() {
    let pool = FairPool::new(160);
    let mut greedy = fill(&pool, std::iter::repeat(holder(1, 1)));
    assert_eq!(greedy.len(), 140, "an eighth is left");
    let others = fill(&pool, (2..).map(|connection| holder(connection, 1)));
    assert_eq!(pool.shares().free(), 10, "of which a sixteenth is for other addresses");
    assert!(pool.try_take(holder(200, 2)).is_some() && pool.try_take(None).is_some());
    greedy.truncate(100);
    assert!(pool.try_take(holder(1, 1)).is_some(), "there are plenty again");
    drop(greedy);
    drop(others);
    let shares = pool.shares();
    assert!(shares.free() == 160 && shares.levels.iter().all(HashMap::is_empty), "{shares:?}");
}

#[test]
fn a_few_addresses_leave_places_for_others() {
    for addresses in [2, 3, 8, 12] {
        let pool = FairPool::new(256);
        let of =
            |connection: u64| fill(&pool, std::iter::repeat_n(holder(connection, (connection % addresses) as u8), 200));
        let _greedy: Vec<_> = (0..4 * addresses).flat_map(of).collect();
        let newcomer = pool.try_take(holder(1000, 200));
        assert!(newcomer.is_some(), "{addresses} addresses leave {} places", pool.shares().free());
    }
}

#[test]
fn a_user_with_many_addresses_and_connections_leaves_places_for_others() {
    let pool = FairPool::new(160);
    let of_user = |user, number: u64, workload| holder(number, number as u8).map(|it| it.identified(user, workload));
    let greedy = fill(&pool, (0..200).map(|number| of_user("greedy", number, None)));
    assert_eq!(greedy.len(), 155, "a thirty-second is left");
    assert!(pool.try_take(of_user("greedy", 201, Some("pod"))).is_none());
    assert!(pool.try_take(of_user("honest", 201, None)).is_some());
}

#[test]
fn a_tenant_with_many_users_leaves_places_for_others() {
    let of = |number: u64, tenant| {
        let user =
            holder(number, number as u8).map(|it| it.identified(&format!("{number}"), Some(&format!("pod {number}"))));
        user.map(|it| it.of_tenant(tenant))
    };
    let pool = FairPool::new(800);
    let greedy: Vec<_> =
        (0..200).flat_map(|number| fill(&pool, std::iter::repeat_n(of(number, "greedy"), 20))).collect();
    assert_eq!(greedy.len(), 775, "a thirty-second is left");
    assert!(pool.try_take(of(300, "greedy")).is_none() && pool.try_take(of(300, "honest")).is_some());
    let limited = FairPool::new(PermitLimits { all: 800, per_identity: Some(1) });
    assert_eq!(fill(&limited, (0..50).map(|number| of(number, "one"))).len(), 50, "each is an identity");
}

#[test]
fn places_are_scarce_from_their_last_eighth_on() {
    let pool = FairPool::new(160);
    let _held = pool.try_take_many(None, 139).unwrap();
    assert!(!pool.is_scarce());
    let _last = pool.try_take(None).unwrap();
    assert!(pool.is_scarce());
}

#[test]
fn workloads_behind_one_address_are_told_apart() {
    let pool = FairPool::new(160);
    let of_pod = |pod: &str, connection| holder(connection, 1).map(|it| it.identified("agent", Some(pod)));
    let _greedy: Vec<_> =
        (0..20).flat_map(|number| fill(&pool, std::iter::repeat_n(of_pod("greedy", number), 50))).collect();
    assert_eq!(pool.shares().free(), 10);
    assert!(pool.try_take(of_pod("greedy", 100)).is_none());
    assert!(pool.try_take(of_pod("other", 100)).is_some());
}

#[test]
fn an_identity_is_a_workload_or_else_a_user_or_else_an_address() {
    let pool = FairPool::new(PermitLimits { all: 1000, per_identity: Some(3) });
    let of = |user: &str, pod: Option<&str>, byte: u8| holder(byte.into(), byte).map(|it| it.identified(user, pod));
    let unknown = |connection| holder(connection, 1);
    let takes = |holders: [Option<Holder>; 4]| fill(&pool, holders.into_iter());
    let of_pods = ["one", "two"].map(|pod| takes([1, 2, 3, 4].map(|byte| of("agent", Some(pod), byte))));
    let of_user = takes([1, 2, 3, 4].map(|byte| of("alice", None, byte)));
    let of_address = takes([1, 2, 3, 4].map(unknown));
    let unbound = takes([1, 2, 3, 4].map(|byte| of("agent", None, byte)));
    assert!(of_pods.iter().chain([&of_user, &of_address, &unbound]).all(|places| places.len() == 3));
    assert_eq!((pool.identity_max(unknown(9)), pool.identity_max(holder(9, 9))), (Some(3), None));
    assert!(pool.try_take(None).is_some(), "kubefan itself");
    drop(of_user);
    assert!(pool.try_take(of("alice", None, 5)).is_some());
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
