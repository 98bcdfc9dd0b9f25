//! One script for the clients of four languages: `clients/conformance/steps` has the actions and
//! the reports that a client must make. All clients run each step at the same time, against the
//! same kubefan in front of the same apiserver, so that they must also report the same bytes and
//! versions. The table of results is printed.
//!
//! `KUBEFAN_LANGUAGES_STEPS=text` runs the steps whose names contain the text.

pub(crate) mod cost;
mod programs;
mod report;
mod runner;
mod scene;
mod script;
pub(crate) mod soak;
mod step_run;
mod table;

use std::{collections::BTreeSet, env};

use tokio::time::Instant;

use self::{
    runner::Runner,
    scene::World,
    script::{Lacks, Step},
    step_run::Outcome,
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    tests,
};

tests! {
    apiserver slow_programs: the_clients_of_all_languages_do_the_same;
    local: the_script_is_well_formed, a_report_is_compared_with_the_script;
}

/// With fewer the script would show too little.
const STEPS_MIN: usize = 40;

async fn the_clients_of_all_languages_do_the_same() {
    let filter = env::var("KUBEFAN_LANGUAGES_STEPS").unwrap_or_default();
    let steps: Vec<Step> = script::steps().into_iter().filter(|step| step.name.contains(&filter)).collect();
    let lacks = script::lacks();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut runners = runner::start_all(dir.path()).await;
    for runner in &runners {
        check_lacks(runner, &lacks);
    }
    let languages: Vec<&str> = runners.iter().map(|runner| runner.language).collect();

    // Steps restart the apiserver.
    let mut world = World::new(ApiServer::start(Options::default()).await);
    let mut rows = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let started = Instant::now();
        let outcomes = step_run::run(&mut world, &mut runners, &lacks, number, step).await;
        println!("{}", table::line(&languages, step, &outcomes, started.elapsed()));
        rows.push((step, outcomes));
    }
    println!("{}", table::render(&languages, &rows));
    let failed: Vec<String> = rows
        .iter()
        .flat_map(|(step, outcomes)| {
            languages.iter().zip(outcomes).map(move |(language, outcome)| (step, language, outcome))
        })
        .filter_map(|(step, language, outcome)| match outcome {
            Outcome::Failed(why) => Some(format!("{}, {language}: {why}", step.name)),
            Outcome::Ok | Outcome::NotOffered(_) => None,
        })
        .collect();
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

/// Checks that the script names every feature that a language lacks here, with the reason.
fn check_lacks(runner: &Runner, lacks: &Lacks) {
    let known = lacks.get(runner.language);
    for lacked in &runner.lacks {
        let is_known = known.is_some_and(|known| known.contains_key(lacked));
        assert!(is_known, "lacks.yaml does not say why {} lacks {lacked}", runner.language);
    }
}

async fn the_script_is_well_formed() {
    let steps = script::steps();
    let lacks = script::lacks();
    assert!(steps.len() >= STEPS_MIN, "{} steps", steps.len());
    let names: BTreeSet<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names.len(), steps.len(), "names are unique");
    let reasons: BTreeSet<&str> = lacks.values().flat_map(|of| of.keys().map(String::as_str)).collect();
    for step in &steps {
        assert!(step.promise.ends_with('.') && !step.actions.is_empty(), "{}", step.name);
        let is_known = step.needs.as_deref().is_none_or(|needs| reasons.contains(needs));
        assert!(is_known, "{}: lacks.yaml has no reason for {:?}", step.name, step.needs);
    }
}

async fn a_report_is_compared_with_the_script() {
    let names = report::Names { namespace: "one".to_owned(), elsewhere: "two".to_owned() };
    assert_eq!(names.short(&"one/a".into()), "a");
    assert_eq!(names.short(&"two/a".into()), "elsewhere/a");
    let denied = serde_json::json!({ "code": "PermissionDenied", "reason": "FORBIDDEN", "field": "" });
    assert_eq!(report::error_text(&denied), "Forbidden FORBIDDEN");
    let contradiction = serde_json::json!({ "code": "NOT_FOUND", "reason": "X", "class": "Forbidden" });
    assert!(report::error_text(&contradiction).starts_with("Forbidden with the code NOT_FOUND"));
    for (wanted, got, expected) in [
        ("ADDED a", "ADDED a", true),
        ("ADDED a", "ADDED ab", false),
        ("DELETED a", "DELETED a LEFT_SELECTOR", false),
        ("disconnected", "disconnected Unavailable DRAINING", true),
        ("disconnected", "reconnected", false),
    ] {
        assert_eq!(report::is_wanted(wanted, got), expected, "{wanted}, {got}");
    }
}
