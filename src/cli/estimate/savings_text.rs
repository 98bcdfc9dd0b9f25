//! Prints the savings as a table with a summary.

use std::io::{self, Write};

use super::savings::{Apiserver, Kubefan, ResourceSavings, Savings, Seats};
use crate::cli::{
    sizing::{human_bytes, human_cores, human_count},
    table::Columns,
    visible::visible,
};

/// Rows of the table; the others are summed.
const ROWS_MAX: usize = 20;

const HEADERS: [&str; 9] =
    ["RESOURCE", "SCOPES", "WATCHES", "AFTER", "EVENTS/S", "AFTER", "BYTES/S", "LISTS/MIN", "OBJECTS"];

pub(super) fn print(savings: &Savings, out: &mut impl Write) -> io::Result<()> {
    let Savings { seconds, replicas, apiserver, resources, kubefan, unknown } = savings;
    // Resources that would stay may have more bytes than some that would move.
    let (moved, others): (Vec<_>, Vec<_>) = resources.iter().partition(|of| of.is_taken_over());
    let (shown, more) = moved.split_at(moved.len().min(ROWS_MAX));
    let rest = [more, &others].concat();
    let mut rows = vec![HEADERS.map(str::to_owned).to_vec()];
    rows.extend(shown.iter().copied().map(row));
    rows.extend((!rest.is_empty()).then(|| sum_of(&rest)));
    Columns::default().print(out, &rows)?;
    writeln!(out)?;
    let mut lines = summary(*seconds, apiserver);
    lines.extend(apiserver.seats.iter().flat_map(seats));
    lines.push(("kubefan needs", needs(*replicas, kubefan)));
    for (what, text) in lines {
        writeln!(out, "{what:<18}{}", visible(&text))?;
    }
    writeln!(out, "\nnot known:")?;
    for text in unknown {
        writeln!(out, "- {}", visible(text))?;
    }
    Ok(())
}

fn row(of: &ResourceSavings) -> Vec<String> {
    let scopes = of.now.watches_by_scope.iter().map(|(scope, count)| format!("{scope}:{count}"));
    vec![
        of.now.resource.clone(),
        scopes.collect::<Vec<_>>().join(","),
        human_count(of.watches),
        human_count(of.watches_after),
        human_count(of.now.events_per_second),
        human_count(of.events_per_second_after),
        human_bytes(of.now.event_bytes_per_second),
        human_count(of.now.lists_per_minute),
        of.now.objects.map_or("<unknown>".to_owned(), human_count),
    ]
}

fn sum_of(rest: &[&ResourceSavings]) -> Vec<String> {
    let sum = |value: fn(&ResourceSavings) -> f64| rest.iter().copied().map(value).sum::<f64>();
    vec![
        format!("{} others", rest.len()),
        "-".to_owned(),
        human_count(sum(|of| of.watches)),
        human_count(sum(|of| of.watches_after)),
        human_count(sum(|of| of.now.events_per_second)),
        human_count(sum(|of| of.events_per_second_after)),
        human_bytes(sum(|of| of.now.event_bytes_per_second)),
        human_count(sum(|of| of.now.lists_per_minute)),
        "-".to_owned(),
    ]
}

fn summary(seconds: f64, apiserver: &Apiserver) -> Vec<(&'static str, String)> {
    vec![
        (
            "apiserver",
            format!(
                "{} cores and {} of memory, in {seconds:.0} s observed",
                human_cores(apiserver.cores),
                human_bytes(apiserver.resident_bytes)
            ),
        ),
        ("watches", format!("{} → {}", human_count(apiserver.watches), human_count(apiserver.watches_after))),
        (
            "events sent",
            format!(
                "{}/s → {}/s, {}/s → {}/s",
                human_count(apiserver.events_per_second),
                human_count(apiserver.events_per_second_after),
                human_bytes(apiserver.event_bytes_per_second),
                human_bytes(apiserver.event_bytes_per_second_after)
            ),
        ),
        (
            "CPU saved",
            format!(
                "{} cores of sending events; the lists of these resources cost {}, of which a part moves too",
                human_cores(apiserver.cores_saved),
                human_cores(apiserver.cores_of_lists)
            ),
        ),
    ]
}

/// The seats of API Priority and Fairness.
fn seats(seats: &Seats) -> [(&'static str, String); 2] {
    [
        (
            "APF seats",
            format!(
                "of {}: {} → {} held by writes for the watches that they wake; {} by the lists of these resources, of \
                 which a part moves too",
                human_count(seats.nominal),
                human_cores(seats.of_writes),
                human_cores(seats.of_writes_after),
                human_cores(seats.of_lists)
            ),
        ),
        (
            "APF at a restart",
            format!(
                "{} → {} seats for all watches together, if each begins with the state",
                human_count(seats.of_all_starts),
                human_count(seats.of_all_starts_after)
            ),
        ),
    ]
}

fn needs(replicas: u32, kubefan: &Kubefan) -> String {
    let not_measured = match kubefan.not_measured.as_slice() {
        [] => String::new(),
        names => format!("; without the unknown sizes of {}", names.join(", ")),
    };
    format!(
        "{replicas} replicas of {} each{not_measured}; {} to {} cores together, for {} watches",
        human_bytes(kubefan.memory_bytes_per_replica),
        human_cores(kubefan.cores_min),
        human_cores(kubefan.cores_max),
        human_count(kubefan.subscribers)
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::apiserver_load::{Load, ResourceLoad};
    use super::*;

    #[test]
    fn what_moves_is_listed_and_the_rest_is_summed() {
        let load = |resource: &str, watches: f64, events: f64| ResourceLoad {
            resource: resource.to_owned(),
            watches_by_scope: BTreeMap::from([("cluster".to_owned(), watches)]),
            events_per_second: events,
            event_bytes_per_second: events * 6000.0,
            changes_per_second: Some(20.0),
            lists_per_minute: 3.0,
            lists_running: 0.25,
            writes_per_second: 20.0,
            objects: Some(1000.0),
            ..ResourceLoad::default()
        };
        let resources = vec![load("leases.coordination.k8s.io", 1.0, 90_000.0), load("pods", 500.0, 10_000.0)];
        let load = Load {
            seconds: 30.0,
            cores: 0.8,
            resident_bytes: 4e8,
            seats: Some(600.0),
            woken_per_second: 10_020.0,
            resources,
        };
        let savings = Savings::of(load.clone(), 2);
        let mut out = Vec::new();
        print(&savings, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let rows: Vec<Vec<&str>> = text.lines().take(3).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["pods", "cluster:500", "500", "2.0", "10k", "40", "60", "MB", "3.0", "1.0k"], "{text}");
        assert_eq!(rows[2][..4], ["1", "others", "-", "1.0"], "{text}");
        assert!(text.contains("watches           501 → 3.0\n"), "{text}");
        assert!(text.contains("CPU saved         0.35 cores"), "{text}");
        assert!(text.contains("APF seats         of 600: 5.0 → < 0.001 held by writes"), "{text}");
        assert!(text.contains("; 2.5 by the lists of these resources"), "{text}");
        assert!(text.contains("APF at a restart  5.0k → 30 seats for all watches together"), "{text}");
        assert!(text.contains("\nnot known:\n- which clients would move"), "{text}");
        let mut out = Vec::new();
        print(&Savings::of(Load { seats: None, ..load }, 2), &mut out).unwrap();
        assert!(!String::from_utf8(out).unwrap().contains("APF"), "an apiserver without it");
    }
}
