//! The summary of the demo: the cost of the same load on both routes. It has only counts, because
//! times and CPU use depend on the machine.

use std::fmt;

use super::{counts::Counts, progress::Route, text};

/// The cost of one route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteCounts {
    /// Largest number of watches on pods that the apiserver had open at once.
    pub pod_watches: u64,
    /// Counts until every subscriber had its initial state. No object changed during this time.
    pub initial: Counts,
    /// Counts while objects changed.
    pub churn: Counts,
}

impl RouteCounts {
    fn per_change(&self, count: u64) -> String {
        match self.churn.changes {
            0 => text::NOTHING.to_owned(),
            changes => format!("{:.2}", count as f64 / changes as f64),
        }
    }

    fn bytes_per_change(&self, bytes: u64) -> String {
        match self.churn.changes {
            0 => text::NOTHING.to_owned(),
            changes => text::bytes(bytes as f64 / changes as f64),
        }
    }
}

/// Progress of delivery at the end of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FinalState {
    /// The version of the last change.
    pub version: u64,
    /// Number of subscribers that have received everything up to it.
    pub at_version: usize,
    /// Watches that broke and were restarted, on both routes.
    pub breaks: u64,
}

/// The result of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Number of subscribers.
    pub subscribers: usize,
    /// Number of pods.
    pub objects: usize,
    /// The costs of the direct route. `None` if the demo was stopped before the route's churn.
    pub direct: Option<RouteCounts>,
    /// The costs of the route through kubefan, likewise.
    pub kubefan: Option<RouteCounts>,
    /// `None` if the demo was stopped before the churn through kubefan.
    pub final_state: Option<FinalState>,
}

impl Summary {
    /// The error if kubefan broke a promise: a subscriber did not receive every change, or kubefan
    /// had more than one watch open at the apiserver.
    pub fn failure(&self) -> Option<String> {
        let FinalState { version, at_version, .. } = self.final_state?;
        if at_version < self.subscribers {
            let behind = self.subscribers - at_version;
            return Some(format!("{behind} of {} subscribers did not reach version {version}", self.subscribers));
        }
        let watches = self.kubefan.map_or(1, |route| route.pod_watches);
        (watches != 1).then(|| format!("kubefan had {watches} watches on pods open at once; one is enough"))
    }
}

/// One label and two number columns fit into a terminal of 80 columns.
const LABEL_WIDTH: usize = 44;
const NUMBER_WIDTH: usize = 17;

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subscribers = text::count(self.subscribers as u64);
        let title = format!("{subscribers} subscribers of {} pods", text::count(self.objects as u64));
        writeln!(f, "{}", line(&title, &Route::ALL.map(|route| route.as_str().to_owned())))?;
        type Cell = fn(&RouteCounts) -> String;
        let rows: [(&str, Option<Cell>); 13] = [
            ("watches on pods, open at the apiserver", Some(|route| text::count(route.pod_watches))),
            ("lists answered by the apiserver", Some(|route| text::count(route.initial.lists + route.churn.lists))),
            ("the initial state", None),
            ("  objects encoded by the apiserver", Some(|route| text::count(route.initial.objects))),
            ("  bytes sent by the apiserver", Some(|route| text::bytes(route.initial.bytes as f64))),
            ("then, for each change", Some(|route| format!("of {}", text::count(route.churn.changes)))),
            ("  events sent by the apiserver", Some(|route| route.per_change(route.churn.events))),
            ("  objects encoded by the apiserver", Some(|route| route.per_change(route.churn.objects))),
            ("  selectors tested by the apiserver", Some(|route| route.per_change(route.churn.selector_tests))),
            ("  bytes sent by the apiserver", Some(|route| route.bytes_per_change(route.churn.bytes))),
            (
                "  messages encoded by kubefan",
                Some(|route| match route.churn.messages {
                    0 => text::NOTHING.to_owned(),
                    messages => route.per_change(messages),
                }),
            ),
            ("  events received by subscribers", Some(|route| route.per_change(route.churn.deliveries))),
            ("  bytes received by subscribers", Some(|route| route.bytes_per_change(route.churn.delivered_bytes))),
        ];
        for (label, cell) in rows {
            let Some(cell) = cell else {
                writeln!(f, "{label}")?;
                continue;
            };
            let cells = [&self.direct, &self.kubefan];
            let cells = cells.map(|route| route.as_ref().map_or_else(|| text::NOTHING.to_owned(), cell));
            writeln!(f, "{}", line(label, &cells))?;
        }
        writeln!(f)?;
        let Some(FinalState { version, at_version, breaks }) = self.final_state else {
            return writeln!(f, "stopped before every subscriber was connected through kubefan");
        };
        if at_version == self.subscribers {
            writeln!(f, "all {subscribers} subscribers are at version {version}")?;
        }
        if breaks > 0 {
            writeln!(f, "{} broken watches were restarted", text::count(breaks))?;
        }
        Ok(())
    }
}

