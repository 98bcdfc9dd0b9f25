//! The section "Cache": the resources that are cached from the start, and the history that is
//! retained of each.

use std::{path::PathBuf, time};

use kubefan_informers::ConfiguredResource;
use serde::Deserialize;

use super::{
    ByteSize, ConfigError, Duration,
    rules::{any, at_least, names, optional, size, unusable, wait},
    section::section,
};

/// Whether the cached objects are packed. The versions that they replaced always are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CacheCompression {
    /// As upstream sent them: reading them costs nothing.
    // Helm writes `off` as false.
    #[serde(alias = "false")]
    Off,
    /// By zstd with a dictionary per resource: a fifth of the memory, and about 5 µs for each
    /// object that is read.
    Zstd,
}

kubefan_common::display_choice!(CacheCompression);
section! {
    heading: "Cache";
    /// The resources and the history that are cached, as given.
    options: CacheOptions;
    /// The resources and the history that are cached.
    config: CacheConfig {}

    /// Cache this resource from the start; any name that kubectl takes. It is cached as JSON;
    /// NAME=protobuf and NAME=json+protobuf choose what its clients ask for. Repeat it, or separate
    /// names by commas.
    #[arg(value_delimiter = ',')]
    resources as resource("NAME"): Vec<String> => resources: Vec<ConfiguredResource>, configured_resources;
    /// Cache only this namespace; each one has resource versions of its own. Repeat it, or separate
    /// names by commas.
    #[arg(short = 'n', value_delimiter = ',')]
    namespaces as namespace("NAME"): Vec<String>
        => namespaces: Vec<String>, names(is_namespace, "no name of a namespace");
    /// Save the caches of --resource in this directory, history included, and start from them. A
    /// start while the apiserver is away serves them as stale, to callers that need no review. Only
    /// this user may write the files. Secrets are not saved without --state-key-file.
    state_dir("DIR"): PathBuf => state_dir: Option<PathBuf>, optional(any);
    /// Encrypt the saved caches with the key in this file, 32 bytes in base64, and save Secrets
    /// too.
    state_key_file("FILE"): PathBuf => state_key_file: Option<PathBuf>, optional(any);

    [keys]
    /// Bytes of past events per resource, packed. Raise it if streams fall behind or resumes need
    /// catch-ups, and there is memory.
    /// [default: a tenth of the cached JSON, at least 8Mi]
    limits.ring_bytes_max("SIZE"): ByteSize => ring_bytes_max: Option<u64>, optional(size(1));
    /// Past events per resource. Raise it for a resource whose many small events leave the ring too
    /// early.
    limits.ring_events_max("COUNT"): usize = 100_000 => ring_events_max: usize, at_least(1);
    /// Time that past events are retained. Raise it if clients come back after longer breaks and
    /// must not miss single events.
    limits.ring_age_max("DURATION"): Duration = Duration::from_secs(15 * 60) => ring_age_max: time::Duration, wait;
    /// Bytes of conflated history per resource: older events, reduced to one entry per change. A
    /// subscriber that resumes from far back gets each change once instead of a snapshot. Raise it
    /// if clients come back after hours and get snapshots.
    /// [default: a twentieth of the cached JSON, at least 4Mi]
    limits.conflated_bytes_max("SIZE"): ByteSize => conflated_bytes_max: Option<u64>, optional(size(1));
    /// Bytes that are written to --state-dir in a minute, on average. Raise it if large caches are
    /// saved too seldom, lower it if it wears the disk.
    limits.state_bytes_per_minute("SIZE"): ByteSize = ByteSize(64 << 20) => state_bytes_per_minute: u64, size(1 << 20);
    /// The time between two looks for caches that have to be saved in --state-dir. A crash loses
    /// the history since the last one. Shorten it if that is too much.
    tuning.state_interval("DURATION"): Duration = Duration::from_secs(30) => state_interval: time::Duration, wait;
    /// Pack the cached objects: less memory, more work for each snapshot, list and get. Past events
    /// are always packed. Choose zstd if caches do not fit into memory.
    tuning.cache_compression("off or zstd"): CacheCompression = CacheCompression::Off => compression: CacheCompression, any;
}

/// Resources with the media to cache them in.
fn configured_resources(
    flag: &'static str,
    given: Option<Vec<String>>,
) -> Result<Vec<ConfiguredResource>, ConfigError> {
    let parse = |text: &String| {
        let name = text.split('=').next().unwrap_or_default();
        ConfiguredResource::parse(text).map_err(|wrong| {
            let problem = format!("{wrong:?} is no medium; write {name}=protobuf or {name}=json+protobuf");
            unusable(flag, text, problem)
        })
    };
    let resources: Vec<_> = given.unwrap_or_default().iter().map(parse).collect::<Result<_, _>>()?;
    let only_names = resources.iter().map(|resource| resource.name.clone()).collect();
    if let Some(wrong) = resources.iter().find(|resource| !is_resource_name(&resource.name)) {
        return Err(unusable(flag, &wrong.name, no_resource_name(&wrong.name)));
    }
    names(is_resource_name, "no name of a resource")(flag, Some(only_names))?;
    Ok(resources)
}

/// Error about a text that is no name of a resource.
fn no_resource_name(text: &str) -> &'static str {
    if text.contains(char::is_whitespace) {
        "no name of a resource; separate several by commas, without spaces"
    } else if text.contains('/') {
        "no name of a resource; a subresource cannot be watched, and a group is written like deployments.apps"
    } else {
        "no name of a resource"
    }
}

/// The form of a resource's name as kubectl takes it, such as `pods` or `deployments.v1.apps`.
fn is_resource_name(name: &str) -> bool {
    let label = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    // "pods.v1." is how kubectl writes the core group with a version.
    name.len() <= 316 && name.strip_suffix('.').unwrap_or(name).split('.').all(label)
}

/// A label of RFC 1123, which Kubernetes requires of a namespace's name.
fn is_namespace(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_has_a_name_that_kubectl_takes() {
        for good in ["pods", "pods.v1.", "widgets.v1.example.com", "Pod"] {
            assert!(is_resource_name(good), "{good}");
        }
        for bad in ["", ".", "a..b", "a b", "../x"] {
            assert!(!is_resource_name(bad), "{bad}");
        }
    }
}
