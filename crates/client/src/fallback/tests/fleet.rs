//! A fleet of clients whose kubefan is dead.

use std::io::Write;

use super::*;

const CLIENTS: usize = 3_000;
const MINUTES: u32 = 10;

/// Requests of the apiserver in each minute after the death of kubefan.
async fn requests_per_minute(policy: impl Fn(String) -> Fallback) -> Vec<usize> {
    let apiserver = Apiserver::default();
    apiserver.objects.put("a/1", "{}");
    let mut kubefans = Vec::new();
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        // A kubefan for each client, so that each notices the outage at a time of its own.
        let kubefan = Kubefan::new(apiserver.objects.clone(), client % 2 == 0);
        let source = WithFallback::new(kubefan.clone(), apiserver.clone(), policy(format!("node-{client}")));
        kubefans.push(kubefan);
        let mut events = watcher::<Value>(source);
        tasks.spawn(async move { while events.next().await.is_some() {} });
    }
    sleep(MINUTE).await;
    assert_eq!(apiserver.objects.requests().len(), CLIENTS, "every client has the state");
    let died = Instant::now();
    for (client, kubefan) in kubefans.iter().enumerate() {
        // Half of them notice it at once, the others within 30 s, by the timeout of a keepalive.
        if client % 100 == 50 {
            sleep(Duration::from_secs(1)).await;
        }
        kubefan.set(false);
    }
    sleep(died + MINUTES * MINUTE - Instant::now()).await;
    let mut counts = vec![0; MINUTES as usize];
    for (at, request) in apiserver.requests.lock().unwrap().iter() {
        assert!(matches!(request, FakeRequest::Watch(options) if !options.send_initial_events), "{request:?}");
        counts[(at.duration_since(died).as_secs() / 60) as usize] += 1;
    }
    counts
}

#[tokio::test(start_paused = true)]
async fn a_dead_kubefan_sends_at_most_one_percent_of_its_clients_to_the_apiserver_each_minute() {
    let never = requests_per_minute(|_| Fallback::Never).await;
    let paced = requests_per_minute(|client| Fallback::Paced(PacedOptions::new(&client))).await;
    let mut table = format!("{CLIENTS} clients, requests to the apiserver\nminute  Never  Paced  share\n");
    for (minute, (never, paced)) in never.iter().zip(&paced).enumerate() {
        let share = *paced as f64 * 100.0 / CLIENTS as f64;
        table.push_str(&format!("{minute:>6} {never:>6} {paced:>6} {share:>5.2} %\n"));
    }
    std::io::stdout().write_all(table.as_bytes()).unwrap();

    assert_eq!(never, [0; MINUTES as usize]);
    let bound = CLIENTS / 100;
    assert_eq!(paced[0], 0, "the first minute is too early");
    assert!(paced.iter().all(|count| *count <= bound), "at most {bound}: {paced:?}");
    let all: usize = paced.iter().sum();
    assert!((100..=150).contains(&all), "the fallback is used: {all}");
}
