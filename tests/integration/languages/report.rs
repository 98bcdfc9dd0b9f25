//! Reports of runners, as the short texts of the script.

use std::collections::BTreeMap;

use serde_json::Value;
use tokio::time::Instant;

use super::{runner::Runner, script::Expect};
use crate::harness::wait;

/// Items whose texts are compared in part: the script may leave out the reason.
const WITH_REASONS: [&str; 5] = ["disconnected", "restarted", "failed", "error", "gap_begin"];

/// Short forms of keys.
#[derive(Clone)]
pub(super) struct Names {
    pub(super) namespace: String,
    pub(super) elsewhere: String,
}

impl Names {
    /// `a` for an object of the step's namespace, `elsewhere/a` for one of the other.
    pub(super) fn short(&self, key: &Value) -> String {
        let key = key.as_str().unwrap_or_default();
        match key.split_once('/') {
            Some((namespace, name)) if namespace == self.namespace => name.to_owned(),
            Some((namespace, name)) if namespace == self.elsewhere => format!("elsewhere/{name}"),
            _ => key.to_owned(),
        }
    }

    /// An item or a call, such as `DELETED a LEFT_SELECTOR`.
    fn text(&self, item: &Value) -> String {
        let kind = item["item"].as_str().unwrap_or_default();
        let words = match kind {
            "event" => {
                let reason =
                    item["delete_reason"].as_str().filter(|it| !matches!(*it, "UNSPECIFIED" | "OBJECT_DELETED"));
                let kind = item["type"].as_str().unwrap_or_default();
                return join(&[kind, &self.short(&item["key"]), reason.unwrap_or_default()]);
            }
            "snapshot_begin" if item["restarted_from"] != "" => "restarted".to_owned(),
            "snapshot_end" => number(&item["count"]),
            "gap_begin" => item["reason"].as_str().unwrap_or_default().to_owned(),
            "add" if item["initial"] == true => format!("{} initial", self.short(&item["key"])),
            "delete" if item["unknown"] == true => format!("{} unknown", self.short(&item["key"])),
            "add" | "update" | "delete" => self.short(&item["key"]),
            "disconnected" | "restarted" | "failed" | "error" => error_text(&item["error"]),
            "" => item.to_string(),
            _ => String::new(),
        };
        join(&[kind, &words])
    }
}

