use std::time::Duration;

use super::*;
use crate::{ResourceVersion, fields::FieldTable, object::ObjectParser};

/// 2026-01-01T01:00:00Z.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_229_200)
}

const AGE: &str = r#"{"name":"Age","type":"string","format":"","description":"CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed","priority":0}"#;

fn column(name: &str, kind: &str, description: &str) -> String {
    format!(r#"{{"name":"{name}","type":"{kind}","format":"","description":"{description}","priority":0}}"#)
}

fn tables(resource: &str, columns: &[&str]) -> Result<Tables, TableError> {
    let tables = Tables::new(&GroupVersionResource::new("", "v1", resource), now);
    let name = column("Name", "string", "");
    let columns: Vec<&str> = std::iter::once(name.as_str()).chain(columns.iter().copied()).collect();
    let table = format!(
        r#"{{"kind":"Table","metadata":{{"resourceVersion":"9"}},"columnDefinitions":[{}],"rows":null}}"#,
        columns.join(",")
    );
    tables.read(table.as_bytes())?;
    Ok(tables)
}

fn object(created: &str, rest: &str) -> String {
    format!(
        r#"{{"kind":"Pod","apiVersion":"v1","metadata":{{"name":"a","namespace":"ns","resourceVersion":"7","creationTimestamp":"{created}"}}{rest}}}"#
    )
}

fn row(cells: &str, object: &str) -> String {
    format!(r#"{{"cells":{cells},"object":{object}}}"#)
}

fn sent(tables: &Tables, row: &str, include: IncludeObject) -> String {
    let stored = tables.stored_row(row.as_bytes()).unwrap();
    String::from_utf8(tables.row(&stored, include).into()).unwrap()
}

#[test]
fn ages_are_current_and_the_stored_row_does_not_depend_on_the_time() {
    let tables = tables("configmaps", &[AGE]).unwrap();
    let object = object("2026-01-01T00:57:00Z", "");
    let early = row(r#"["a","0s"]"#, &object);
    let late = row(r#"["a","2m30s"]"#, &object);
    let stored = tables.stored_row(early.as_bytes()).unwrap();
    assert_eq!(stored, tables.stored_row(late.as_bytes()).unwrap());
    assert_eq!(stored, tables.stored_row(&stored).unwrap(), "a stored row is unchanged");
    assert_eq!(sent(&tables, &early, IncludeObject::Object), row(r#"["a","3m"]"#, &object));
    let future = super::tests::object("2026-01-01T02:00:00Z", "");
    let invalid = row(r#"["a","\u003cinvalid\u003e"]"#, &future);
    assert_eq!(sent(&tables, &row(r#"["a","5s"]"#, &future), IncludeObject::Object), invalid);
    assert_eq!(
        tables.stored_row(row(r#"["a","5s"]"#, &future).as_bytes()).unwrap(),
        tables.stored_row(invalid.as_bytes()).unwrap()
    );
}

/// `HumanDuration` cuts the fraction off, also below zero. An age from kubefan can differ from one
/// of the apiserver only by the time between the two answers.
#[test]
fn the_fraction_of_a_second_is_cut_off() {
    let late = now() + Duration::from_millis(999);
    for (created, age) in
        [("2026-01-01T00:59:55Z", "5s"), ("2026-01-01T01:00:01Z", "0s"), ("2026-01-01T01:00:02Z", "0s")]
    {
        assert_eq!(rendered(&since("", created, ""), late), format!("\"{age}\""), "{created}");
    }
}

#[test]
fn cells_that_are_not_ages_are_unchanged() {
    let tables = tables("configmaps", &[AGE]).unwrap();
    let object = object("2026-01-01T00:57:00Z", "");
    for cells in
        [r#"["a","2026-01-01T00:57:00Z"]"#, r#"["a",null]"#, r#"["a",{"":1}]"#, r#"["5m","\u003cunknown\u003e"]"#]
    {
        assert_eq!(sent(&tables, &row(cells, &object), IncludeObject::Object), row(cells, &object));
    }
    let conditions =
        format!(r#"{{"cells":["a","x"],"conditions":[{{"type":"Completed","status":"True"}}],"object":{object}}}"#);
    assert_eq!(sent(&tables, &conditions, IncludeObject::Object), conditions);
}

#[test]
fn a_row_contains_the_requested_part_of_its_object() {
    let tables = tables("configmaps", &[AGE]).unwrap();
    let full = row(r#"["a","3m"]"#, &object("2026-01-01T00:57:00Z", r#","data":{"x":"y"}"#));
    assert_eq!(sent(&tables, &full, IncludeObject::None), row(r#"["a","3m"]"#, "null"));
    let metadata = r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"a","namespace":"ns","resourceVersion":"7","creationTimestamp":"2026-01-01T00:57:00Z"}}"#;
    assert_eq!(sent(&tables, &full, IncludeObject::Metadata), row(r#"["a","3m"]"#, metadata));
}

#[test]
fn the_age_of_the_last_restart_of_a_pod_is_current() {
    let columns = [column("Restarts", "string", ""), AGE.to_owned()];
    let tables = tables("pods", &[&columns[0], &columns[1]]).unwrap();
    let status = r#","status":{"containerStatuses":[{"name":"a","lastState":{"terminated":{"exitCode":1,"finishedAt":"2026-01-01T00:59:00Z"}}}]}"#;
    let pod = object("2026-01-01T00:00:00Z", status);
    let sent_now = sent(&tables, &row(r#"["a","3 (5s ago)","1s"]"#, &pod), IncludeObject::None);
    assert_eq!(sent_now, row(r#"["a","3 (60s ago)","60m"]"#, "null"));
    let never = object("2026-01-01T00:00:00Z", "");
    assert_eq!(
        sent(&tables, &row(r#"["a","0","1s"]"#, &never), IncludeObject::None),
        row(r#"["a","0","60m"]"#, "null")
    );
}

#[test]
fn null_is_read_as_client_go_reads_it() {
    let tables = tables("things", &[]).unwrap();
    let null = br#"{"kind":"Table","metadata":{"resourceVersion":null,"continue":null,"remainingItemCount":null},"rows":null}"#;
    for table in [&null[..], br#"{"kind":"Table","metadata":null}"#, br#"{"kind":"Table"}"#] {
        let Document { version, next, rows } = tables.read(table).unwrap();
        assert!(version.is_empty() && next.is_empty() && rows.is_empty());
    }
}

#[test]
fn tables_that_cannot_be_cached_are_refused() {
    let date = |description| tables("things", &[&column("Since", "date", description)]);
    assert!(matches!(
        date("Custom resource definition column (in JSONPath format): .status.at"),
        Err(TableError::UnknownAge(_))
    ));
    assert!(date("Custom resource definition column (in JSONPath format): .metadata.creationTimestamp").is_ok());
    let tables = tables("things", &[AGE]).unwrap();
    assert!(matches!(tables.read(br#"{"kind":"ThingList","metadata":{}}"#), Err(TableError::Malformed(_))));
    assert!(matches!(tables.read(b"[]"), Err(TableError::Malformed(_))));
    let other = br#"{"kind":"Table","metadata":{},"columnDefinitions":[],"rows":[]}"#;
    assert!(matches!(tables.read(other), Err(TableError::ColumnsChanged)));
    assert!(tables.read(br#"{"kind":"Table","metadata":{},"columnDefinitions":null,"rows":[]}"#).is_ok());
    assert!(matches!(tables.stored_row(br#"{"cells":["a"],"object":{}}"#), Err(TableError::ColumnsChanged)));
    assert!(tables.stored_row(br#"{"cells":["a","b"],"object":null}"#).is_ok(), "the object parser refuses it");
    assert!(matches!(tables.stored_row(br#"{"cells":["a","b"]}"#), Err(TableError::Malformed(_))));
    let partial =
        row(r#"["a","5m"]"#, r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{}}"#);
    assert!(matches!(tables.stored_row(partial.as_bytes()), Err(TableError::Malformed(_))));
    assert!(columns_with_other_ages(&GroupVersionResource::new("batch", "v1", "jobs")).is_some());
}

#[test]
fn selectors_match_the_object_in_a_row_like_the_object_alone() {
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let fields = FieldTable::new(&gvr, true, &[]);
    let json = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","namespace":"ns","uid":"u","resourceVersion":"7","labels":{"app":"web"},"creationTimestamp":"2026-01-01T00:57:00Z"},"spec":{"nodeName":"n1"},"status":{"phase":"Running"}}"#;
    let parser = ObjectParser::table(tables("pods", &[AGE]).unwrap(), &fields).of("Pod", "v1");
    let plain = row(r#"["a","1s"]"#, json);
    let row = ObjectParser::new(&fields).of("Pod", "v1");
    let plain = std::sync::Arc::new(parser.parse(plain.as_bytes()).unwrap());
    let alone = row.parse(json.as_bytes()).unwrap();
    assert_eq!((plain.key(), plain.uid(), plain.version()), (alone.key(), alone.uid(), alone.version()));
    assert!(plain.labels().eq(alone.labels()));
    for field in ["spec.nodeName", "status.phase", "spec.hostNetwork"] {
        let field = fields.resolve(field, &gvr).unwrap();
        assert_eq!(parser.field(&plain, field), row.field(&alone, field));
    }
    let moved = plain.bytes_at(ResourceVersion::new(1000).unwrap());
    assert_eq!(parser.parse(&moved).unwrap().version().get(), 1000);
    let reduced = plain.selectable_attributes(&std::sync::Arc::new(parser)).bytes();
    let tables = tables("pods", &[AGE]).unwrap();
    let text = String::from_utf8(tables.row(&reduced, IncludeObject::None).into()).unwrap();
    assert_eq!(text, super::tests::row("[null,null]", "null"));
}

#[test]
fn a_bookmark_has_the_cells_of_upstream_bookmarks() {
    let tables = tables("configmaps", &[AGE]).unwrap();
    let bookmark = |include, ends| tables.bookmark_row("ConfigMap", "v1", include, "5", ends);
    assert_eq!(bookmark(IncludeObject::None, false), row("[null,null]", "null"));
    let upstream = row(
        r#"["","\u003cunknown\u003e"]"#,
        r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"4"},"status":{}}"#,
    );
    tables.note_bookmark(serde_json::from_str(&upstream).unwrap());
    assert_eq!(bookmark(IncludeObject::None, false), row(r#"["","\u003cunknown\u003e"]"#, "null"));
    let last: serde_json::Value = serde_json::from_str(&bookmark(IncludeObject::None, true)).unwrap();
    assert_eq!(last["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    assert_eq!(last["object"]["kind"], "PartialObjectMetadata");
    let full: serde_json::Value = serde_json::from_str(&bookmark(IncludeObject::Object, false)).unwrap();
    assert_eq!(full["object"]["status"], serde_json::json!({}), "as upstream writes an empty object");
    assert_eq!(
        (&full["object"]["kind"], &full["object"]["metadata"]["resourceVersion"]),
        (&"ConfigMap".into(), &"5".into())
    );
}

#[test]
fn a_row_that_cannot_be_read_is_not_quoted() {
    let tables = tables("secrets", &[]).unwrap();
    for row in [r#""very-secret""#, r#"{"cells":"very-secret","object":{}}"#] {
        let error = tables.stored_row(row.as_bytes()).unwrap_err().to_string();
        assert!(!error.contains("very-secret"), "{error}");
    }
}
