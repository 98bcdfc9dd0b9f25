//! The configuration of `serve`: plain data, validated once. A flag wins over the environment, the
//! environment over the file, the file over the default.
//!
//! It guards against a configuration that does not mean what its author thinks: contradictions,
//! zeros and misspelt names are errors that name the option and the way out, before anything
//! starts.
//!
//! `section` declares the options, one file per heading of `--help`. To add an option, declare it
//! in its section: as a flag if most operators set it, otherwise as a key of the file alone, under
//! `limits` if it limits what clients, caches or files take, or under `tuning`. `moved` has the
//! flags of earlier versions.

pub mod access;
pub mod audit;
pub mod cache;
pub mod callers;
#[cfg(test)]
mod documented;
pub mod environment;
pub mod file;
pub mod logging;
pub mod managed_tls;
pub mod modes;
pub mod moved;
mod names;
mod next_kubefan;
mod no_effect;
pub mod on_demand;
pub mod passthrough;
pub mod peers;
pub mod reload;
mod rules;
mod section;
pub mod serve;
pub mod serving;
pub mod settings;
pub mod traces;
pub mod units;
pub mod upstream;

pub use access::{Access, AuthorizationMode};
pub use audit::{AuditConfig, AuditMode};
pub use cache::CacheCompression;
pub use callers::{CallerConfig, ClientCas};
pub use managed_tls::TlsSource;
pub use next_kubefan::SourceSettings;
pub use on_demand::FormConfig;
pub use passthrough::PassthroughConfig;
pub use peers::{PeerConfig, PeerFiles, PeersName, PeersNames};
pub use reload::{ConfigFile, Configured};
pub use rules::ConfigError;
pub use section::SecondVariable;
pub use serve::{ServeConfig, ServeOptions, default_texts, second_variables};
pub use serving::ConsistentReads;
pub use traces::TraceConfig;
pub use units::{ByteSize, Duration};
pub use upstream::{UpstreamFallback, WatchListMode};

pub use kubefan_server::transport::listen_address::{self as listen, ListenAddress};
pub use kubefan_telemetry::LogFormat;
