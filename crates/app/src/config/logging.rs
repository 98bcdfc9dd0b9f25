//! The section "Logging".

use super::{LogFormat, rules::any, section::section};

section! {
    heading: "Logging";
    /// The log lines and their format, as given.
    options: LoggingOptions;
    /// The log lines and their format.
    config: LoggingConfig {}

    /// The format of log lines on stderr.
    log_format("FORMAT"): LogFormat = LogFormat::Text => format: LogFormat, any;
    /// The level of log lines: off, error, warn or info, also per module as in
    /// kubefan_upstream=warn,info.
    log_level("LEVEL"): String = "info".to_owned() => level: String, any;
}
