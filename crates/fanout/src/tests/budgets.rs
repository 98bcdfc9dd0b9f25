//! Limits of many caches together.

use kubefan_admission::Holder;
use kubefan_cache::{OnLag, RetainedLimits};
use kubefan_model::projection::Projection;

use super::watch_http::lines;
use super::*;
use crate::{NotSubscribed, Provided, SubscribeNeed, views::log::LogItem};

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
        for cache in &mut caches {
            cache.event(EventType::Modified, "a", "web", at);
        }
    }
    let held: Vec<usize> = caches.iter().map(|cache| cache.hub.budgets().logs.used()).collect();
    let all: usize = held.iter().sum();
    assert!(all <= LOGS_BYTES_MAX + CACHES * VIEWS * size_of::<LogItem>(), "{all} of {LOGS_BYTES_MAX}");
    assert!(all >= LOGS_BYTES_MAX / 4, "the budget is used: {all}");
    assert_eq!(held[0], EVENTS as usize * size_of::<LogItem>(), "it has less than its part");
    drop(subscriptions);
    drop(caches);
}

/// A view that starts late gets its history from the ring: all of it at once.
#[tokio::test(start_paused = true)]
async fn resumes_that_fill_the_logs_shorten_the_history_of_their_own_cache_alone() {
    let logs_bytes_max = 2 * EVENTS as usize * size_of::<LogItem>();
    let budgets = ProcessBudgets::new(RetainedLimits { logs_bytes_max, ..RetainedLimits::default() });
    let limits = RingLimits { ring_events_max: 1000, ..LIMITS };
    let mut quiet = Cache::sharing(&budgets, limits);
    let mut busy = Cache::sharing(&budgets, limits);
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

/// A cache whose ring retains all events of a test.
fn with_long_ring(budgets: &ProcessBudgets) -> Cache {
    let mut cache = Cache::sharing(budgets, RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 9)], 10);
    cache
}

/// Budgets with room for the logs of this many views that see all events of a test.
fn logs_of(views: usize) -> (ProcessBudgets, usize) {
    let logs_bytes_max = views * EVENTS as usize * size_of::<LogItem>();
    (ProcessBudgets::new(RetainedLimits { logs_bytes_max, ..RetainedLimits::default() }), logs_bytes_max)
}

/// Options of a user that resumes from before all events of a test.
fn as_user(user: &str) -> SubscribeOptions {
    let holder = Some(Holder::new(1, None).identified(user, None));
    SubscribeOptions { holder, ..Start::Resume(version(10)).into() }
}

/// Views of one user that see all events, and that are of no other.
fn many_views(cache: &Cache, user: &str) -> Vec<Subscription> {
    (1..VIEWS).map(|view| cache.subscribe(&format!("app!=x{view}"), as_user(user)).unwrap()).collect()
}

/// All views have one ring, and each has an item of each event.
#[tokio::test(start_paused = true)]
async fn a_tenant_with_many_views_loses_its_own_history_and_not_that_of_others() {
    let (budgets, logs_bytes_max) = logs_of(5);
    let mut cache = with_long_ring(&budgets);
    let mut honest = cache.subscribe("app", as_user("honest")).unwrap();
    let mut both = ["honest", "greedy"].map(|user| cache.subscribe("app!=x0", as_user(user)).unwrap());
    let mut greedy = many_views(&cache, "greedy");
    let conflating = SubscribeOptions { on_lag: OnLag::Conflate, ..as_user("greedy") };
    let mut conflating = cache.subscribe("app!=y", conflating).unwrap();
    let logs = cache.hub.budgets().logs.clone();
    for at in 11..11 + EVENTS {
        cache.event(Modified, "a", "web", at);
        assert!(logs.used() <= logs_bytes_max, "{} of {logs_bytes_max}", logs.used());
    }
    for behind in both.iter_mut().chain([&mut honest]) {
        assert_eq!(ready(behind).await.len(), EVENTS as usize, "nothing of it was read before");
    }
    assert!(matches!(greedy[0].next().await, Err(StreamEnd::Expired(_))));
    let newest = 10 + EVENTS;
    let caught_up = ["catch-up from 10".to_owned(), format!("~a@{newest}"), format!("end of catch-up ({newest})")];
    assert_eq!(ready(&mut conflating).await, caught_up, "once");
    assert_eq!(cache.after("", 10).unwrap().way(), "ring");
}

