//! Sends three kinds of requests to both servers: those of the table, lists page by page, and
//! random ones.
//!
//! `KUBEFAN_TEST_SCALE=full` covers every resource of the table and 2,000 random requests, which
//! differ in each run; the default covers less, and the same in each run. `KUBEFAN_SEED` repeats
//! the random requests of an earlier run.

use std::collections::BTreeMap;

use futures::StreamExt;

use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use serde_json::Value;

use super::{
    compare::{at_its_version, byte_difference, differences, is_watch, wrong_server},
    generate,
    request::{Answer, AnsweredBy, Request},
    table,
    world::{RESOURCES, World},
};
use crate::harness::{is_full_scale, tests};

tests! {
    apiserver slow_programs: kubefan_answers_like_the_apiserver;
}

/// Number of concurrent requests. Watches mostly wait.
const CONCURRENCY: usize = 48;
/// Number of attempts before a difference counts.
const TRIES: usize = 3;
/// Factor by which the timeout of a repeated watch is longer.
const TIMEOUT_FACTOR: u64 = 4;

/// The seed of the random requests at the default scale.
const SEED: u64 = 1;

/// The results of many comparisons.
#[derive(Default)]
struct Report {
    asked: usize,
    watches: usize,
    cached: usize,
    /// Number of lists compared byte for byte at the same version.
    bytes: usize,
    by_status: BTreeMap<u16, usize>,
    failures: Vec<String>,
}

impl Report {
    fn add(&mut self, request: &Request, one: Compared) {
        self.asked += 1;
        self.watches += usize::from(is_watch(request));
        self.cached += usize::from(one.is_cached);
        self.bytes += usize::from(one.bytes);
        *self.by_status.entry(one.status).or_default() += 1;
        if !one.differences.is_empty() {
            self.failures.push(format!("{request}\n    {}", one.differences.join("\n    ")));
        }
    }

    fn print(&self, what: &str) {
        let Self { asked, watches, cached, bytes, by_status, failures } = self;
        for failure in failures {
            println!("DIFFERS {failure}");
        }
        println!(
            "{what}: {asked} requests ({watches} watches), {cached} answered by the cache, {bytes} lists compared byte for byte at \
             one version; upstream's statuses {by_status:?}; {} differ",
            failures.len()
        );
    }
}

async fn kubefan_answers_like_the_apiserver() {
    let world = World::start().await;
    world.assert_fresh_without_writes().await;
    let seed = match std::env::var("KUBEFAN_SEED") {
        Ok(seed) => seed.parse().expect("KUBEFAN_SEED is a number"),
        #[expect(clippy::disallowed_methods, reason = "different requests in each run; a failure names the seed")]
        Err(_) if is_full_scale() => rand::random(),
        Err(_) => SEED,
    };
    println!("KUBEFAN_SEED={seed}");
    let generated =
        generate::requests(&world, &mut Pcg64Mcg::seed_from_u64(seed), if is_full_scale() { 2000 } else { 400 });
    let comparing = async {
        let table = compare_all(&world, table::requests(&world, is_full_scale())).await;
        table.print("the table");
        let generated = compare_all(&world, generated).await;
        generated.print(&format!("random requests with KUBEFAN_SEED={seed}"));
        let pages = compare_pages(&world).await;
        pages.print("page by page");
        world.stop();
        [table, generated, pages]
    };
    let (reports, writes) = tokio::join!(comparing, world.write());
    println!("{writes} writes during the comparison");
    for Report { asked, failures, .. } in &reports {
        assert!(failures.is_empty(), "{} of {asked} requests differ (KUBEFAN_SEED={seed})", failures.len());
    }
}

/// Reads lists page by page from the cache. Upstream must return the same bytes for the same token.
async fn compare_pages(world: &World) -> Report {
    let mut report = Report::default();
    for resource in RESOURCES.iter().filter(|resource| resource.cached) {
        for (namespace, rest) in
            [("", "limit=1"), ("", "limit=5&labelSelector=app"), ("still-a", "limit=2"), ("still-b", "limit=4")]
        {
            let path = resource.collection(namespace);
            let first = format!("{path}?resourceVersion={}&resourceVersionMatch=NotOlderThan&{rest}", world.now);
            let mut request = Request::get(first, AnsweredBy::Cache);
            loop {
                let (compared, ours) = compare_page(world, &request, report.asked).await;
                report.add(&request, compared);
                let body: Value = serde_json::from_slice(&ours.body).unwrap_or_default();
                let Some(token) = body["metadata"]["continue"].as_str().filter(|token| !token.is_empty()) else {
                    break;
                };
                request = Request::get(format!("{path}?{rest}&continue={token}"), AnsweredBy::Cache);
            }
        }
    }
    report
}

/// Compares a page, and returns that of kubefan. As in [`compare`], a temporary difference does not
/// count.
async fn compare_page(world: &World, request: &Request, turn: usize) -> (Compared, Answer) {
    let mut tries = 1;
    loop {
        let ours = world.ask_kubefan(request, turn).await;
        let exact = at_its_version(request, &ours).unwrap_or_else(|| request.clone());
        let direct = world.ask_direct(&exact).await;
        let difference = wrong_server(request, &ours).or_else(|| byte_difference(&direct, &ours));
        if difference.is_none() || tries == TRIES {
            let status = direct.status;
            let is_cached = ours.is_cached();
            return (Compared { status, is_cached, bytes: true, differences: difference.into_iter().collect() }, ours);
        }
        tries += 1;
    }
}

async fn compare_all(world: &World, requests: Vec<Request>) -> Report {
    let compared = futures::stream::iter(requests.into_iter().enumerate())
        .map(|(turn, request)| async move { (compare(world, &request, turn).await, request) });
    let mut compared = compared.buffer_unordered(CONCURRENCY);
    let mut report = Report::default();
    while let Some((one, request)) = compared.next().await {
        report.add(&request, one);
    }
    report
}

/// The result of one comparison.
struct Compared {
    status: u16,
    is_cached: bool,
    bytes: bool,
    differences: Vec<String>,
}

/// A temporary difference does not count. It can occur if an object changed between the two
/// requests or the timeout of a watch was too short.
async fn compare(world: &World, request: &Request, turn: usize) -> Compared {
    let mut compared = compare_once(world, request, turn).await;
    let seconds = request.parameter("timeoutSeconds").and_then(|seconds| seconds.parse::<u64>().ok());
    let seconds = seconds.filter(|seconds| (1..=TIMEOUT_FACTOR).contains(seconds)).unwrap_or_default();
    let from = format!("timeoutSeconds={seconds}");
    let to = format!("timeoutSeconds={}", seconds * TIMEOUT_FACTOR);
    let patient = Request { path: request.path.replace(&from, &to), ..request.clone() };
    for _ in 1..TRIES {
        if compared.differences.is_empty() {
            break;
        }
        compared = compare_once(world, &patient, turn).await;
    }
    compared
}

async fn compare_once(world: &World, request: &Request, turn: usize) -> Compared {
    let (direct, ours) = tokio::join!(world.ask_direct(request), world.ask_kubefan(request, turn));
    let is_cached = ours.is_cached();
    let mut differences = differences(request, &direct, &ours);
    differences.extend(wrong_server(request, &ours));
    let exact = if is_cached && !is_watch(request) { at_its_version(request, &ours) } else { None };
    if let Some(exact) = &exact {
        differences.extend(byte_difference(&world.ask_direct(exact).await, &ours));
    }
    Compared { status: direct.status, is_cached, bytes: exact.is_some(), differences }
}
