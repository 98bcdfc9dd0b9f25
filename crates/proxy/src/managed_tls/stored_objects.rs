//! Reads and replaces the Secret and the ConfigMaps at the apiserver: get and update by their
//! names, nothing else. A message never has content of the Secret.

use std::time::{Duration, SystemTime};

use http::header;
use jiff::fmt::rfc2822;
use serde_json::{Value, json};

use super::{
    managed_options::{ManagedOptions, ObjectName},
    material::{CA, Material},
};
use crate::upstream::{Upstream, UpstreamError, client::Verb};

/// What is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    Secret,
    ConfigMap,
}

impl Stored {
    /// The label in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Secret => "secret",
            Self::ConfigMap => "configmap",
        }
    }

    fn path(self, ObjectName { namespace, name }: &ObjectName) -> String {
        let resource = match self {
            Self::Secret => "secrets",
            Self::ConfigMap => "configmaps",
        };
        format!("/api/v1/namespaces/{namespace}/{resource}/{name}")
    }

    fn title(self, name: &ObjectName) -> String {
        match self {
            Self::Secret => format!("the Secret {name}"),
            Self::ConfigMap => format!("the ConfigMap {name}"),
        }
    }
}

/// An object that cannot be read or replaced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{title} cannot be {}: {}", if *.is_write { "updated" } else { "read" }, reason(.error))]
pub struct LookError {
    title: String,
    pub(super) stored: Stored,
    pub(super) is_write: bool,
    /// Why not.
    pub error: UpstreamError,
}

fn reason(error: &UpstreamError) -> String {
    match error {
        UpstreamError::NotFound { .. } => {
            "it does not exist, and kubefan does not create it: apply its manifest again".to_owned()
        }
        error => error.to_string(),
    }
}

impl LookError {
    /// Whether it was denied, or there is no such object: nothing that another try would mend.
    pub(super) fn is_lasting(&self) -> bool {
        matches!(self.error, UpstreamError::Forbidden { .. } | UpstreamError::NotFound { .. })
    }
}

/// An object, and the apiserver's time.
pub(super) struct Found {
    pub(super) object: Value,
    /// `None` if the answer does not have it.
    pub(super) date: Option<SystemTime>,
}

pub(super) async fn get(upstream: &Upstream, stored: Stored, name: &ObjectName) -> Result<Found, LookError> {
    let failed = |error| LookError { title: stored.title(name), stored, is_write: false, error };
    let answer = upstream.get_accept(Verb::Get, &stored.path(name), "application/json").await.map_err(failed)?;
    let date = answer.headers().get(header::DATE).and_then(|date| rfc2822::parse(date.to_str().ok()?).ok());
    let object: Value = serde_json::from_slice(answer.body()).unwrap_or_default();
    // The parser's own message could quote the object.
    if !object["metadata"]["resourceVersion"].is_string() {
        return Err(failed(UpstreamError::invalid("no object in JSON")));
    }
    Ok(Found { object, date: date.map(|date| date.timestamp().into()) })
}

/// Replaces an object. False if it has changed since it was read.
pub(super) async fn replace(
    upstream: &Upstream,
    stored: Stored,
    name: &ObjectName,
    object: &Value,
) -> Result<bool, LookError> {
    let failed = |error| LookError { title: stored.title(name), stored, is_write: true, error };
    upstream.replace(&stored.path(name), object).await.map_err(failed)
}

/// Writes the bundle to a ConfigMap, unless it has it. True if it has it now.
pub(super) async fn publish(upstream: &Upstream, name: &ObjectName, bundle: &str) -> Result<bool, LookError> {
    let mut map = get(upstream, Stored::ConfigMap, name).await?.object;
    if map["data"][CA] == bundle {
        return Ok(true);
    }
    if !map["data"].is_object() {
        map["data"] = json!({});
    }
    map["data"][CA] = Value::String(bundle.to_owned());
    replace(upstream, Stored::ConfigMap, name, &map).await
}

impl Material {
    /// Whether a ConfigMap has the bundle. For reports.
    ///
    /// # Errors
    /// It cannot be read.
    pub async fn is_published(&self, upstream: &Upstream, name: &ObjectName) -> Result<bool, LookError> {
        let map = get(upstream, Stored::ConfigMap, name).await?.object;
        Ok(map["data"][CA].as_str().is_some_and(|has| has == self.bundle()))
    }
}

/// Reads the Secret once and changes nothing. For reports.
///
/// # Errors
/// It cannot be read.
pub async fn look_once(upstream: &Upstream, options: &ManagedOptions, now: Duration) -> Result<Material, LookError> {
    let found = get(upstream, Stored::Secret, &options.secret).await?;
    Ok(Material::read(&found.object, &options.dns_names, now.as_secs()))
}
