use bytes::Buf;
use kubefan_common::proto::v1alpha1::{Event, ObjectDelta};
use kubefan_model::{fields::FieldTable, object::ObjectParser};

use super::*;
use crate::send::control;

fn object(json: &str) -> Object {
    ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap()
}

fn head(object: &Object, resume: Option<u64>, version: u64, reason: DeleteReason) -> EventHead<'_> {
    let version = ResourceVersion::new(version).unwrap();
    let kind = if reason == DeleteReason::Unspecified { Kind::Modified } else { Kind::Deleted };
    let resume = resume.and_then(ResourceVersion::new);
    EventHead { resume, version, kind, reason, ..EventHead::of_snapshot(object) }
}

#[test]
fn both_writers_make_the_message_that_prost_would_make() {
    let pod = object(r#"{"metadata":{"name":"web","namespace":"default","uid":"u","resourceVersion":"7"}}"#);
    let node = object(r#"{"metadata":{"name":"n1","resourceVersion":"18446744073709551615"}}"#);
    let place = |text: &str| ResourceVersion::parse_place(text).unwrap();
    let behind = place("300.12");
    let last = place("18446744073709551615.4294967294");
    let heads = [
        head(&pod, Some(300), 300, DeleteReason::LeftSelector),
        head(&pod, Some(1234567890), 7, DeleteReason::Unspecified),
        head(&node, None, u64::MAX, DeleteReason::Unspecified),
        EventHead { resume: Some(behind), version: behind, ..head(&pod, None, 7, DeleteReason::Unspecified) },
        EventHead { resume: Some(last), ..head(&node, None, u64::MAX, DeleteReason::Unspecified) },
    ];
    for head in heads {
        for body in [
            Body::object(Bytes::from(vec![b'x'; 300])),
            Body::delta(Bytes::from(vec![b'z'; 130]), DeltaBase { version: head.version, crc32: 0xdead_beef }),
        ] {
            let mut writer = FrameWriter::new(&Layout::Grpc, 0);
            writer.event(&head, body.clone());
            let len = writer.len();
            let mut frames = writer.finish();
            let framed = frames.copy_to_bytes(frames.len());
            let mut whole = FrameBuffer::new(&Layout::Grpc, 0);
            whole.event(&head, body.clone());
            let whole = whole.freeze();
            assert_eq!((framed.len(), framed.as_ref()), (len, whole.as_ref()));
            let message = &framed[PREFIX_BYTES..];
            assert_eq!(framed[..PREFIX_BYTES], [[0].as_slice(), &(message.len() as u32).to_be_bytes()].concat());
            let decoded = WatchResponse::decode(message).unwrap();
            assert_eq!(decoded.resume_version, head.resume.map_or_else(String::new, |version| version.to_string()));
            let event = Event {
                r#type: if head.kind == Kind::Modified { EventType::Modified } else { EventType::Deleted }.into(),
                namespace: head.key.namespace().to_owned(),
                name: head.key.name().to_owned(),
                uid: head.uid.to_owned(),
                resource_version: head.version.whole().to_string(),
                delete_reason: head.reason.into(),
                object: if body.base.is_none() { body.bytes.clone() } else { Bytes::new() },
                delta: body.base.map(|base| ObjectDelta {
                    base_resource_version: base.version.whole().to_string(),
                    base_crc32: base.crc32,
                    zstd: body.bytes.clone(),
                }),
            };
            let mut delimited = BytesMut::new();
            put_delimited(&head, &body, &mut delimited);
            assert_eq!(delimited, event.encode_length_delimited_to_vec());
            assert_eq!(decoded.message, Some(watch_response::Message::Event(event)));
            assert_eq!(decoded.encode_to_vec(), message, "as prost itself would encode it");
        }
    }
}

#[test]
fn a_frame_buffer_has_the_messages_in_order() {
    let pod = object(r#"{"metadata":{"name":"web","namespace":"default","uid":"u","resourceVersion":"7"}}"#);
    let version = ResourceVersion::new(7).unwrap();
    let mut writer = FrameWriter::new(&Layout::Grpc, 0);
    writer.message(&control::snapshot_begin(version, ResolvedResource::default(), None, None));
    writer.event(&EventHead::of_snapshot(&pod), Body::object(pod.bytes().clone()));
    writer.message(&control::snapshot_end(version, 1));
    let mut frames = writer.finish();
    assert_eq!(frames.messages(), 3);
    let mut seen = Vec::new();
    while frames.has_remaining() {
        let prefix = frames.copy_to_bytes(PREFIX_BYTES);
        let len = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
        seen.push(WatchResponse::decode(frames.copy_to_bytes(len)).unwrap().message.unwrap());
    }
    use watch_response::Message;
    let [Message::SnapshotBegin(_), Message::Event(event), Message::SnapshotEnd(_)] = seen.as_slice() else {
        panic!("{seen:?}")
    };
    assert_eq!(event.object, pod.bytes());
}
