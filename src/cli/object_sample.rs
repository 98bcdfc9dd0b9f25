//! The first objects of a resource: how many there are in all, and how large they are.

use serde::de::IgnoredAny;

use kubefan_common::api_json::{ListJson, ListMeta};
use kubefan_upstream::{
    Upstream, UpstreamError,
    client::{Verb, encode_query},
};

/// The objects that are read. Their mean size stands for that of all.
const SAMPLE_OBJECTS: u64 = 20;

/// An estimate of all objects from a list of the first ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ObjectSample {
    /// The version of the list.
    pub(super) resource_version: String,
    /// `None` if the server does not say how many follow, as with a selector.
    pub(super) size: Option<ResourceSize>,
}

/// Size of a resource's cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ResourceSize {
    pub(super) objects: u64,
    /// JSON, in bytes.
    pub(super) bytes: u64,
}

impl ObjectSample {
    /// Reads the first objects of a collection, such as `/api/v1/pods`.
    pub(super) async fn read(upstream: &Upstream, path: &str, field_selector: &str) -> Result<Self, UpstreamError> {
        let limit = SAMPLE_OBJECTS.to_string();
        let selector = (!field_selector.is_empty()).then_some(("fieldSelector", field_selector));
        let query = encode_query([("limit", limit.as_str())].into_iter().chain(selector));
        let body = upstream.get(Verb::List, &format!("{path}{query}")).await?;
        Self::from_page(&body)
    }

    /// Reads the first page of a list.
    fn from_page(body: &[u8]) -> Result<Self, UpstreamError> {
        let list: ListJson<IgnoredAny> = serde_json::from_slice(body).map_err(UpstreamError::invalid_json)?;
        let ListMeta { resource_version, continue_token, remaining_item_count } = list.metadata.unwrap_or_default();
        // The page of a gateway, for example, says nothing about the resource.
        if resource_version.is_empty() {
            return Err(UpstreamError::invalid("a list without a version"));
        }
        let listed = list.items.unwrap_or_default().len() as u64;
        // A list of all objects has no count.
        let remaining = if continue_token.is_empty() { Some(0) } else { remaining_item_count };
        let remaining = remaining.and_then(|remaining| u64::try_from(remaining).ok());
        let size = size(listed, remaining, body.len() as u64);
        Ok(Self { resource_version, size })
    }
}

/// `None` if it is not known how many follow.
fn size(listed: u64, remaining: Option<u64>, bytes: u64) -> Option<ResourceSize> {
    let objects = listed + remaining?;
    Some(ResourceSize { objects, bytes: bytes.saturating_mul(objects).checked_div(listed).unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_read_as_client_go_reads_it() {
        let page = br#"{"kind":"PodList","metadata":{"resourceVersion":"7","continue":null,"remainingItemCount":null},"items":null}"#;
        let sample = ObjectSample::from_page(page).unwrap();
        let size = Some(ResourceSize { objects: 0, bytes: 0 });
        assert_eq!(sample, ObjectSample { resource_version: "7".to_owned(), size });
        assert!(ObjectSample::from_page(br#"{"items":[]}"#).is_err(), "not a list");
    }

    #[test]
    fn a_size_is_extrapolated_from_the_first_objects() {
        assert_eq!(size(20, Some(980), 100_000), Some(ResourceSize { objects: 1000, bytes: 5_000_000 }));
        assert_eq!(size(3, Some(0), 900), Some(ResourceSize { objects: 3, bytes: 900 }));
        assert_eq!(size(0, Some(0), 80), Some(ResourceSize { objects: 0, bytes: 0 }));
        assert_eq!(size(20, None, 100_000), None, "with a selector the server does not count");
    }
}