fn line(label: &str, cells: &[String; 2]) -> String {
    let [direct, kubefan] = cells;
    format!("{label:<LABEL_WIDTH$}{direct:>NUMBER_WIDTH$}{kubefan:>NUMBER_WIDTH$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary() -> Summary {
        let initial = |objects, bytes| Counts { objects, bytes, ..Counts::default() };
        let churn = |events, bytes, messages| Counts {
            changes: 1_000,
            events,
            objects: 1_500,
            selector_tests: events * 2,
            bytes,
            messages,
            deliveries: 36_210,
            delivered_bytes: 181_050_000,
            ..Counts::default()
        };
        let direct = RouteCounts {
            pod_watches: 300,
            initial: initial(180_000, 900_000_000),
            churn: churn(36_210, 181_050_000, 0),
        };
        let kubefan = RouteCounts {
            pod_watches: 1,
            initial: Counts { lists: 1, ..initial(5_000, 25_000_000) },
            churn: churn(1_000, 5_000_000, 3_250),
        };
        let final_state = Some(FinalState { version: 7_105, at_version: 300, breaks: 0 });
        Summary { subscribers: 300, objects: 5_000, direct: Some(direct), kubefan: Some(kubefan), final_state }
    }

    #[test]
    fn the_table_shows_both_routes_side_by_side() {
        let expected = "\
300 subscribers of 5,000 pods                          direct  through kubefan
watches on pods, open at the apiserver                    300                1
lists answered by the apiserver                             0                1
the initial state
  objects encoded by the apiserver                    180,000            5,000
  bytes sent by the apiserver                       858.3 MiB         23.8 MiB
then, for each change                                of 1,000         of 1,000
  events sent by the apiserver                          36.21             1.00
  objects encoded by the apiserver                       1.50             1.50
  selectors tested by the apiserver                     72.42             2.00
  bytes sent by the apiserver                       176.8 KiB          4.9 KiB
  messages encoded by kubefan                               -             3.25
  events received by subscribers                        36.21            36.21
  bytes received by subscribers                     176.8 KiB        176.8 KiB

all 300 subscribers are at version 7105
";
        assert_eq!(summary().to_string(), expected);
        assert_eq!(summary().failure(), None);
    }

    #[test]
    fn a_demo_stopped_early_shows_its_figures() {
        let text = Summary { direct: None, kubefan: None, final_state: None, ..summary() }.to_string();
        assert!(
            text.contains("watches on pods, open at the apiserver                      -                -\n"),
            "{text}"
        );
        assert!(text.ends_with("\nstopped before every subscriber was connected through kubefan\n"), "{text}");
    }

    #[test]
    fn a_missed_change_and_a_second_watch_are_failures() {
        let behind = FinalState { version: 7_105, at_version: 298, breaks: 3 };
        let behind = Summary { final_state: Some(behind), ..summary() };
        assert_eq!(behind.failure().unwrap(), "2 of 300 subscribers did not reach version 7105");
        assert!(!behind.to_string().contains("all 300") && behind.to_string().contains("3 broken watches"));
        let second = summary().kubefan.map(|route| RouteCounts { pod_watches: 2, ..route });
        let second = Summary { kubefan: second, ..summary() };
        assert_eq!(second.failure().unwrap(), "kubefan had 2 watches on pods open at once; one is enough");
    }
}
