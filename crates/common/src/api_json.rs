//! Takes lists and watch events of the Kubernetes API apart. The content of an object is left to
//! its reader.
//!
//! Servers differ in the fields that they leave out, and a null stands for an empty value in Go. A
//! reader that refuses one of these would stop at a server that client-go reads.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// A page of a list, with each object as `T`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListJson<T> {
    /// Kind, such as `PodList`. The page of a gateway, for example, has none that ends with `List`.
    #[serde(default, deserialize_with = "null_as_default")]
    pub kind: String,
    /// API version, such as `apps/v1`.
    #[serde(default, deserialize_with = "null_as_default")]
    pub api_version: String,
    /// The version, and the token of the next page.
    pub metadata: Option<ListMeta>,
    /// The objects.
    pub items: Option<Vec<T>>,
}

/// The metadata of a page of a list or of a Table.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ListMeta {
    /// The version of the list.
    #[serde(deserialize_with = "null_as_default")]
    pub resource_version: String,
    /// The token of the next page; empty on the last page.
    #[serde(rename = "continue", deserialize_with = "null_as_default")]
    pub continue_token: String,
    /// The number of objects on the pages that follow. `None` if the server does not count them,
    /// as with a selector.
    pub remaining_item_count: Option<i64>,
}

/// A page whose continue token is the one that it was requested with: its list would never end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a page's continue token leads to the same page")]
pub struct SamePage;

/// Reads null as an empty value, as Go does.
///
/// # Errors
/// A value of another type.
pub fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// Refuses a page that leads to itself. `requested` is the continue token that it was requested
/// with; empty for the first page.
///
/// # Errors
/// [`SamePage`].
pub fn check_next_page(next: &str, requested: &str) -> Result<(), SamePage> {
    if !next.is_empty() && next == requested { Err(SamePage) } else { Ok(()) }
}

/// An event of a watch.
#[derive(Debug, Deserialize)]
pub struct EventJson<'a> {
    /// Type of the event, such as `ADDED`.
    #[serde(borrow, rename = "type")]
    pub kind: Cow<'a, str>,
    /// The object; a Status in an `ERROR` event.
    #[serde(borrow)]
    pub object: &'a RawValue,
}

/// A bookmark's object.
#[derive(Debug, PartialEq, Eq)]
pub struct Bookmark {
    /// The version that the watch has reached.
    pub resource_version: String,
    /// Whether it ends the initial events of a watch-list.
    pub ends_initial_events: bool,
}

/// Reads a bookmark's object.
///
/// # Errors
/// JSON without a version.
pub fn read_bookmark(json: &[u8]) -> Result<Bookmark, serde_json::Error> {
    #[derive(Deserialize)]
    struct Object {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        resource_version: String,
        #[serde(default)]
        annotations: Option<Annotations>,
    }
    #[derive(Deserialize)]
    struct Annotations {
        #[serde(default, rename = "k8s.io/initial-events-end")]
        initial_events_end: Option<String>,
    }
    let Object { metadata: Metadata { resource_version, annotations } } = serde_json::from_slice(json)?;
    let end = annotations.and_then(|annotations| annotations.initial_events_end);
    Ok(Bookmark { resource_version, ends_initial_events: end.as_deref() == Some("true") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_read_as_client_go_reads_it() {
        let null = r#"{"kind":null,"apiVersion":null,"metadata":{"resourceVersion":"7","continue":null,"remainingItemCount":null},"items":null}"#;
        for list in [null, r#"{"metadata":{"resourceVersion":"7"}}"#] {
            let list: ListJson<&RawValue> = serde_json::from_str(list).unwrap();
            assert!(list.kind.is_empty() && list.api_version.is_empty() && list.items.is_none());
            let ListMeta { resource_version, continue_token, remaining_item_count } = list.metadata.unwrap();
            assert_eq!((&*resource_version, &*continue_token, remaining_item_count), ("7", "", None));
        }
        let bookmark = |annotations: &str| {
            read_bookmark(format!(r#"{{"metadata":{{"resourceVersion":"7",{annotations}}}}}"#).as_bytes()).unwrap()
        };
        for (annotations, ends_initial_events) in [
            (r#""annotations":null"#, false),
            (r#""annotations":{"x":"y","k8s.io/initial-events-end":null}"#, false),
            (r#""annotations":{"k8s.io/initial-events-end":"false"}"#, false),
            (r#""annotations":{"k8s.io/initial-events-end":"true"}"#, true),
        ] {
            let expected = Bookmark { resource_version: "7".to_owned(), ends_initial_events };
            assert_eq!(bookmark(annotations), expected, "{annotations}");
        }
    }

    #[test]
    fn an_escaped_type_is_read() {
        let event: EventJson<'_> = serde_json::from_str(r#"{"type":"\u0041DDED","object":{}}"#).unwrap();
        assert_eq!((&*event.kind, event.object.get()), ("ADDED", "{}"));
    }

    #[test]
    fn a_page_that_leads_to_itself_is_refused() {
        assert_eq!(check_next_page("a", "a"), Err(SamePage));
        assert!(check_next_page("", "").is_ok() && check_next_page("b", "a").is_ok());
        assert!(check_next_page("a", "").is_ok());
    }
}
