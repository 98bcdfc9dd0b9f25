//! Decodes list pages and watch events from JSON, protobuf or Tables.
//!
//! The reflector need not know the encoding: it always receives objects in the form of watch
//! events, versions, and errors for anything that an apiserver does not send.

use std::borrow::Cow;

use kubefan_common::{
    api_json::{self, EventJson, ListJson, ListMeta, check_next_page},
    text::valid_utf8,
};
use kubefan_model::{
    Media, ResourceVersion,
    event::EventType,
    object::{Object, ObjectError, ObjectParser},
    protobuf::{self, Malformed},
    table::{Document, TableError, Tables},
};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    error::{UpstreamError, read_status},
    reflector::{error::ReflectorError, target::Target},
};

/// A page of a list.
pub(crate) struct Page {
    pub(crate) version: ResourceVersion,
    /// The continue token of the next page.
    pub(crate) next: Option<String>,
    pub(crate) objects: Vec<Object>,
}

/// A message of a watch.
pub(crate) enum WatchMessage {
    Event(EventType, Object),
    Bookmark { version: ResourceVersion, ends_initial_state: bool },
}

#[derive(Deserialize)]
struct TableRow<'a> {
    #[serde(borrow)]
    object: &'a RawValue,
}

impl Page {
    /// Refuses a page that leads to itself: its list would never end. `requested` is the continue
    /// token that it was requested with.
    pub(crate) fn after(self, requested: Option<&str>) -> Result<Self, ReflectorError> {
        let next = self.next.as_deref().unwrap_or_default();
        let requested = requested.unwrap_or_default();
        check_next_page(next, requested).map_err(|error| ReflectorError::List(UpstreamError::invalid(error)))?;
        Ok(self)
    }
}

/// Decodes a page of a list.
pub(crate) fn read_page(parser: &ObjectParser, target: &Target, body: &[u8]) -> Result<Page, ReflectorError> {
    let body = &*text(parser, body);
    let api_version = target.gvr.api_version();
    let object = |item: &[u8]| parser.from_list_item(item, &target.kind, &api_version);
    if let Some(tables) = parser.tables() {
        let Document { version, next, rows } = tables.read(body).map_err(ObjectError::from)?;
        let version = version.parse()?;
        let objects: Result<_, _> = rows.into_iter().map(|row| parser.parse(row.get().as_bytes())).collect();
        return Ok(Page { version, next: Some(next).filter(|next| !next.is_empty()), objects: objects? });
    }
    let (version, next, objects): (_, _, Result<_, ObjectError>) = match parser.media() {
        Media::Json | Media::Table => {
            let ListJson::<&RawValue> { kind, metadata, items, .. } = parse(body).map_err(ReflectorError::List)?;
            let ListMeta { resource_version: version, continue_token: next, .. } = metadata.unwrap_or_default();
            let items = items.unwrap_or_default().into_iter().map(|item| item.get().as_bytes());
            if !kind.ends_with("List") {
                // The page of a gateway, for example, says nothing about the resource.
                parse_version(&version).map_err(ReflectorError::List)?;
            }
            (version, next, items.map(object).collect())
        }
        Media::Protobuf => {
            let list = protobuf::open(body).and_then(|opened| protobuf::read_list(opened.message));
            let protobuf::List { meta, items } = list.map_err(invalid).map_err(ReflectorError::List)?;
            (meta.resource_version, meta.next, items.into_iter().map(object).collect())
        }
    };
    // The version first: a page without a version is not a list.
    let version = version.parse()?;
    Ok(Page { version, next: Some(next).filter(|next| !next.is_empty()), objects: objects? })
}

