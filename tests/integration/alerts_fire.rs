//! Every alert of the chart is provoked for real: a real Prometheus scrapes real kubefans in
//! trouble, the alert fires, the steps of its entry in the runbook find and end the cause, and it
//! resolves. Meanwhile every query of the dashboard returns series.
//!
//! The rules are those of `alerts.yaml` with every duration divided by one factor, or the slowest
//! would take hours. Counts, shares and rates stay as they are, so the troubles are as large as in
//! real life, in less time.

use std::{collections::BTreeSet, time::Duration};

use futures::future::{LocalBoxFuture, join_all};
use tokio::time::Instant;

use crate::{
    harness::{prometheus::Prometheus, tests},
    monitoring::{FOLDER, alerts, panels, read},
};

mod access;
mod availability;
mod data;
mod limits;
mod peers;
mod scene;
mod subscribers;
mod upstream;

use scene::{Proved, Scene, Stage};

tests! {
    apiserver slow_deploy: alerts_of_common_troubles_fire_and_resolve;
    apiserver large: every_alert_fires_and_resolves_and_every_query_has_series;
    local: all_durations_of_the_rules_are_shortened;
}

/// By how much durations are divided.
const FACTOR: u32 = 30;
/// Divisor for the few troubles of the short test.
const FACTOR_SHORT: u32 = 60;

/// Thresholds that are durations too, in seconds.
const AGES: [&str; 3] =
    ["(kubefan_staleness_seconds) > ", "kubefan_staleness_seconds > ", "process_start_time_seconds < "];

/// The rules, with every duration divided by `factor`.
fn shortened(rules: &str, factor: u32) -> String {
    rules.lines().map(|line| shortened_line(line, factor) + "\n").collect()
}

fn shortened_line(line: &str, factor: u32) -> String {
    if line.trim_start().starts_with("description:") || line.trim_start().starts_with("summary:") {
        return line.to_owned();
    }
    if let Some((head, duration)) = line.split_once("for: ") {
        return format!("{head}for: {}s", seconds(duration) / factor);
    }
    for age in AGES {
        if let Some((head, value)) = line.split_once(age) {
            return format!("{head}{age}{}", value.parse::<u32>().expect("a number of seconds") / factor);
        }
    }
    let mut parts = line.split('[');
    let mut short = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (range, rest) = part.split_once(']').expect("a range ends");
        short += &format!("[{}s]{rest}", seconds(range) / factor);
    }
    short
}

/// The seconds of a duration with one unit.
fn seconds(duration: &str) -> u32 {
    let (number, unit) = duration.split_at(duration.len() - 1);
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        other => panic!("a duration in {other:?}"),
    };
    number.parse::<u32>().expect("a number") * unit
}

async fn all_durations_of_the_rules_are_shortened() {
    let rules = read(&format!("{FOLDER}/alerts.yaml"));
    let short = shortened(&rules, FACTOR);
    assert_eq!(rules.lines().count(), short.lines().count());
    for (line, short) in rules.lines().zip(short.lines()) {
        let is_duration = line.contains("for: ") || line.contains("m])") || line.contains("h])");
        assert_eq!(line != short, is_duration || AGES.iter().any(|age| line.contains(age)), "{line} became {short}");
    }
    assert_eq!(
        shortened_line("  increase(a[30m]) > 1 and rate(b[2m]) > 2", 30),
        "  increase(a[60s]) > 1 and rate(b[4s]) > 2"
    );
    assert_eq!(shortened_line("  for: 1h", 30), "  for: 120s");
    assert_eq!(shortened_line("  expr: kubefan_staleness_seconds > 300", 30), "  expr: kubefan_staleness_seconds > 10");
}

type Run = fn(Scene) -> LocalBoxFuture<'static, ()>;

/// Scenes: the job of each in Prometheus, which rules select by the word kubefan, and the function
/// that plays it.
macro_rules! scenes {
    ($($run:path),+ $(,)?) => { &[$((concat!("kubefan ", stringify!($run)), |scene| Box::pin($run(scene)))),+] };
}

/// Runs the scenes, `first` alone because no kubefan may be scraped then, and prints the alerts
/// that fired and resolved.
async fn run(factor: u32, first: Option<Run>, scenes: &[(&'static str, Run)]) -> (Prometheus, Vec<Proved>) {
    let rules = shortened(&read(&format!("{FOLDER}/alerts.yaml")), factor);
    let mut jobs = vec!["kubefan"];
    jobs.extend(scenes.iter().map(|(name, _)| *name));
    let stage = Stage::start(&rules, &jobs).await;
    if let Some(first) = first {
        first(stage.scene("kubefan")).await;
    }
    join_all(scenes.iter().map(|(name, run)| run(stage.scene(name)))).await;
    let (prometheus, mut proved) = stage.end();
    proved.sort_by(|a, b| a.alert.cmp(&b.alert));
    println!(
        "\ndurations divided by {factor}\n| alert | provoked by | fired after | resolved by | after |\n|---|---|--:|---|--:|"
    );
    for Proved { alert, cause, fired, remedy, resolved } in &proved {
        println!("| {alert} | {cause} | {} s | {remedy} | {} s |", fired.as_secs(), resolved.as_secs());
    }
    (prometheus, proved)
}

async fn alerts_of_common_troubles_fire_and_resolve() {
    let scenes: &[(&str, Run)] = scenes![availability::not_ready, availability::wrong_file, limits::certificate];
    let (_, proved) = run(FACTOR_SHORT, None, scenes).await;
    assert_eq!(proved.len(), 7, "{proved:?}");
}

async fn every_alert_fires_and_resolves_and_every_query_has_series() {
    let scenes: &[(&str, Run)] = scenes![
        access::audit_log,
        access::denied,
        access::grace,
        access::reviews_of_access,
        access::reviews_of_tokens,
        access::strict_audit_log,
        availability::not_ready,
        availability::restarts,
        availability::versions,
        availability::wrong_file,
        data::difference,
        data::failing_checks,
        data::other_cluster,
        data::relists,
        limits::certificate,
        limits::files,
        limits::connections,
        limits::managed_certificate,
        limits::memory,
        peers::strangers,
        peers::transfers,
        peers::warm_starts,
        subscribers::lag,
        subscribers::late,
        subscribers::requests,
        subscribers::slow,
        subscribers::snapshots,
        upstream::breaks,
        upstream::outage,
        upstream::throttled,
    ];
    let started = Instant::now();
    let (prometheus, proved) = run(FACTOR, Some(|scene| Box::pin(availability::absent(scene))), scenes).await;
    let fired: BTreeSet<String> =
        proved.iter().map(|proved| proved.alert.split('{').next().unwrap().to_owned()).collect();
    assert_eq!(fired, alerts());

    let mut queries = 0;
    let mut silent = Vec::new();
    for panel in panels() {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let expression = query.replace("$__rate_interval", "10s");
            let expression =
                ["$namespace", "$job", "$instance"].iter().fold(expression, |text, name| text.replace(name, ".*"));
            queries += 1;
            if prometheus.series(&expression, started.elapsed().as_secs()).await.is_empty() {
                silent.push(query.to_owned());
            }
        }
    }
    println!("{} of {queries} queries of the dashboard returned series", queries - silent.len());
    assert_eq!(silent, Vec::<String>::new(), "every query of the dashboard returns series");
}

/// Maximum time of an alert, with all of its durations and on a busy machine.
const AT_MOST: Duration = Duration::from_secs(600);