#[tokio::test(start_paused = true)]
async fn a_resume_from_before_a_shortened_log_misses_and_repeats_nothing() {
    let (budgets, _) = logs_of(4);
    let mut cache = with_long_ring(&budgets);
    let mut greedy = many_views(&cache, "greedy");
    let mut unbroken = cache.subscribe("app!=x1", as_user("greedy")).unwrap();
    let mut sent = Vec::new();
    for at in 11..11 + EVENTS {
        cache.event(Modified, "a", "web", at);
        sent.extend(ready(&mut unbroken).await);
    }
    assert_eq!(sent.len(), EVENTS as usize, "who keeps up does not notice");
    let views = cache.hub.views();
    let mut resumed = cache.subscribe("app!=x1", as_user("honest")).unwrap();
    assert_eq!((resumed.way(), cache.hub.views()), ("ring", views + 1), "the log does not grow again");
    let mut late = cache.subscribe("app!=x1", as_user("honest")).unwrap();
    assert_eq!(cache.hub.views(), views + 1, "the next one shares the new view");
    cache.event(Modified, "a", "web", 11 + EVENTS);
    sent.extend(ready(&mut unbroken).await);
    assert_eq!(sent.len(), EVENTS as usize + 1);
    assert_eq!((ready(&mut resumed).await, ready(&mut late).await), (sent.clone(), sent));
    // It waited for events that were trimmed, and must not take others instead.
    assert!(matches!(greedy[0].next().await, Err(StreamEnd::Expired(_))));
    drop(unbroken);
    drop(greedy);
    assert_eq!(cache.hub.views(), 1);
    cache.event(Modified, "a", "web", 12 + EVENTS);
    assert_eq!((ready(&mut resumed).await.len(), ready(&mut late).await.len()), (1, 1));
    drop(resumed);
    drop(late);
    assert_eq!((cache.hub.views(), cache.hub.budgets().logs.used()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_tenant_with_many_views_in_one_cache_does_not_shorten_the_history_of_another() {
    let (budgets, logs_bytes_max) = logs_of(6);
    let [mut one, mut other] = [(); 2].map(|()| with_long_ring(&budgets));
    let _greedy = many_views(&one, "greedy");
    // More than the part of their cache.
    let mut honest = ["app", "app!=y"].map(|labels| other.subscribe(labels, as_user("honest")).unwrap());
    for at in 11..11 + EVENTS {
        for cache in [&mut one, &mut other] {
            cache.event(Modified, "a", "web", at);
        }
    }
    let used: usize = [&one, &other].map(|cache| cache.hub.budgets().logs.used()).iter().sum();
    assert!(used <= logs_bytes_max, "{used} of {logs_bytes_max}");
    for behind in &mut honest {
        assert_eq!(ready(behind).await.len(), EVENTS as usize);
    }
    for cache in [&one, &other] {
        assert_eq!(cache.after("", 10).unwrap().way(), "ring");
    }
}

/// Its history was not replayed for the next subscription, because the log has it.
#[tokio::test(start_paused = true)]
async fn a_log_that_a_subscription_is_about_to_start_in_is_not_shortened_before() {
    let (budgets, _) = logs_of(4);
    let mut cache = with_long_ring(&budgets);
    for at in 11..11 + EVENTS {
        cache.event(Modified, "a", "web", at);
    }
    let _greedy = many_views(&cache, "greedy");
    let views = cache.hub.views();
    assert!(cache.hub.budgets().logs.is_over());
    let mut second = cache.subscribe(&format!("app!=x{}", VIEWS - 1), as_user("greedy")).unwrap();
    assert_eq!((cache.hub.views(), ready(&mut second).await.len()), (views, EVENTS as usize));
}

/// The log had all of it when a replay was asked for, and was shortened since.
#[tokio::test(start_paused = true)]
async fn history_that_a_shortened_log_no_longer_has_is_not_tested_inside_the_critical_section() {
    let (budgets, _) = logs_of(4);
    let mut cache = with_long_ring(&budgets);
    let _greedy = many_views(&cache, "greedy");
    for at in 11..11 + EVENTS {
        cache.event(Modified, "a", "web", at);
    }
    let selection = cache.select("app!=x1");
    let format = Format::default();
    let options = as_user("greedy");
    let waker = Arc::new(StreamWaker::new(&ConnectionWaker::new(), 0));
    let mut provided = Provided::default();
    let subscribe = |provided: &mut Provided| cache.hub.try_subscribe(&selection, &format, &options, provided, &waker);
    let Err(NotSubscribed::Needs(SubscribeNeed::Replay(from))) = subscribe(&mut provided) else {
        panic!("it was tested")
    };
    provided.replayed = cache.hub.replay(&selection, &format, from, None).await.unwrap();
    let mut resumed = subscribe(&mut provided).unwrap();
    assert_eq!((resumed.way(), ready(&mut resumed).await.len()), ("ring", EVENTS as usize));
}

/// The most views with one key.
const VIEWS_PER_KEY: usize = 4;
const RESUMES: u64 = 10;

/// A subscription, the version after which it is sent every event, and its messages so far.
struct Resumed {
    subscription: Subscription,
    from: u64,
    sent: Vec<String>,
}

impl Resumed {
    async fn read(&mut self, format: &Format) {
        let subscription = &mut self.subscription;
        let mut sent = if format.has_markers() { ready(subscription).await } else { lines(subscription).await };
        self.sent.append(&mut sent);
    }
}

/// A cache with many views of one user, whose logs were shortened.
fn with_shortened_logs() -> (Cache, Vec<Subscription>) {
    let (budgets, _) = logs_of(4);
    let mut cache = with_long_ring(&budgets);
    let greedy = many_views(&cache, "greedy");
    for at in 11..10 + EVENTS {
        cache.event(Modified, "b", "web", at);
    }
    cache.event(Deleted, "a", "web", 10 + EVENTS);
    (cache, greedy)
}

/// The same user resumes with a selection that those views do not have.
fn resume(cache: &Cache, format: &Format, at: u64) -> Result<Subscription, Refusal> {
    let options = SubscribeOptions { start: Start::Resume(version(at)), ..as_user("greedy") };
    let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
    cache.hub.subscribe(cache.select("app!=x0"), format.clone(), options, waker)
}

#[tokio::test(start_paused = true)]
async fn a_few_of_many_resumes_from_before_a_shortened_log_get_a_view_and_none_misses_or_repeats_anything() {
    for format in [Format::default(), Format::http(Media::Json, Projection::default())] {
        let (mut cache, _greedy) = with_shortened_logs();
        let others = cache.hub.views();
        let mut resumed = Vec::<Resumed>::new();
        for head in 10 + EVENTS..10 + EVENTS + RESUMES {
            let first = resume(&cache, &format, 10);
            let way = first.as_ref().map_or("expired", Subscription::way);
            let later = if format.has_markers() { "residue" } else { "expired" };
            assert_eq!(way, if resumed.len() < VIEWS_PER_KEY { "ring" } else { later }, "after {head}");
            let from = match &first {
                Ok(_) if way == "ring" => 10,
                Ok(_) => head,
                Err(Refusal::Expired(expired)) => expired.oldest.get(),
                Err(refusal) => panic!("{refusal}"),
            };
            let subscription = first.unwrap_or_else(|_| resume(&cache, &format, from).unwrap());
            resumed.push(Resumed { subscription, from, sent: Vec::new() });
            assert_eq!(cache.hub.views(), others + resumed.len().min(VIEWS_PER_KEY), "after {head}");
            for resumed in &mut resumed {
                resumed.read(&format).await;
            }
            cache.event(Modified, "b", "web", head + 1);
        }
        for resumed in &mut resumed {
            resumed.read(&format).await;
        }
        let all = resumed[0].sent.clone();
        assert_eq!(all.len() as u64, EVENTS + RESUMES);
        for Resumed { subscription, from, sent } in &resumed {
            let after = &all[(from - 10) as usize..];
            let (caught_up, rest) = sent.split_at(sent.len().saturating_sub(after.len()));
            let mut expected = Vec::new();
            if subscription.way() == "residue" {
                expected.extend(["catch-up from 10".to_owned(), "?a@9".to_owned()]);
                expected.extend([format!("+b@{from}"), format!("end of catch-up ({from})")]);
            }
            assert_eq!((caught_up, rest), (expected.as_slice(), after), "every event after {from}");
        }
    }
}

/// A resume that gets a view of its own, whose log is then shortened.
fn with_own_view(cache: &mut Cache, format: &Format) -> Subscription {
    let resumed = resume(cache, format, 10).unwrap();
    assert_eq!(resumed.way(), "ring");
    let head = cache.hub.head().unwrap().get();
    for at in head + 1..=head + 5 {
        cache.event(Modified, "b", "web", at);
    }
    resumed
}

#[tokio::test(start_paused = true)]
async fn a_view_that_ends_makes_room_for_another_with_its_key_and_the_last_one_leaves_nothing() {
    let (mut cache, greedy) = with_shortened_logs();
    let hub = cache.hub.clone();
    let selection = cache.select("app!=x0");
    let format = Format::default();
    let replay = || hub.replay(&selection, &format, version(10), None);
    let mut resumed: Vec<_> = (0..VIEWS_PER_KEY).map(|_| with_own_view(&mut cache, &format)).collect();
    // An older one, then the newest.
    for leaves in [1, VIEWS_PER_KEY - 1] {
        assert_eq!(resume(&cache, &format, 10).unwrap().way(), "residue");
        assert!(replay().await.unwrap().is_none(), "it would not be used");
        drop(resumed.remove(leaves));
        let mut stopped = std::pin::pin!(replay());
        assert!(futures::poll!(stopped.as_mut()).is_pending());
        resumed.push(with_own_view(&mut cache, &format));
        assert!(stopped.await.unwrap().is_none(), "it cannot be used any more");
    }
    drop(resumed);
    let keys = hub.lock().views.keys();
    assert_eq!((hub.views(), keys), (greedy.len(), greedy.len()));
    drop(with_own_view(&mut cache, &format));
    drop(greedy);
    let keys = hub.lock().views.keys();
    assert_eq!((hub.views(), keys, hub.budgets().logs.used()), (0, 0, 0));
}
