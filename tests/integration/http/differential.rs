//! The requests of the table, sent to both servers.

use std::collections::BTreeMap;

use futures::StreamExt;

use super::{
    ask::Request,
    compare::{at_its_version, byte_difference, differences, is_watch, wrong_server},
    table,
    world::World,
};
use crate::harness::{Test, tests};

pub(crate) const TESTS: &[Test] = tests! {
    apiserver: the_front_answers_as_the_apiserver_does;
};

/// Requests under way at once: watches mostly wait.
const CONCURRENCY: usize = 32;

/// What comparing came to.
#[derive(Default)]
struct Report {
    asked: usize,
    watches: usize,
    cached: usize,
    passed_on: usize,
    /// Lists compared byte for byte at one version.
    bytes: usize,
    by_status: BTreeMap<u16, usize>,
    failures: Vec<String>,
    /// What kubefan says itself where nothing is passed on, and upstream otherwise.
    own_words: Vec<String>,
}

async fn the_front_answers_as_the_apiserver_does() {
    let world = World::start().await;
    world.is_fresh_in_silence().await;
    let requests = table::requests(&world);
    let asking = async {
        let report = compare_all(&world, requests).await;
        world.stop();
        report
    };
    let (report, writes) = tokio::join!(asking, world.write());
    report.print(&format!("the table, {writes} writes meanwhile"));
    assert!(report.failures.is_empty(), "{} of {} requests differ", report.failures.len(), report.asked);
}

async fn compare_all(world: &World, requests: Vec<Request>) -> Report {
    let compared = futures::stream::iter(requests.into_iter().enumerate())
        .map(|(turn, request)| async move { (compare(world, &request, turn).await, request) });
    let mut compared = compared.buffer_unordered(CONCURRENCY);
    let mut report = Report::default();
    while let Some((one, request)) = compared.next().await {
        report.asked += 1;
        report.watches += usize::from(is_watch(&request));
        report.cached += usize::from(one.is_cached);
        report.passed_on += usize::from(!one.is_cached);
        report.bytes += usize::from(one.bytes);
        *report.by_status.entry(one.status).or_default() += 1;
        let told = || format!("{request}\n    {}", one.differences.join("\n    "));
        match (one.differences.is_empty(), one.is_compared) {
            (true, _) => {}
            (false, true) => report.failures.push(told()),
            (false, false) => report.own_words.push(told()),
        }
    }
    report
}

/// What one request came to.
struct Compared {
    status: u16,
    is_cached: bool,
    /// Whether upstream's answer should have been the same.
    is_compared: bool,
    bytes: bool,
    differences: Vec<String>,
}

async fn compare(world: &World, request: &Request, turn: usize) -> Compared {
    let (direct, ours) = tokio::join!(world.ask_direct(request), world.ask_kubefan(request, turn));
    let (status, is_cached) = (direct.status, ours.is_cached());
    let wrong = wrong_server(request, &ours);
    let is_compared = is_cached || world.passes_on || wrong.is_some();
    let mut differences = differences(request, &direct, &ours);
    differences.extend(wrong);
    let mut bytes = false;
    if is_cached
        && !is_watch(request)
        && let Some(exact) = at_its_version(request, &ours)
    {
        bytes = true;
        let direct = world.ask_direct(&exact).await;
        differences.extend(byte_difference(&direct, &ours));
    }
    Compared { status, is_cached, is_compared, bytes, differences }
}

impl Report {
    fn print(&self, what: &str) {
        let Self { asked, watches, cached, passed_on, bytes, by_status, failures, own_words } = self;
        for failure in failures {
            println!("DIFFERS {failure}");
        }
        for words in own_words {
            println!("own words {words}");
        }
        println!(
            "{what}: {asked} requests ({watches} watches), {cached} answered by the cache, {passed_on} passed on, {bytes} lists \
             compared byte for byte at one version; upstream's statuses {by_status:?}; {} differ",
            failures.len()
        );
    }
}
