//! The operator's options of the managed certificate.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, de};

/// The longest time between two looks at the Secret.
const LOOK_INTERVAL_MAX: Duration = Duration::from_secs(30);
/// Looks within the shorter of a certificate's life and the overlap.
const LOOKS_MIN: u32 = 20;

/// An object of a namespace, as `NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// A text that is not a namespace and a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} names no object; write it like kubefan/kubefan-tls: NAMESPACE/NAME")]
pub struct InvalidObjectName {
    text: String,
}

impl FromStr for ObjectName {
    type Err = InvalidObjectName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_name = |name: &str| name.len() <= 253 && name.split('.').all(is_dns_label);
        match text.split_once('/') {
            Some((namespace, name)) if is_dns_label(namespace) && is_name(name) => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err(InvalidObjectName { text: text.chars().take(256).collect() }),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl<'de> Deserialize<'de> for ObjectName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The objects that are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The Secret with the CA and its key.
    Secret,
    /// A ConfigMap with the CA.
    ConfigMap,
    /// A Secret with the certificate and its key, without the CA's.
    Copy,
}

impl Stored {
    /// The label in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Secret => "secret",
            Self::ConfigMap => "configmap",
            Self::Copy => "copy",
        }
    }

    /// The resource, as a role names it.
    pub fn resource(self) -> &'static str {
        match self {
            Self::Secret | Self::Copy => "secrets",
            Self::ConfigMap => "configmaps",
        }
    }

    /// The kind, as a manifest names it.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Secret | Self::Copy => "Secret",
            Self::ConfigMap => "ConfigMap",
        }
    }
}

/// Lifetimes of the certificates, and the overlap of the CAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    /// Lifetime of a serving certificate. It is renewed after two thirds of it.
    pub certificate: Duration,
    /// Lifetime of a CA.
    pub ca: Duration,
    /// Time for which a new CA is published before it signs anything.
    pub overlap: Duration,
}

impl Lifetimes {
    /// The rest of a CA's life at which the next one is made: enough to publish it, and then a
    /// whole life of a serving certificate; the overlap twice, so that an outage as long as one
    /// breaks nothing.
    pub fn next_ca_before_end(&self) -> Duration {
        self.certificate + 2 * self.overlap
    }

    /// The shortest life of a CA: at least half of it passes before the next one is made.
    pub fn ca_min(&self) -> Duration {
        2 * self.next_ca_before_end()
    }

    /// The time between two looks at the Secret.
    pub fn look_interval(&self) -> Duration {
        (self.certificate.min(self.overlap) / LOOKS_MIN).min(LOOK_INTERVAL_MAX)
    }
}

/// The managed certificate, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedOptions {
    /// The Secret with certificate, CA and keys.
    pub secret: ObjectName,
    /// The names that the certificate is for, in lower case.
    pub dns_names: Vec<String>,
    /// The ConfigMaps that the CA is published in.
    pub ca_config_maps: Vec<ObjectName>,
    /// The Secrets that get the certificate and its key, without the CA's.
    pub copies: Vec<ObjectName>,
    /// The times.
    pub lifetimes: Lifetimes,
}

impl ManagedOptions {
    /// Objects that get a part of the Secret.
    pub fn published_in(&self) -> impl Iterator<Item = (Stored, &ObjectName)> {
        let maps = self.ca_config_maps.iter().map(|name| (Stored::ConfigMap, name));
        maps.chain(self.copies.iter().map(|name| (Stored::Copy, name)))
    }
}

/// A label of a DNS name, in lower case (RFC 1123).
pub fn is_dns_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(is_inner) && !text.starts_with('-') && !text.ends_with('-')
}
