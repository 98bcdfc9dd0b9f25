//! Sets up logging to stderr, as text or as JSON. Log lines must never contain a credential or the
//! content of an object.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use super::log_format::LogFormat;

/// Starts logging for the whole process.
///
/// # Errors
/// `level` is not a valid filter, or logging has already started.
pub fn init(format: LogFormat, level: &str) -> Result<(), String> {
    // Filters from before the proxy was a package of its own name its modules `kubefan::…`.
    let filter = EnvFilter::try_new(level.replace("kubefan::", "kubefan_proxy::")).map_err(|error| {
        format!("--log-level {level:?}: {error}; write it like info, or kubefan_proxy::upstream=warn,info for a module")
    })?;
    // Its warning names no setting (`Server cert bypassed`). kubefan warns of that itself.
    let filter = match "kube_client::client::tls=off".parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let started = match format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| format!("cannot start logging: {error}"))
}
