use std::sync::atomic::AtomicUsize;

use super::*;
use crate::{authentication::caller::KnownCaller, modes::ModeRule};

fn modes(rules: &[(&str, Option<&str>, Mode)]) -> Modes {
    let rule = |(resource, user, mode): &(&str, Option<&str>, Mode)| ModeRule {
        resources: vec![resource.parse().unwrap()],
        users: user.map(|user| vec![user.parse().unwrap()]),
        groups: None,
        mode: *mode,
    };
    Modes::new(rules.iter().map(rule).collect())
}

fn caller(user: &str) -> Caller {
    Caller::Known(KnownCaller::new(Identity { user: user.to_owned(), ..Identity::default() }, None))
}

struct Watch {
    end: Arc<OnceLock<StreamEnd>>,
    woken: Arc<AtomicUsize>,
    _guard: ModeWatchGuard,
}

impl Watch {
    fn open(switches: &Arc<Switches>, resource: &str, caller: Option<Caller>, by: Answerer) -> Self {
        let end = Arc::new(OnceLock::new());
        let woken = Arc::new(AtomicUsize::new(0));
        let watch = ModeWatch { group: String::new(), resource: resource.to_owned(), caller, by };
        let wakes = woken.clone();
        let wake = move || {
            wakes.fetch_add(1, Ordering::Relaxed);
        };
        let guard = switches.register(watch, end.clone(), wake).unwrap();
        Self { end, woken, _guard: guard }
    }

    fn has_ended(&self) -> bool {
        assert_eq!(self.end.get().is_some(), self.woken.load(Ordering::Relaxed) > 0, "an end wakes its stream");
        self.end.get().is_some()
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_ends_the_watches_that_it_concerns_and_no_others() {
    let switches = Switches::new(Modes::default());
    let open = |resource, name: &str, by| Watch::open(&switches, resource, Some(caller(name)), by);
    let quiet = open("pods", "quiet", Answerer::Cache);
    let noisy = open("pods", "noisy", Answerer::Cache);
    let nodes = open("nodes", "noisy", Answerer::Cache);
    let forwarded = open("pods", "noisy", Answerer::ApiserverWithoutCache);
    let unknown = Watch::open(&switches, "pods", None, Answerer::ApiserverWithoutCache);
    switches.replace(modes(&[("pods", Some("noisy"), Mode::Deny)]));
    assert!(!noisy.has_ended(), "until its turn");
    assert_eq!(switches.end_concerned(ENDS_PER_SECOND).await, 3);
    assert!(noisy.has_ended() && forwarded.has_ended());
    assert!(unknown.has_ended(), "who reads decides now, so its client must say it");
    assert!(!quiet.has_ended() && !nodes.has_ended());
}

#[tokio::test(start_paused = true)]
async fn watches_follow_a_resource_to_passthrough_and_back() {
    let switches = Switches::new(Modes::default());
    let cached = Watch::open(&switches, "pods", None, Answerer::Cache);
    let forwarded = Watch::open(&switches, "pods", None, Answerer::ApiserverWithoutCache);
    switches.replace(modes(&[("pods", None, Mode::Passthrough)]));
    assert_eq!(switches.end_concerned(ENDS_PER_SECOND).await, 1);
    assert!(cached.has_ended() && !forwarded.has_ended(), "what the apiserver answers stays there");
    let passed = Watch::open(&switches, "pods", None, Answerer::ApiserverByMode);
    switches.replace(Modes::default());
    drop(cached);
    assert_eq!(switches.end_concerned(ENDS_PER_SECOND).await, 1);
    assert!(passed.has_ended() && !forwarded.has_ended());
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_opens_during_the_change_ends_too() {
    let switches = Switches::new(modes(&[("pods", None, Mode::Deny)]));
    assert!(Watch::open(&switches, "pods", None, Answerer::Cache).has_ended());
}

#[tokio::test(start_paused = true)]
async fn many_watches_end_in_slices_and_a_change_in_between_spares_the_rest() {
    let switches = Switches::new(Modes::default());
    let all: Vec<Watch> = (0..200).map(|_| Watch::open(&switches, "pods", None, Answerer::Cache)).collect();
    let ended = || all.iter().filter(|watch| watch.has_ended()).count();
    switches.replace(modes(&[("pods", None, Mode::Deny)]));
    let ending = tokio::spawn({
        let switches = switches.clone();
        async move { switches.end_concerned(ENDS_PER_SECOND).await }
    });
    sleep(Duration::from_millis(150)).await;
    assert_eq!(ended(), 100);
    switches.replace(Modes::default());
    assert_eq!(ending.await.unwrap(), 100);
    assert_eq!(ended(), 100);
}

#[tokio::test(start_paused = true)]
async fn the_caches_are_bypassed_until_they_are_not() {
    let switches = Switches::new(modes(&[("secrets", None, Mode::Deny), ("nodes", Some("jo"), Mode::Cache)]));
    let jo = caller("jo");
    let mode = |resource| switches.mode("", resource, Some(&jo));
    let cached: Vec<Watch> = (0..4).map(|_| Watch::open(&switches, "pods", None, Answerer::Cache)).collect();
    assert_eq!(
        [mode("pods"), mode("nodes"), mode("secrets")],
        [Some(Mode::Cache), Some(Mode::Cache), Some(Mode::Deny)]
    );
    switches.bypass_caches(true);
    let passed = Some(Mode::Passthrough);
    assert_eq!([mode("pods"), mode("nodes"), mode("secrets")], [passed, passed, Some(Mode::Deny)]);
    let ending = tokio::spawn({
        let switches = switches.clone();
        async move { switches.end_concerned(2).await }
    });
    sleep(Duration::from_millis(600)).await;
    assert_eq!(cached.iter().filter(|watch| watch.has_ended()).count(), 2, "two per second");
    assert_eq!(ending.await.unwrap(), 4);
    let passed = Watch::open(&switches, "pods", None, Answerer::ApiserverByMode);
    switches.bypass_caches(false);
    assert_eq!(switches.end_concerned(ENDS_PER_SECOND).await, 1);
    assert!(passed.has_ended());
    assert_eq!(mode("pods"), Some(Mode::Cache));
}

#[test]
fn a_caller_that_a_rule_names_is_checked_by_its_identity() {
    let switches = Switches::fixed(modes(&[("pods", Some("noisy"), Mode::Deny)]));
    assert_eq!(switches.check("", "pods", &caller("quiet")), Ok(()));
    let refused = switches.check("", "pods", &caller("noisy")).unwrap_err();
    assert_eq!((refused.mode, refused.resource.as_str()), (Mode::Deny, "pods"));
    assert!(refused.message().contains("mode Deny") && refused.message().contains("modes in kubefan's"));
    assert!(switches.check("", "pods", &Caller::Any).is_err(), "nothing is served to a caller that is not known");
}