/// A number, also if JSON has it as a text.
fn number(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn join(words: &[&str]) -> String {
    words.iter().filter(|word| !word.is_empty()).copied().collect::<Vec<_>>().join(" ")
}

/// An error as `Class REASON field`. The languages without classes of errors tell the same by code
/// and reason. A class that contradicts them is shown with them.
pub(super) fn error_text(error: &Value) -> String {
    let text = |field: &str| error[field].as_str().unwrap_or_default();
    let reason = text("reason");
    let code: String = text("code").chars().filter(char::is_ascii_alphabetic).collect::<String>().to_lowercase();
    let class = match (&*code, reason) {
        ("outofrange", _) if error["expired"] == true => "Expired",
        ("notfound", _) => "NotFound",
        ("failedprecondition", _) => "NotCached",
        ("invalidargument", "") => "InvalidAddress",
        ("invalidargument", _) => "InvalidArgument",
        ("unauthenticated", _) => "Unauthenticated",
        ("permissiondenied", _) => "Forbidden",
        ("unavailable", "") => "Unreachable",
        ("unavailable", _) => "Unavailable",
        ("resourceexhausted", _) => "LimitReached",
        ("internal", "") => "ProtocolError",
        _ => &*code,
    };
    match error["class"].as_str() {
        Some(claimed) if claimed != class => {
            format!("{claimed} with the code {} and the reason {reason:?}: {}", text("code"), text("message"))
        }
        _ => join(&[class, reason, text("field")]),
    }
}

/// The events of one source, for the comparison of languages.
pub(super) type Events = BTreeMap<String, Vec<[String; 3]>>;

/// Reports of one language in a step.
#[derive(Default)]
pub(super) struct Reported {
    pub(super) events: Events,
    /// The last object of each source by name.
    pub(super) objects: BTreeMap<(String, String), String>,
    /// The version and the cluster that each source resumes from.
    pub(super) resume: BTreeMap<String, [String; 2]>,
    texts: BTreeMap<String, Vec<String>>,
}

impl Reported {
    /// Waits for the items that the script expects of a source, and for no others in between.
    /// `source` is the name that the runner knows.
    pub(super) async fn expect(
        &mut self,
        runner: &mut Runner,
        source: &str,
        expect: &Expect,
        names: &Names,
    ) -> Result<(), String> {
        let mut missing: Vec<&str> = expect.items.iter().map(String::as_str).collect();
        let deadline = Instant::now() + wait::SOON;
        while let Some(wanted) = missing.first().copied() {
            let got = self
                .next(runner, source, expect, wanted, deadline, names)
                .await
                .map_err(|why| format!("{}: expected {missing:?}, and {why}{}", expect.of, self.so_far(&expect.of)))?;
            let wanted = |wanted: &&str| is_wanted(wanted, &got);
            let found = if expect.any_order {
                missing.iter().position(wanted)
            } else {
                missing.first().filter(|it| wanted(it)).map(|_| 0)
            };
            match found {
                Some(at) => _ = missing.remove(at),
                None => {
                    let so_far = self.so_far(&expect.of);
                    return Err(format!("{}: expected {missing:?}, got {got:?}{so_far}", expect.of));
                }
            }
        }
        Ok(())
    }

    /// The next item that counts, as a text. Bookmarks come at any time, and attempts to connect
    /// may fail any number of times.
    async fn next(
        &mut self,
        runner: &mut Runner,
        source: &str,
        expect: &Expect,
        wanted: &str,
        deadline: Instant,
        names: &Names,
    ) -> Result<String, String> {
        let of = &expect.of;
        loop {
            let item = runner.next(source, deadline).await?;
            let text = names.text(&item);
            if let (Some(version), Some(cluster)) = (item["resume"].as_str(), item["cluster"].as_str()) {
                self.resume.insert(of.to_owned(), [version.to_owned(), cluster.to_owned()]);
            }
            let kind = text.split(' ').next().unwrap_or_default();
            if item["item"] == "event" {
                let [version, object] =
                    ["version", "object"].map(|it| item[it].as_str().unwrap_or_default().to_owned());
                self.objects.insert((of.to_owned(), names.short(&item["key"])), object.clone());
                self.events.entry(of.to_owned()).or_default().push([text.clone(), version, object]);
            }
            let texts = self.texts.entry(of.to_owned()).or_default();
            let is_repeated = kind == "disconnected" && texts.last().is_some_and(|last| last.starts_with(kind));
            let is_silent = matches!(kind, "bookmark" | "error") && !wanted.starts_with(kind);
            let is_break = expect.over_breaks && matches!(kind, "disconnected" | "reconnected");
            if is_repeated || is_silent || is_break {
                continue;
            }
            texts.push(text.clone());
            return Ok(text);
        }
    }

    fn so_far(&self, of: &str) -> String {
        self.texts.get(of).map(|texts| format!("; reported so far: {texts:?}")).unwrap_or_default()
    }
}

/// Whether a reported text is the wanted one. The script may leave out reasons.
pub(super) fn is_wanted(wanted: &str, got: &str) -> bool {
    let kind = got.split(' ').next().unwrap_or_default();
    let rest = got.strip_prefix(wanted);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ') && WITH_REASONS.contains(&kind))
}

/// The first difference between the events of two languages.
pub(super) fn difference(reference: &Events, other: &Events) -> Option<String> {
    for (of, events) in reference {
        let others = other.get(of).map(Vec::as_slice).unwrap_or_default();
        for (at, event) in events.iter().enumerate() {
            if others.get(at) != Some(event) {
                return Some(format!("{of}: event {at} is {:?}, and {event:?} in the first language", others.get(at)));
            }
        }
    }
    None
}
