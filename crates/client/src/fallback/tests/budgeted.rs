//! One client with a budget whose window is ten seconds.

use super::*;

const WINDOW: Duration = Duration::from_secs(10);

fn budgeted(reconnects: bool) -> World {
    let budget = FallbackBudget { clients: 10, starts_per_second: 1.0 };
    let options = BudgetedOptions { budget, seed: Some(7), ..BudgetedOptions::default() };
    World::new(reconnects, Fallback::Budgeted(ApiserverStarts::new(options)))
}

impl World {
    fn apiserver_requests(&self) -> Vec<FakeRequest> {
        self.apiserver.requests.lock().unwrap().iter().map(|(_, request)| request.clone()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_goes_on_from_its_version_in_the_second_window_and_returns() {
    for reconnects in [true, false] {
        let mut world = budgeted(reconnects);
        world.put("a/1");
        assert_eq!(world.read_for(MINUTE).await, ["state a/1@2"]);
        world.kubefan.set(false);
        world.put("a/2");
        assert_eq!(world.read_for(WINDOW).await, [""; 0], "those without a state go first");
        assert_eq!(world.read_for(WINDOW + Duration::from_secs(1)).await, ["add a/2@3"]);
        let requests = world.apiserver_requests();
        assert!(
            matches!(&requests[..], [FakeRequest::Watch(options)] if options.resource_version == "2"
                && !options.send_initial_events),
            "{requests:?}"
        );
        world.put("a/1");
        assert_eq!(world.read_for(MINUTE).await, ["update a/1@4"]);

        world.kubefan.set(true);
        assert_eq!(world.read_for(2 * MINUTE).await, [""; 0], "nothing is repeated");
        assert_eq!(world.source.gone_for(), None);
        assert_eq!(world.apiserver.objects.open_watches(), 1, "the apiserver's watch was dropped");
        world.put("a/2");
        assert_eq!(world.read_for(MINUTE).await, ["update a/2@5"], "and nothing is lost");
        assert_eq!(world.apiserver.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_without_a_state_reads_it_from_the_apiserver_in_the_first_window() {
    for (reconnects, has_watch_list) in [(true, true), (false, true), (false, false)] {
        let mut world = budgeted(reconnects);
        world.apiserver.objects.set_watch_list(has_watch_list);
        world.apiserver.objects.set_page_size(1);
        world.put("a/1");
        world.put("a/2");
        world.kubefan.set(false);
        // Without watch-lists a refusal takes the first start, and a watch another one.
        let windows = if has_watch_list { 1 } else { 12 };
        let states = world.read_for(windows * WINDOW + Duration::from_secs(1)).await;
        assert_eq!(states, ["state a/1@2", "state a/2@3"], "{has_watch_list}");
        world.put("a/1");
        world.read_for(2 * MINUTE).await;
        world.kubefan.set(true);
        assert_eq!(world.read_for(2 * MINUTE).await, [""; 0]);
        world.put("a/2");
        assert_eq!(world.read_for(MINUTE).await, ["update a/2@5"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_kubefan_that_ends_each_watch_is_asked_again_after_a_delay() {
    let mut world = budgeted(true);
    world.put("a/1");
    world.read_for(MINUTE).await;
    world.kubefan.set(false);
    world.read_for(MINUTE).await;
    world.kubefan.ends_watches.store(true, Ordering::Relaxed);
    let before = world.kubefan.attempts.load(Ordering::Relaxed);
    world.put("a/2");
    assert_eq!(world.read_for(2 * MINUTE).await, ["add a/2@3"], "the apiserver is read meanwhile");
    let attempts = world.kubefan.attempts.load(Ordering::Relaxed) - before;
    assert!((3..20).contains(&attempts), "{attempts}");
}

#[tokio::test(start_paused = true)]
async fn an_expired_version_leads_to_a_new_state_within_the_budget() {
    for reconnects in [true, false] {
        let mut world = budgeted(reconnects);
        world.put("a/1");
        world.read_for(MINUTE).await;
        world.kubefan.set(false);
        world.apiserver.errors.lock().unwrap().push(api_error(410, None));
        world.put("a/2");
        assert_eq!(world.read_for(4 * MINUTE).await, ["state a/1@2", "state a/2@3"]);
        let at: Vec<_> = world.apiserver.requests.lock().unwrap().iter().map(|(at, _)| *at).collect();
        assert_eq!(at.len(), 2);
        assert!(at[1] - at[0] >= WINDOW);
    }
}

#[tokio::test(start_paused = true)]
async fn an_apiserver_that_asks_for_patience_gets_it_and_one_that_fails_is_asked_a_window_later() {
    for (code, retry_after, patience) in [(429, Some(MINUTE), MINUTE), (500, None, WINDOW)] {
        let mut world = budgeted(true);
        world.read_for(MINUTE).await;
        world.kubefan.set(false);
        world.apiserver.errors.lock().unwrap().push(api_error(code, retry_after));
        world.put("a/1");
        assert_eq!(world.read_for(4 * MINUTE).await, ["add a/1@2"]);
        let at: Vec<_> = world.apiserver.requests.lock().unwrap().iter().map(|(at, _)| *at).collect();
        assert_eq!(at.len(), 2);
        assert!(at[1] - at[0] >= patience);
    }
}

#[tokio::test(start_paused = true)]
async fn a_kubefan_that_asks_for_patience_for_ten_seconds_counts_as_gone() {
    let mut world = budgeted(false);
    world.read_for(MINUTE).await;
    let not_synced = api_error(503, Some(Duration::from_secs(1)));
    for _ in 0..2 {
        world.kubefan.objects.fail_next_watch(not_synced.clone());
    }
    world.kubefan.objects.fail_watches(not_synced.clone());
    world.read_for(MINUTE).await;
    assert_eq!(world.apiserver.count(), 0, "a few seconds are none");
    for _ in 0..100 {
        world.kubefan.objects.fail_next_watch(not_synced.clone());
    }
    world.kubefan.objects.fail_watches(not_synced);
    world.read_for(2 * MINUTE).await;
    assert!(world.apiserver.count() > 0);
}
