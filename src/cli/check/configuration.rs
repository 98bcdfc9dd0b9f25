//! The group "configuration": flags, environment and file.

use std::{fs::OpenOptions, path::Path};

use kubefan_app::config::{AuthorizationMode, ServeConfig};

use super::report::{Finding, Report};
use crate::cli::{
    given::Given,
    serve::{self, ServeArgs},
};

/// The configuration that `serve` would run with; `None` if it would not start.
pub(super) fn check(
    args: ServeArgs,
    variables: &[String],
    given: &Given<'_>,
    report: &mut Report,
) -> Option<ServeConfig> {
    report.group("configuration");
    let (config, _) = match serve::configuration(args, given) {
        Ok(configured) => configured,
        Err(error) => {
            let text = error.to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            report.add(Finding::error("flags, environment and file", text, ""));
            return None;
        }
    };
    report.add(Finding::ok("flags, environment and file", described(&config)));
    for message in serve::unknown_variables(variables) {
        report.add(Finding::warning("environment", message, "correct its name or remove it"));
    }
    for option in &config.without_effect {
        report.add(Finding::warning("flags, environment and file", option, "leave it out"));
    }
    if !reviews_callers(&config) && !config.serving.listen.is_local() {
        report.add(Finding::warning(
            "callers",
            format!("every client that can reach {} can read everything that is cached", config.serving.listen),
            "leave --access=insecure out",
        ));
    }
    report.add_all(config.audit.path.as_deref().map(judge_audit_log));
    Some(config)
}

/// A log that cannot be opened stops the start. The check creates no file.
fn judge_audit_log(path: &Path) -> Finding {
    let check = "audit log";
    let shown = path.display();
    let remedy = "name a file that kubefan may write (--audit-log-path), or - for stdout";
    if path == Path::new("-") {
        return Finding::ok(check, "goes to stdout");
    }
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.exists() {
        return match OpenOptions::new().append(true).open(path) {
            Ok(_) => Finding::ok(check, format!("{shown} can be written")),
            Err(error) => Finding::error(check, format!("{shown} cannot be written: {error}"), remedy),
        };
    }
    match folder.metadata() {
        Ok(found) if found.is_dir() && !found.permissions().readonly() => {
            Finding::ok(check, format!("{shown} can be created"))
        }
        Ok(_) => Finding::error(check, format!("{} cannot be written", folder.display()), remedy),
        Err(error) => Finding::error(check, format!("{} cannot be used: {error}", folder.display()), remedy),
    }
}

fn described(config: &ServeConfig) -> String {
    let names: Vec<_> = config.cache.resources.iter().map(|resource| resource.name.as_str()).collect();
    let resources = match names.as_slice() {
        [] => "no resource from the start".to_owned(),
        names => format!("caches {}", names.join(", ")),
    };
    let scope = match config.cache.namespaces.as_slice() {
        [] => String::new(),
        namespaces => format!(" in {}", namespaces.join(", ")),
    };
    let callers = if reviews_callers(config) { "authorizes callers" } else { "lets every caller read" };
    format!("{resources}{scope}, listens on {}, {callers}", config.serving.listen)
}

/// Whether callers only read objects that the apiserver lets them read.
pub(super) fn reviews_callers(config: &ServeConfig) -> bool {
    config.access.mode() == AuthorizationMode::Webhook
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::*;

    #[test]
    fn an_audit_log_needs_a_place_that_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("audit.log");
        let judged = |path: &Path| judge_audit_log(path).result;
        assert_eq!(judged(&file), Outcome::Ok);
        assert!(!file.exists(), "nothing is created");
        std::fs::write(&file, "").unwrap();
        assert_eq!(judged(&file), Outcome::Ok);
        assert_eq!(judged(Path::new("-")), Outcome::Ok);
        assert_eq!(judged(&file.join("below-a-file")), Outcome::Error);
        assert_eq!(judged(&dir.path().join("none/audit.log")), Outcome::Error);
        assert_eq!(judged(dir.path()), Outcome::Error, "a directory");
    }
}
