//! Informers under 200 updates a second, while kubefan and the apiserver are killed at random. Once
//! it settles, every store must equal the apiserver's list, and nothing may wait in a queue. No
//! sequence of calls may go back or lose an object.
//!
//! `KUBEFAN_SOAK_SECONDS` sets the duration; the default is 30. `KUBEFAN_SOAK_SEED` repeats the
//! choices of a run. `-- --nocapture` shows the memory of the process each minute. It includes
//! other tests that run at the same time.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, interval},
};

use super::{
    NAMESPACE,
    calls::History,
    serve,
    watched::{Watched, assert_same, content_of, sources},
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    kills::Kills,
    objects::{pod, version_of},
    process::free_port,
    soak_seconds, tests, wait,
    writes::Writes,
};

tests! {
    apiserver full: stores_equal_the_apiservers_list_after_random_kills;
}

const PODS: usize = 500;
const UPDATES_PER_SECOND: u32 = 200;
/// A reflector retries after at most 30 s, plus jitter.
const SETTLED_MAX: Duration = Duration::from_secs(120);

/// What the handler of an informer found.
#[derive(Default)]
struct Seen {
    history: History,
    calls: usize,
    /// The first call that did not fit.
    error: Option<String>,
}

async fn stores_equal_the_apiservers_list_after_random_kills() {
    let seconds = soak_seconds();
    let mut kills = Kills::from_seed();
    let api = ApiServer::start(Options::default()).await;
    let mut writes = Writes::populate(&api, PODS).await;
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let mut kubefan = Some(serve(&api, address).await);
    let mut informers = Vec::new();
    for (name, source) in sources(&api, address).await {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let handler = seen.clone();
        let watched = Watched::start(name, source, move |call| {
            let mut seen = handler.lock().unwrap();
            seen.calls += 1;
            if let Err(error) = seen.history.accept(&call) {
                seen.error.get_or_insert(error);
            }
        });
        watched.synced().await;
        informers.push((watched, seen));
    }

    let (stop, stopped) = watch::channel(false);
    let end = Instant::now() + Duration::from_secs(seconds);
    tokio::join!(
        async {
            tokio::select! {
                () = kills.until(end, &api, &mut kubefan, async || serve(&api, address).await) => {}
                () = print_memory(&informers) => unreachable!("it never ends"),
            }
            stop.send_replace(true);
        },
        writes.at_rate(UPDATES_PER_SECOND, stopped),
    );
    let changes = writes.flush().await;
    let marker = api.create(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), &pod("after-the-soak")).await;
    let last = version_of(&marker).to_string();
    let truth = api.get_json("/api/v1/pods").await["items"].take();
    let truth = content_of(serde_json::from_value(truth).unwrap());
    let versions: BTreeMap<_, _> = truth.iter().map(|(key, (version, _))| (key.clone(), version.clone())).collect();
    for (watched, seen) in &informers {
        let arrived = watched.informer.wait_until(&last, SETTLED_MAX).await;
        arrived.unwrap_or_else(|error| panic!("{}: {error}", watched.name));
        assert_same(watched.name, &truth, &watched.content());
        wait::until("the handlers to have all calls", wait::SOON, || async {
            (watched.informer.longest_backlog() == 0 && seen.lock().unwrap().history.versions() == versions)
                .then_some(())
        })
        .await;
        let errors = watched.connection_errors();
        let seen = seen.lock().unwrap();
        assert_eq!(seen.error, None, "{}", watched.name);
        println!("{}: {} calls, {errors} errors of connections", watched.name, seen.calls);
    }
    print_state("settled", &informers);
    println!("{changes} changes, {} kills of kubefan and {} of the apiserver", kills.kubefan, kills.apiserver);
    kills.assert_some(Duration::from_secs(seconds));
}

type Informers = [(Watched, Arc<Mutex<Seen>>)];

/// Prints the state now and each minute.
async fn print_memory(informers: &Informers) {
    let mut minutes = interval(Duration::from_secs(60));
    for minute in 0u32.. {
        minutes.tick().await;
        print_state(&format!("minute {minute}"), informers);
    }
    std::future::pending().await
}

fn print_state(when: &str, informers: &Informers) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("unknown").trim().to_owned();
    let of = |(watched, _): &(Watched, _)| {
        format!("{} objects, {} calls waiting", watched.informer.indexer().len(), watched.informer.longest_backlog())
    };
    println!("{when}: {resident} resident; {}", informers.iter().map(of).collect::<Vec<_>>().join("; "));
}
