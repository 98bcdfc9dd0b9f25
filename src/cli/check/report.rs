//! The findings of `kubefan check`, printed as they are made, or as JSON at the end.

use std::{
    env,
    io::{self, IsTerminal, Write, stderr, stdout},
};

use serde::Serialize;
use serde_json::json;

use crate::cli::visible::{print_json, visible_line};

/// Result of a check, from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Ok,
    Warning,
    Error,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    /// The escape sequence of its colour: green, yellow, red.
    fn colour(self) -> &'static str {
        match self {
            Self::Ok => "\x1b[32m",
            Self::Warning => "\x1b[33m",
            Self::Error => "\x1b[31m",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// The subject of the check.
    pub(super) check: String,
    pub(super) result: Outcome,
    /// The finding.
    pub(super) message: String,
    /// Advice. Empty if nothing needs to be done.
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn ok(check: impl Into<String>, message: impl Into<String>) -> Self {
        Self { check: check.into(), result: Outcome::Ok, message: message.into(), remedy: String::new() }
    }

    pub(super) fn warning(check: impl Into<String>, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { result: Outcome::Warning, remedy: remedy.into(), ..Self::ok(check, message) }
    }

    pub(super) fn error(check: impl Into<String>, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { result: Outcome::Error, ..Self::warning(check, message, remedy) }
    }

    /// One line.
    fn line(&self, coloured: bool) -> String {
        let Self { check, result, message, remedy } = self;
        let (begin, end) = if coloured { (result.colour(), "\x1b[0m") } else { ("", "") };
        let remedy = if remedy.is_empty() { String::new() } else { format!("; {remedy}") };
        let text = format!("{check}: {message}{remedy}");
        format!("  {begin}{:<7}{end}  {}", result.as_str(), visible_line(&text))
    }
}

#[derive(Serialize)]
struct Group {
    name: &'static str,
    checks: Vec<Finding>,
}

/// Collects the findings.
pub(super) struct Report {
    groups: Vec<Group>,
    as_json: bool,
    coloured: bool,
    /// Whether a terminal shows the step in progress.
    shows_progress: bool,
    /// The first failure to print.
    failed: Option<io::Error>,
}

impl Report {
    pub(super) fn to_stdout(as_json: bool) -> Self {
        // https://no-color.org
        let wanted = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self {
            groups: Vec::new(),
            as_json,
            coloured: wanted && stdout().is_terminal(),
            shows_progress: stderr().is_terminal(),
            failed: None,
        }
    }

    /// The findings that follow are of this group.
    pub(super) fn group(&mut self, name: &'static str) {
        self.groups.push(Group { name, checks: Vec::new() });
        if !self.as_json {
            let space = if self.groups.len() > 1 { "\n" } else { "" };
            self.print(&format!("{space}{name}"));
        }
    }

    pub(super) fn add(&mut self, finding: Finding) {
        if !self.as_json {
            self.print(&finding.line(self.coloured));
        }
        if let Some(group) = self.groups.last_mut() {
            group.checks.push(finding);
        }
    }

    pub(super) fn add_all(&mut self, findings: impl IntoIterator<Item = Finding>) {
        for finding in findings {
            self.add(finding);
        }
    }

    /// Shows on a terminal that a step has begun which may take its time.
    pub(super) fn waits_for(&self, what: &str) {
        if self.shows_progress {
            // Progress that cannot be shown is no failure.
            let _ = write!(stderr(), "\r\x1b[K  ...      {}", visible_line(what)).and_then(|()| stderr().flush());
        }
    }

    /// Prints the summary, and returns the worst result.
    ///
    /// # Errors
    /// Something could not be printed.
    pub(super) fn finish(mut self) -> io::Result<Outcome> {
        let all = || self.groups.iter().flat_map(|group| &group.checks).map(|finding| finding.result);
        let count = |wanted: Outcome| all().filter(|result| *result == wanted).count();
        let worst = all().max().unwrap_or(Outcome::Ok);
        let errors = count(Outcome::Error);
        let warnings = count(Outcome::Warning);
        if self.as_json {
            let report = json!({ "result": worst, "errors": errors, "warnings": warnings, "groups": self.groups });
            let mut text = Vec::new();
            print_json(&mut text, &report)?;
            self.print(String::from_utf8_lossy(&text).trim_end());
        } else {
            self.print(&format!("\n{}", summary(errors, warnings)));
        }
        self.failed.map_or(Ok(worst), Err)
    }

    fn print(&mut self, text: &str) {
        let erase = if self.shows_progress { write!(stderr(), "\r\x1b[K") } else { Ok(()) };
        let printed = erase.and_then(|()| writeln!(stdout(), "{text}"));
        self.failed = self.failed.take().or(printed.err());
    }
}

fn summary(errors: usize, warnings: usize) -> String {
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    match (errors, warnings) {
        (0, 0) => "everything is fine".to_owned(),
        (0, warnings) => plural(warnings, "warning"),
        (errors, warnings) => format!("{}, {}", plural(errors, "error"), plural(warnings, "warning")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_with_what_to_do() {
        let finding = Finding::error("TLS", "no trusted CA\nhas signed it", "name the CA");
        assert_eq!(finding.line(false), "  error    TLS: no trusted CA has signed it; name the CA");
        assert_eq!(Finding::ok("TLS", "version 1.3").line(false), "  ok       TLS: version 1.3");
        assert_eq!(Finding::ok("a", "b").line(true), "  \x1b[32mok     \x1b[0m  a: b");
    }

    #[test]
    fn text_of_a_server_cannot_control_the_terminal() {
        let line = Finding::ok("a\u{9b}31m", "b\u{1b}[2J\u{202e}").line(false);
        assert!(!line.contains(|c: char| c.is_control() || c == '\u{202e}'), "{line:?}");
    }

    #[test]
    fn the_summary_counts_errors_and_warnings() {
        let cases = [
            ((0, 0), "everything is fine"),
            ((0, 1), "1 warning"),
            ((1, 0), "1 error, 0 warnings"),
            ((2, 3), "2 errors, 3 warnings"),
        ];
        for ((errors, warnings), expected) in cases {
            assert_eq!(summary(errors, warnings), expected);
        }
        assert!(Outcome::Error > Outcome::Warning && Outcome::Warning > Outcome::Ok);
    }
}
