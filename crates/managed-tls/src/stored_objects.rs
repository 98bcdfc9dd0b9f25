//! Reads and replaces the Secret, the ConfigMaps and the copies at the apiserver: get and update by
//! their names, nothing else. A message never has content of a Secret.

use std::time::{Duration, SystemTime};

use http::header;
use jiff::fmt::rfc2822;
use kubefan_upstream::{Upstream, UpstreamError, client::Verb};
use serde_json::{Map, Value};

use super::{
    managed_options::{ManagedOptions, ObjectName, Stored},
    material::{Material, Part},
};

/// An object that cannot be read or replaced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{title} cannot be {}: {}", if *.is_write { "updated" } else { "read" }, reason(.error))]
pub struct LookError {
    title: String,
    pub(super) stored: Stored,
    pub(super) is_write: bool,
    /// The reason.
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
    /// Whether it was denied, or there is no such object: a failure that a retry would not change.
    pub(super) fn is_lasting(&self) -> bool {
        matches!(self.error, UpstreamError::Forbidden { .. } | UpstreamError::NotFound { .. })
    }
}

fn path(stored: Stored, ObjectName { namespace, name }: &ObjectName) -> String {
    format!("/api/v1/namespaces/{namespace}/{}/{name}", stored.resource())
}

fn title(stored: Stored, name: &ObjectName) -> String {
    format!("the {} {name}", stored.kind())
}

/// An object, and the apiserver's time.
pub(super) struct Found {
    pub(super) object: Value,
    /// `None` if the answer does not have it.
    pub(super) date: Option<SystemTime>,
}

pub(super) async fn get(upstream: &Upstream, stored: Stored, name: &ObjectName) -> Result<Found, LookError> {
    let failed = |error| LookError { title: title(stored, name), stored, is_write: false, error };
    let answer = upstream.get_accept(Verb::Get, &path(stored, name), "application/json").await.map_err(failed)?;
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
    let failed = |error| LookError { title: title(stored, name), stored, is_write: true, error };
    upstream.replace(&path(stored, name), object).await.map_err(failed)
}

/// Writes to a ConfigMap or a copy its part of the Secret, unless it has it. True if it has it now.
pub(super) async fn publish(
    upstream: &Upstream,
    stored: Stored,
    name: &ObjectName,
    part: &Part,
) -> Result<bool, LookError> {
    let mut object = get(upstream, stored, name).await?.object;
    if !fill(&mut object, part) {
        return Ok(true);
    }
    replace(upstream, stored, name, &object).await
}

/// Gives an object its part. False if it has it.
pub(super) fn fill(object: &mut Value, part: &Part) -> bool {
    if part.iter().all(|(key, value)| object["data"][key] == *value) {
        return false;
    }
    let mut data = object["data"].as_object().cloned().unwrap_or_default();
    data.extend(part.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    // Sent as null, a key would stay, without a value.
    object["data"] = Value::Object(data.into_iter().filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>());
    true
}

impl Material {
    /// Whether a ConfigMap or a copy has its part of the Secret. For reports.
    ///
    /// # Errors
    /// If the object cannot be read.
    pub async fn is_published(
        &self,
        upstream: &Upstream,
        stored: Stored,
        name: &ObjectName,
    ) -> Result<bool, LookError> {
        let mut object = get(upstream, stored, name).await?.object;
        let part = self.part(stored);
        Ok(!part.is_empty() && !fill(&mut object, &part))
    }
}

/// Reads the Secret once and changes nothing. For reports.
///
/// # Errors
/// If an object cannot be read.
pub async fn look_once(upstream: &Upstream, options: &ManagedOptions, now: Duration) -> Result<Material, LookError> {
    let found = get(upstream, Stored::Secret, &options.secret).await?;
    Ok(Material::read(&found.object, &options.dns_names, now.as_secs()))
}
