//! From a request's fields to what they select; every fault names the field.

use std::time::Duration;

use crate::{
    fanout::{Catalog, Refusal, Served},
    model::{
        ResourceVersion,
        selection::Selection,
        selector::{FieldSelector, LabelSelector},
    },
    proto::v1alpha1::Target,
};

/// Names longer than this are refused: Kubernetes allows 253 characters for names and groups.
const NAME_BYTES_MAX: usize = 512;

/// A target that was found, and what it selects.
pub struct Selected {
    /// The cache.
    pub served: Served,
    /// The objects.
    pub selection: Selection,
}

/// Finds the cache of a target and binds its selectors.
pub async fn select(catalog: &impl Catalog, target: Option<Target>) -> Result<Selected, Refusal> {
    let target = target.unwrap_or_default();
    let invalid = |field, message: String| Refusal::Invalid { field, message };
    if target.resource.is_empty() {
        return Err(invalid("target.resource", "required: a plural name such as \"pods\"".into()));
    }
    let names = [
        ("target.group", &target.group),
        ("target.version", &target.version),
        ("target.resource", &target.resource),
        ("target.namespace", &target.namespace),
        ("target.name", &target.name),
    ];
    for (field, name) in names {
        if name.len() > NAME_BYTES_MAX {
            return Err(invalid(field, format!("longer than {NAME_BYTES_MAX} bytes")));
        }
        // Names become parts of paths upstream.
        if name.contains(['/', '%', '?', '#']) || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(invalid(field, format!("{name:?} is no name: it has a character that names cannot have")));
        }
    }
    // Selectors first: what can be refused without asking anyone is.
    let labels = LabelSelector::parse(&target.label_selector)
        .map_err(|error| invalid("target.label_selector", error.to_string()))?;
    let fields = FieldSelector::parse(&target.field_selector)
        .map_err(|error| invalid("target.field_selector", error.to_string()))?;
    let served = catalog.find(&target.group, &target.version, &target.resource, &target.namespace).await?;
    if !served.namespaced && !target.namespace.is_empty() {
        return Err(invalid("target.namespace", format!("{} are not namespaced; leave it empty", served.gvr)));
    }
    let selection = Selection::bind(
        &target.namespace,
        &target.name,
        labels,
        &fields,
        &served.fields,
        served.parser.clone(),
        &served.gvr,
    )
    .map_err(|error| invalid("target.field_selector", error.to_string()))?;
    Ok(Selected { served, selection })
}

/// A request's resource version; `None` for "any".
pub fn version(text: &str) -> Result<Option<ResourceVersion>, Refusal> {
    let invalid = |error: crate::model::version::InvalidVersion| Refusal::Invalid {
        field: "resource_version",
        message: error.to_string(),
    };
    ResourceVersion::parse_request(text).map_err(invalid)
}

/// The time a watch may last; `None` for no limit.
pub fn timeout(seconds: i64) -> Result<Option<Duration>, Refusal> {
    match u64::try_from(seconds) {
        Ok(0) => Ok(None),
        Ok(seconds) => Ok(Some(Duration::from_secs(seconds.min(u64::from(u32::MAX))))),
        Err(_) => Err(Refusal::Invalid { field: "timeout_seconds", message: format!("{seconds} is negative") }),
    }
}

/// The silence after which a bookmark is sent.
pub fn bookmark_interval(interval: Option<prost_types::Duration>) -> Result<Duration, Refusal> {
    const DEFAULT: Duration = Duration::from_secs(60);
    const LEAST: Duration = Duration::from_secs(1);
    let Some(interval) = interval else { return Ok(DEFAULT) };
    let invalid = |message: String| Refusal::Invalid { field: "bookmark_interval", message };
    // Looked at first: the conversion overflows at the least values.
    if interval.seconds < 0 || interval.nanos < 0 {
        return Err(invalid("it is negative".to_owned()));
    }
    let interval = Duration::try_from(interval).map_err(|error| invalid(error.to_string()))?;
    if interval < LEAST {
        return Err(invalid(format!("{interval:?} is less than {LEAST:?}")));
    }
    Ok(interval.min(Duration::from_secs(24 * 3600)))
}
