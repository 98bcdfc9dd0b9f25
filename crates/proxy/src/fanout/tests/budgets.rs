//! What many caches hold together.

use super::*;
use crate::{cache::RetainedLimits, fanout::views::log::LogItem};

const CACHES: usize = 40;
const VIEWS: usize = 20;
const EVENTS: u64 = 50;
/// Room for an eighth of all events in all views.
const LOGS_BYTES_MAX: usize = CACHES * VIEWS * EVENTS as usize * size_of::<LogItem>() / 8;

#[tokio::test(start_paused = true)]
async fn the_logs_of_many_caches_share_one_budget_and_a_small_cache_retains_its_history() {
    let limits = RetainedLimits { logs_bytes_max: LOGS_BYTES_MAX, ..RetainedLimits::default() };
    let budgets = ProcessBudgets::new(limits);
    let limits = RingLimits { ring_events_max: 1000, ..LIMITS };
    let mut caches: Vec<_> = (0..CACHES).map(|_| Cache::sharing(&budgets, limits)).collect();
    let mut subscriptions = Vec::new();
    for (number, cache) in caches.iter_mut().enumerate() {
        cache.list(&[("a", "web", 9)], 10);
        // The first cache has one view, and the others many.
        let views = if number == 0 { 1 } else { VIEWS };
        for view in 0..views {
            subscriptions.push(cache.subscribe(&format!("app!=x{view}"), Start::Resume(version(10))).unwrap());
        }
    }
    for at in 11..11 + EVENTS {
        caches.iter_mut().for_each(|cache| cache.event(EventType::Modified, "a", "web", at));
    }
    let held: Vec<usize> = caches.iter().map(|cache| cache.hub.budgets().logs.used()).collect();
    let all: usize = held.iter().sum();
    assert!(all <= LOGS_BYTES_MAX + CACHES * VIEWS * size_of::<LogItem>(), "{all} of {LOGS_BYTES_MAX}");
    assert!(all >= LOGS_BYTES_MAX / 4, "the budget is used: {all}");
    assert_eq!(held[0], EVENTS as usize * size_of::<LogItem>(), "it has less than its part");
    drop((subscriptions, caches));
}

/// A view that starts late gets its history from the ring: all of it at once.
#[tokio::test(start_paused = true)]
async fn resumes_that_fill_the_logs_shorten_the_history_of_their_own_cache_alone() {
    let logs_bytes_max = 2 * EVENTS as usize * size_of::<LogItem>();
    let budgets = ProcessBudgets::new(RetainedLimits { logs_bytes_max, ..RetainedLimits::default() });
    let limits = RingLimits { ring_events_max: 1000, ..LIMITS };
    let (mut quiet, mut busy) = (Cache::sharing(&budgets, limits), Cache::sharing(&budgets, limits));
    for cache in [&mut quiet, &mut busy] {
        cache.list(&[("a", "web", 9)], 10);
        for at in 11..11 + EVENTS {
            cache.event(EventType::Modified, "a", "web", at);
        }
    }
    let resumed: Vec<_> = (0..VIEWS).map(|view| quiet.after(&format!("app!=x{view}"), 10)).collect();
    let used = quiet.hub.budgets().logs.used();
    assert!(used <= logs_bytes_max + EVENTS as usize * size_of::<LogItem>(), "{used} of {logs_bytes_max}");
    busy.event(EventType::Modified, "a", "web", 11 + EVENTS);
    assert!(busy.after("", 10).is_ok(), "it has no more than its part");
    drop(resumed);
}
