//! The test vectors in `proto/kubefan/v1alpha1/testdata/`, which also test decoders in other
//! languages.
//!
//! They are files because a decoder must accept the output of older and newer encoders. The encoder
//! here need not produce the same bytes.

use std::{fs, path::PathBuf};

use prost::Message;
use serde::{Deserialize, Serialize};

use super::{
    chunk,
    delta::{self, DeltaError},
};
use crate::proto::v1alpha1::{Event, EventType, ObjectDelta};

#[derive(Serialize, Deserialize)]
struct Index {
    deltas: Vec<DeltaCase>,
    chunks: Vec<ChunkCase>,
}

/// `held`, `delta` and `object` are names of files.
#[derive(Serialize, Deserialize)]
struct DeltaCase {
    name: String,
    /// The bytes that a client has.
    held: String,
    /// An encoded `ObjectDelta`.
    delta: String,
    /// The decoded object, if `error` is empty.
    object: String,
    /// `wrong_base` if `base_crc32` does not match. `broken_frame` if decompression fails.
    error: String,
}

#[derive(Serialize, Deserialize)]
struct ChunkCase {
    name: String,
    /// The `zstd` field of a `SnapshotChunk`.
    chunk: String,
    /// The decoded events; empty if `error` is set.
    events: Vec<ChunkEvent>,
    error: String,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct ChunkEvent {
    namespace: String,
    name: String,
    resource_version: String,
    object: String,
}

fn dir() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../proto/kubefan/v1alpha1/testdata"))
}

