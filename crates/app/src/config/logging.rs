//! The section "Logging".

use super::{LogFormat, rules::any, section::section};

section! {
    heading: "Logging";
    /// What is logged, and how, as given.
    options: LoggingOptions;
    /// What is logged, and how.
    config: LoggingConfig {}

    /// The format of log lines on stderr.
    log_format("FORMAT"): LogFormat = LogFormat::Text => format: LogFormat, any;
    /// What is logged: off, error, warn or info, also per module as in
    /// kubefan_upstream=warn,info.
    log_level("LEVEL"): String = "info".to_owned() => level: String, any;
}