/// Decodes a message of a watch. An ERROR event becomes an error.
pub(crate) fn read_event(parser: &ObjectParser, event: &[u8]) -> Result<WatchMessage, ReflectorError> {
    let event = &*text(parser, event);
    let (kind, object) = match parser.media() {
        Media::Json | Media::Table => {
            let EventJson { kind, object } = parse(event).map_err(ReflectorError::Watch)?;
            (kind, object.get().as_bytes())
        }
        Media::Protobuf => {
            let event = protobuf::read_watch_event(event).map_err(invalid).map_err(ReflectorError::Watch)?;
            (event.kind.into(), event.object)
        }
    };
    let kind = match &*kind {
        "ADDED" => EventType::Added,
        "MODIFIED" => EventType::Modified,
        "DELETED" => EventType::Deleted,
        "BOOKMARK" => return read_bookmark(parser, object),
        "ERROR" => {
            let status = read_status(None, object);
            let unreadable = || UpstreamError::invalid("an ERROR event without a Status");
            return Err(ReflectorError::Watch(status.map_or_else(unreadable, UpstreamError::from)));
        }
        other => {
            let other: String = other.chars().take(32).collect();
            return Err(ReflectorError::Watch(UpstreamError::invalid(format_args!("event type {other:?}"))));
        }
    };
    match parser.tables() {
        None => Ok(WatchMessage::Event(kind, parser.parse(object)?)),
        Some(tables) => Ok(WatchMessage::Event(kind, parser.parse(only_row(tables, object)?.get().as_bytes())?)),
    }
}

/// Returns the body with U+FFFD for bytes that are not UTF-8. Otherwise one object would stop the
/// cache of its resource.
fn text<'a>(parser: &ObjectParser, body: &'a [u8]) -> Cow<'a, [u8]> {
    if parser.media() == Media::Protobuf {
        return Cow::Borrowed(body);
    }
    valid_utf8(body)
}

/// Returns the single row of an event's Table.
fn only_row<'a>(tables: &Tables, table: &'a [u8]) -> Result<&'a RawValue, ObjectError> {
    let Document { rows, .. } = tables.read(table)?;
    match rows[..] {
        [row] => Ok(row),
        _ => Err(TableError::Malformed(format!("an event with {} rows", rows.len())).into()),
    }
}

fn read_bookmark(parser: &ObjectParser, object: &[u8]) -> Result<WatchMessage, ReflectorError> {
    let Some(tables) = parser.tables() else {
        return bookmark_of(parser.media(), object).map_err(ReflectorError::Watch);
    };
    let row = only_row(tables, object)?;
    tables.note_bookmark(row);
    let TableRow { object } = parse(row.get().as_bytes()).map_err(ReflectorError::Watch)?;
    bookmark_of(Media::Json, object.get().as_bytes()).map_err(ReflectorError::Watch)
}

fn bookmark_of(media: Media, object: &[u8]) -> Result<WatchMessage, UpstreamError> {
    let (version, ends_initial_state) = match media {
        Media::Json | Media::Table => {
            let bookmark = api_json::read_bookmark(object).map_err(UpstreamError::invalid_json)?;
            (parse_version(&bookmark.resource_version)?, bookmark.ends_initial_events)
        }
        Media::Protobuf => {
            let bookmark = protobuf::read_bookmark(object).map_err(invalid)?;
            (parse_version(bookmark.version)?, bookmark.ends_initial_state)
        }
    };
    Ok(WatchMessage::Bookmark { version, ends_initial_state })
}

fn parse_version(text: &str) -> Result<ResourceVersion, UpstreamError> {
    text.parse().map_err(UpstreamError::invalid)
}

fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, UpstreamError> {
    serde_json::from_slice(json).map_err(UpstreamError::invalid_json)
}

fn invalid(error: Malformed) -> UpstreamError {
    UpstreamError::invalid(error)
}

#[cfg(test)]
mod tests {
    use kubefan_model::{GroupVersionResource, fields::FieldTable};

    use super::*;

    #[test]
    fn unparsable_bodies_are_not_quoted() {
        let table = FieldTable::new(&GroupVersionResource::new("", "v1", "secrets"), true, &[]);
        let parser = ObjectParser::new(&table);
        for json in [r#""very-secret""#, r#"{"type":["very-secret"],"object":{}}"#, r#"{"metadata":"very-secret"}"#] {
            let error = read_event(&parser, json.as_bytes()).err().unwrap().to_string();
            assert!(!error.contains("very-secret"), "{error}");
        }
    }
}
