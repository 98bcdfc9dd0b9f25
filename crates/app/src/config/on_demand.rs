//! The section "On demand": the caches that readers start, of further resources and of further
//! encodings, and their limits.

use std::time;

use serde::Deserialize;

use super::{
    ByteSize, Duration,
    rules::{any, at_least, or_false, size, wait},
    section::section,
};

/// Whether objects are also cached as protobuf, for clients that ask for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ProtobufMode {
    /// While clients ask for it.
    #[serde(alias = "true")]
    On,
    /// Never: these requests go upstream.
    // Helm writes `off` as false, and `on` as true.
    #[serde(alias = "false")]
    Off,
}

kubefan_common::display_choice!(ProtobufMode);
section! {
    heading: "On demand";
    /// The caches that readers start, as given.
    options: OnDemandOptions;
    /// The caches that readers start.
    config: OnDemandConfig {}

    /// Cache further resources when a client reads them
    /// [default: true if --listen is a loopback address or a Unix socket]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    on_demand("BOOL"): bool => is_on: bool, or_false;
    /// Also cache the apiserver's own tables, which `kubectl get` prints, when a client asks for
    /// them: one more watch and one more copy of the objects per resource. Without it these
    /// requests go upstream.
    // An operator who wants to spare the apiserver reads tables there: here they would cost a third
    // copy of the objects.
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    cache_tables("BOOL"): bool = false => caches_tables: bool, any;

    [keys]
    /// Resources cached on demand at a time. Watches of more go upstream over HTTP. Raise it, with
    /// memory, if clients read more kinds of resources than fit.
    limits.on_demand_resources_max("COUNT"): usize = 16 => resources_max: usize, at_least(1);
    /// Objects in one resource cached on demand. Raise it, with memory, for a larger resource, or
    /// name that with --resource.
    limits.on_demand_objects_max("COUNT"): usize = 100_000 => objects_max: usize, at_least(1);
    /// Bytes in all resources cached on demand. Set it by the memory for resources that clients
    /// choose.
    limits.on_demand_bytes_max("SIZE"): ByteSize = ByteSize(512 << 20) => bytes_max: u64, size(1);
    /// Bytes of all objects cached as protobuf because a client asked for it; requests for more go
    /// upstream. Set it by the memory for copies in protobuf.
    limits.protobuf_bytes_max("SIZE"): ByteSize = ByteSize(512 << 20) => protobuf_bytes_max: u64, size(1);
    /// Bytes of all cached tables; requests for more go upstream. Set it by the memory for tables.
    limits.cache_tables_bytes_max("SIZE"): ByteSize = ByteSize(512 << 20) => tables_bytes_max: u64, size(1);
    /// Evict a resource cached on demand that no client reads for this long. Lengthen it if
    /// resources are cached again and again.
    tuning.on_demand_idle_timeout("DURATION"): Duration = Duration::from_secs(10 * 60)
        => idle_timeout: time::Duration, wait;
    /// Also cache objects of built-in types as protobuf when a client asks for it; with off these
    /// requests go upstream, unless --resource names protobuf. Choose off to save the memory of
    /// copies in protobuf.
    tuning.protobuf("on or off"): ProtobufMode = ProtobufMode::On => protobuf_mode: ProtobufMode, any;
}

/// Limits of the objects that are cached in another encoding than JSON.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FormConfig {
    /// Bytes of all objects of all resources.
    pub bytes_max: u64,
    /// A resource that is not read for this long is evicted, like one that is cached on demand.
    pub idle_timeout: time::Duration,
}

impl OnDemandConfig {
    /// Limits of the objects cached as protobuf; `None` if none are cached.
    pub fn protobuf(&self) -> Option<FormConfig> {
        let form = FormConfig { bytes_max: self.protobuf_bytes_max, idle_timeout: self.idle_timeout };
        (self.protobuf_mode == ProtobufMode::On).then_some(form)
    }

    /// Limits of the cached tables; `None` if none are cached.
    pub fn tables(&self) -> Option<FormConfig> {
        let form = FormConfig { bytes_max: self.tables_bytes_max, idle_timeout: self.idle_timeout };
        self.caches_tables.then_some(form)
    }
}
