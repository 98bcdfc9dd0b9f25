//! A fleet of agents that loses all replicas of kubefan at once.

use tokio::task::JoinSet;

use super::*;

const AGENTS: usize = 2000;
/// The agents that start during the outage, without a state.
const NEW_AGENTS: usize = 200;
const REPLICAS: usize = 3;
const RATE: f64 = 50.0;
/// Time in which a client of this kubefan tries to connect again.
const RECONNECT: Duration = Duration::from_secs(20);

const BUDGET: FallbackBudget = FallbackBudget { clients: AGENTS as u32, starts_per_second: RATE };

/// The times at which each agent has received the objects, by key.
type Received = Arc<Mutex<Vec<BTreeMap<String, Vec<Instant>>>>>;

struct Herd {
    apiserver: Apiserver,
    replicas: Vec<watch::Sender<bool>>,
    received: Received,
    agents: JoinSet<()>,
}

impl Herd {
    fn new() -> Self {
        let replicas = (0..REPLICAS).map(|_| watch::Sender::new(true)).collect();
        Self { apiserver: Apiserver::default(), replicas, received: Arc::default(), agents: JoinSet::new() }
    }

    /// Starts an agent, which is configured with `budget`.
    fn start(&mut self, budget: FallbackBudget) {
        let number = self.agents.len();
        let replica = Kubefan {
            is_there: self.replicas[number % REPLICAS].clone(),
            budget: Some(BUDGET),
            ..Kubefan::new(self.apiserver.objects.clone(), number.is_multiple_of(2))
        };
        let options = BudgetedOptions { budget, seed: Some(number as u64), ..BudgetedOptions::default() };
        let policy = Fallback::Budgeted(ApiserverStarts::new(options));
        let mut events = watcher::<Value>(WithFallback::new(replica, self.apiserver.clone(), policy));
        self.received.lock().unwrap().push(BTreeMap::new());
        let received = self.received.clone();
        self.agents.spawn(async move {
            while let Some(event) = events.next().await {
                let key = match event {
                    Ok(InformerEvent::Changed(Change::Added(object)) | InformerEvent::Replaced(object)) => {
                        object.key().to_string()
                    }
                    _ => continue,
                };
                received.lock().unwrap()[number].entry(key).or_default().push(Instant::now());
            }
        });
    }

    fn set_replicas(&self, are_there: bool) {
        for replica in &self.replicas {
            replica.send_replace(are_there);
        }
    }

    /// Waits, and returns the time after which all `agents` had the object.
    async fn all_have(&self, key: &str, agents: std::ops::Range<usize>, within: Duration) -> Duration {
        let began = Instant::now();
        sleep(within).await;
        let received = self.received.lock().unwrap();
        let times = received[agents.clone()].iter().filter_map(|received| received.get(key)?.first());
        let times: Vec<_> = times.collect();
        assert_eq!(times.len(), agents.len(), "every agent has {key} after {within:?}");
        times.into_iter().max().map_or(Duration::ZERO, |last| last.saturating_duration_since(began))
    }

    /// The most requests of the apiserver in this much time, since `began`.
    fn most_requests(&self, began: Instant, time: Duration) -> usize {
        let mut counts = BTreeMap::new();
        for (at, _) in self.apiserver.requests.lock().unwrap().iter().filter(|(at, _)| *at >= began) {
            *counts.entry(at.duration_since(began).as_nanos() / time.as_nanos()).or_insert(0) += 1;
        }
        counts.into_values().max().unwrap_or(0)
    }

    /// Checks that the requests since `began` were within the budget. The moments are random, so a
    /// short time may have more: four standard deviations are never seen in an hour.
    fn check_budget(&self, began: Instant) {
        for seconds in [1_u32, 10] {
            let expected = RATE * f64::from(seconds);
            let most = self.most_requests(began, seconds * Duration::from_secs(1));
            let limit = expected + 4.0 * expected.sqrt();
            assert!(most as f64 <= limit, "{most} requests in {seconds} s, and {limit} are within the budget");
        }
        let window = BUDGET.window();
        assert!(self.most_requests(began, window) <= AGENTS, "each agent has one start in a window");
    }

    fn requests(&self) -> usize {
        self.apiserver.count()
    }
}

#[tokio::test(start_paused = true)]
async fn two_thousand_agents_that_lose_three_replicas_stay_within_the_budget_and_all_have_a_state() {
    let window = BUDGET.window();
    let mut herd = Herd::new();
    herd.apiserver.objects.put("a/old", "{}");
    // They would start all in ten seconds, if kubefan did not tell them how many they are.
    let own = FallbackBudget::default();
    let old_agents = 0..AGENTS - NEW_AGENTS;
    for _ in old_agents.clone() {
        herd.start(own);
    }
    let all = 0..AGENTS;
    herd.all_have("a/old", old_agents.clone(), MINUTE).await;
    assert_eq!(herd.requests(), 0);

    herd.set_replicas(false);
    let lost = Instant::now();
    herd.apiserver.objects.put("a/outage", "{}");
    // They have never reached kubefan, so their configuration decides.
    for _ in 0..NEW_AGENTS {
        herd.start(BUDGET);
    }
    let new = herd.all_have("a/outage", AGENTS - NEW_AGENTS..AGENTS, window).await;
    let old = herd.all_have("a/outage", old_agents, window).await + window;
    assert_eq!(herd.requests(), AGENTS, "each agent has asked once");
    herd.check_budget(lost);
    let mut table = format!(
        "{AGENTS} agents, {NEW_AGENTS} of them without a state, and {RATE} starts per second\n\
         a state: {:.1} s, the events: {:.1} s, most requests in a second: {}\n",
        new.as_secs_f64(),
        old.as_secs_f64(),
        herd.most_requests(lost, Duration::from_secs(1))
    );

    // On return no agent asks the apiserver, and no event is late.
    herd.set_replicas(true);
    herd.apiserver.objects.put("a/return", "{}");
    let back = herd.all_have("a/return", all.clone(), 2 * MINUTE).await;
    assert_eq!(herd.requests(), AGENTS);
    herd.apiserver.objects.put("a/end", "{}");
    herd.all_have("a/end", all.clone(), Duration::from_secs(1)).await;
    assert_eq!(herd.apiserver.objects.open_watches(), AGENTS, "all are at kubefan");

    // A kubefan that comes and goes does not raise the rate.
    let flapping = Instant::now();
    for _ in 0..10 {
        herd.set_replicas(false);
        sleep(RECONNECT).await;
        herd.set_replicas(true);
        sleep(RECONNECT).await;
    }
    herd.check_budget(flapping);
    herd.apiserver.objects.put("a/last", "{}");
    herd.all_have("a/last", all, 2 * window).await;
    table.push_str(&format!(
        "on return: the events after {:.1} s, and no request; with ten more outages {} requests in all\n",
        back.as_secs_f64(),
        herd.requests()
    ));
    std::io::Write::write_all(&mut std::io::stdout(), table.as_bytes()).unwrap();
    for received in herd.received.lock().unwrap().iter() {
        assert!(received.values().all(|times| times.len() == 1), "an object is received once: {received:?}");
    }
}