fn read(file: &str) -> Vec<u8> {
    fs::read(dir().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn chunk_events(zstd: &[u8]) -> Result<Vec<ChunkEvent>, chunk::ChunkError> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("JSON is UTF-8");
    let event = |event: Event| {
        assert_eq!(event.r#type(), EventType::Added);
        let Event { namespace, name, resource_version, object, .. } = event;
        ChunkEvent { namespace, name, resource_version, object: text(&object) }
    };
    Ok(chunk::decode(zstd, chunk::CONTENT_BYTES_MAX)?.into_iter().map(event).collect())
}

#[test]
fn every_vector_decodes_as_the_index_says() {
    let index: Index = serde_json::from_slice(&read("index.json")).unwrap();
    assert!(index.deltas.iter().any(|case| case.error == "wrong_base"));
    for case in &index.deltas {
        let message = ObjectDelta::decode(read(&case.delta).as_slice()).unwrap();
        let result = delta::decode(&read(&case.held), &message, delta::OBJECT_BYTES_MAX);
        match case.error.as_str() {
            "" => assert_eq!(result.unwrap(), read(&case.object), "{}", case.name),
            "wrong_base" => assert!(matches!(result, Err(DeltaError::WrongBase { .. })), "{}", case.name),
            "broken_frame" => assert!(matches!(result, Err(DeltaError::Frame(_))), "{}", case.name),
            other => panic!("{other}"),
        }
    }
    for case in &index.chunks {
        let events = chunk_events(&read(&case.chunk));
        assert_eq!(events.is_err(), !case.error.is_empty(), "{}", case.name);
        assert_eq!(events.unwrap_or_default(), case.events, "{}", case.name);
    }
}

fn pod(phase: &str, revision: &str, conditions: &str) -> Vec<u8> {
    format!(
        r#"{{"kind":"Pod","apiVersion":"v1","metadata":{{"name":"web-7d4b9c6f5-x2x4z","generateName":"web-7d4b9c6f5-","namespace":"shop","uid":"5f0c3c1e-6f0e-4a57-9d0e-2f3a1f2f4b11","creationTimestamp":"2026-01-01T00:00:00Z","labels":{{"app":"web","pod-template-hash":"7d4b9c6f5"}},"annotations":{{"example.com/revision":"{revision}","example.com/note":"Grüße"}}}},"spec":{{"containers":[{{"name":"main","image":"registry.example.com/shop/web:1.4.2","resources":{{"limits":{{"memory":"256Mi"}},"requests":{{"cpu":"100m"}}}},"terminationMessagePath":"/dev/termination-log","imagePullPolicy":"IfNotPresent"}}],"restartPolicy":"Always","nodeName":"node-3","schedulerName":"default-scheduler"}},"status":{{"phase":"{phase}"{conditions},"qosClass":"Burstable"}}}}"#
    )
    .into_bytes()
}

/// Returns an object larger than the part of a dictionary that zstd indexes by default, with the
/// change at the start.
fn large(color: &str) -> Vec<u8> {
    let numbers: Vec<String> = (0..40_000).map(|number: u32| number.to_string()).collect();
    format!(
        r#"{{"kind":"ConfigMap","apiVersion":"v1","color":"{color}","data":{{"numbers":"{}"}}}}"#,
        numbers.join(",")
    )
    .into_bytes()
}

#[test]
#[ignore = "writes the test vectors; after a change of watch.proto run: cargo test -p kubefan-common --lib vectors -- --ignored"]
fn write_the_vectors() {
    let write = |file: &str, bytes: &[u8]| fs::write(dir().join(file), bytes).unwrap();
    let pending = pod("Pending", "1", "");
    let annotated = pod("Pending", "2", "");
    let ready = r#","conditions":[{"type":"Ready","status":"True","lastProbeTime":null,"lastTransitionTime":"2026-01-01T00:00:07Z"}],"podIP":"10.1.2.3""#;
    let running = pod("Running", "2", ready);
    let good = |base: &[u8], new: &[u8]| delta::object_delta("41".to_owned(), base, new).expect("the delta is smaller");
    let status_change = good(&annotated, &running);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut zstd = status_change.zstd.to_vec();
        change(&mut zstd);
        ObjectDelta { zstd: zstd.into(), ..status_change.clone() }
    };
    let forged = ObjectDelta { base_crc32: delta::base_crc32(&pending), ..status_change.clone() };
    let mut deltas = Vec::new();
    let objects = [
        ("pending.json", pending.clone()),
        ("annotated.json", annotated.clone()),
        ("running.json", running.clone()),
        ("large-red.json", large("red")),
        ("large-blue.json", large("blue")),
    ];
    for (file, bytes) in &objects {
        write(file, bytes);
    }
    let cases = [
        ("annotation_change", "pending.json", good(&pending, &annotated), "annotated.json", ""),
        ("status_change", "annotated.json", status_change.clone(), "running.json", ""),
        ("no_change", "running.json", good(&running, &running), "running.json", ""),
        ("large_object", "large-red.json", good(&large("red"), &large("blue")), "large-blue.json", ""),
        ("wrong_base", "pending.json", status_change.clone(), "", "wrong_base"),
        ("wrong_base_with_a_forged_hash", "pending.json", forged, "", "broken_frame"),
        ("cut_off", "annotated.json", with(&|zstd| zstd.truncate(zstd.len() - 5)), "", "broken_frame"),
        ("wrong_checksum", "annotated.json", with(&|zstd| *zstd.last_mut().unwrap() ^= 1), "", "broken_frame"),
    ];
    for (name, held, message, object, error) in cases {
        let file = format!("{name}.delta");
        write(&file, &message.encode_to_vec());
        let [name, held, object, error] = [name, held, object, error].map(str::to_owned);
        deltas.push(DeltaCase { name, held, delta: file, object, error });
    }
    let events: Vec<ChunkEvent> = ["web-1", "web-2", "web-3"]
        .iter()
        .zip(7..)
        .map(|(name, version)| ChunkEvent {
            namespace: "shop".to_owned(),
            name: name.to_string(),
            resource_version: version.to_string(),
            object: format!(r#"{{"metadata":{{"name":"{name}"}},"spec":{{"nodeName":"node-{version}"}}}}"#),
        })
        .collect();
    let message = |event: &ChunkEvent| Event {
        r#type: EventType::Added.into(),
        namespace: event.namespace.clone(),
        name: event.name.clone(),
        resource_version: event.resource_version.clone(),
        object: event.object.clone().into(),
        ..Event::default()
    };
    let zstd = chunk::encode(events.iter().map(|event| message(event).encode_length_delimited_to_vec())).unwrap();
    write("three_objects.chunk", &zstd);
    write("cut_off.chunk", &zstd[..zstd.len() - 1]);
    let case = |name: &str, events, error: &str| ChunkCase {
        name: name.to_owned(),
        chunk: format!("{name}.chunk"),
        events,
        error: error.to_owned(),
    };
    let chunks = vec![case("three_objects", events, ""), case("cut_off", Vec::new(), "broken_frame")];
    let index = serde_json::to_string_pretty(&Index { deltas, chunks }).unwrap() + "\n";
    write("index.json", index.as_bytes());
}
