//! Selects the lines to log: those of kubefan at the given level, and errors of libraries.
//!
//! Libraries warn about actions of a client: rustls about a server name, with the whole name, and
//! h2 about each reset stream. These are not kubefan's faults.

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// The level of libraries, unless a module of theirs is named.
const LIBRARIES: &str = "error";

/// Log targets from before each part of the proxy was a package, and their targets now, in the
/// order of replacement.
const TARGETS_BEFORE: [(&str, &str); 5] = [
    ("kubefan::", "kubefan_proxy::"),
    ("kubefan_proxy::kube_encoding", "kubefan_cache::kube_encoding"),
    ("kubefan_proxy::config", "kubefan_app::config"),
    ("kubefan_proxy::", "kubefan_"),
    ("kubefan_proxy", "kubefan"),
];

/// The filter for a level such as `info`, or for levels of modules as in
/// `kubefan_upstream=warn,info`.
///
/// # Errors
/// The level is invalid.
pub(super) fn filter(level: &str) -> Result<EnvFilter, String> {
    let directives = directives(level);
    if directives.is_empty() {
        return Err(format!("--log-level {level:?} names no level; write it like info"));
    }
    // The library takes any other word for a module, and then logs nothing of kubefan.
    let is_no_level = |part: &&str| !part.is_empty() && !part.contains('=') && part.parse::<LevelFilter>().is_err();
    if let Some(part) = level.split(',').map(str::trim).find(is_no_level) {
        return Err(format!(
            "--log-level {level:?}: {part:?} is no level; choose off, error, warn or info, or write it like \
             kubefan_upstream=warn,info for a module"
        ));
    }
    let filter = EnvFilter::try_new(directives).map_err(|error| {
        format!("--log-level {level:?}: {error}; write it like info, or kubefan_upstream=warn,info for a module")
    })?;
    // Their lines name no setting and no server (`Server cert bypassed`, `failed to verify TLS
    // certificate`). kubefan warns of both itself.
    let twice = ["kube_client::client::tls=off", "rustls_platform_verifier=off"];
    Ok(twice.into_iter().fold(filter, |filter, off| filter.add_directive(off.parse().expect("a directive"))))
}

/// The directives of a filter, in which a level without a module is that of kubefan's packages.
fn directives(level: &str) -> String {
    let level = TARGETS_BEFORE.iter().fold(level.to_owned(), |level, (before, now)| level.replace(before, now));
    // An empty part would be parsed as `error`.
    let parts = level.split(',').map(str::trim).filter(|part| !part.is_empty());
    let of_kubefan = |part: &str| match part.parse::<LevelFilter>() {
        Ok(LevelFilter::OFF) => "off,kubefan=off".to_owned(),
        Ok(level) => format!("{LIBRARIES},kubefan={level}"),
        Err(_) => part.to_owned(),
    };
    parts.map(of_kubefan).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_that_of_kubefan_and_libraries_log_errors() {
        for (given, directives) in [
            ("info", "error,kubefan=info"),
            ("WARN", "error,kubefan=warn"),
            ("off", "off,kubefan=off"),
            ("kubefan_upstream=warn,info", "kubefan_upstream=warn,error,kubefan=info"),
            ("kubefan::upstream=warn", "kubefan_upstream=warn"),
            ("kubefan_proxy::upstream::client=warn", "kubefan_upstream::client=warn"),
            ("kubefan::config=warn", "kubefan_app::config=warn"),
            ("kubefan_proxy=warn", "kubefan=warn"),
            ("info,h2=debug", "error,kubefan=info,h2=debug"),
            ("info, h2=debug,", "error,kubefan=info,h2=debug"),
        ] {
            assert_eq!(super::directives(given), directives, "{given}");
            assert!(filter(given).is_ok());
        }
        for (given, part) in [("warning", "warning"), ("info,kubefan_upstream", "kubefan_upstream")] {
            let error = filter(given).unwrap_err();
            assert!(error.starts_with(&format!("--log-level {given:?}: {part:?} is no level; choose ")), "{error}");
        }
        let error = filter("kubefan_upstream=loud").unwrap_err();
        assert!(error.starts_with("--log-level \"kubefan_upstream=loud\": "), "{error}");
    }
}
