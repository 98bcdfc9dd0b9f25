//! Compressed chunks and deltas: they become plain events, and never wrong bytes.

use prost::Message as _;

use super::*;
use crate::{EventType, Parts};
use kubefan_common::encoding::chunk;

/// A state of an object, long enough for deltas to be smaller.
fn state(number: u32) -> String {
    format!(
        r#"{{"metadata":{{"name":"a","annotations":{{"note":"{}"}}}},"spec":{number}}}"#,
        "quite a lot of text ".repeat(8)
    )
}

fn full(resume_version: &str, kind: EventType, object: &str) -> Step {
    let object = object.to_owned().into();
    let event = Event { r#type: kind.into(), name: "a".to_owned(), object, ..Event::default() };
    message(resume_version, Message::Event(event))
}

fn changed(resume_version: &str, base: u32, new: u32) -> Step {
    let delta = delta::object_delta("1".to_owned(), state(base).as_bytes(), state(new).as_bytes());
    let delta = Some(delta.expect("the delta is smaller than the object"));
    let event = Event { r#type: EventType::Modified.into(), name: "a".to_owned(), delta, ..Event::default() };
    message(resume_version, Message::Event(event))
}

fn chunk_of(objects: &[(&str, &str)]) -> Step {
    let events = objects.iter().map(|(name, object)| {
        let object = object.to_string().into();
        let event = Event { r#type: EventType::Added.into(), name: name.to_string(), object, ..Event::default() };
        event.encode_length_delimited_to_vec()
    });
    message("", Message::SnapshotChunk(pb::SnapshotChunk { zstd: chunk::encode(events).unwrap() }))
}

fn deltas() -> WatchOptions {
    WatchOptions { encoding: Encoding::ZstdDelta, ..options() }
}

/// The received objects, in order. `-` stands for a lost connection, `!` for an undecodable
/// message.
async fn objects(mut watch: WatchStream) -> Vec<String> {
    let mut objects = Vec::new();
    while let Some(item) = watch.next().await {
        match item {
            Ok(WatchItem::Event(event)) => {
                assert_eq!(event.delta, None, "events are plain");
                objects.push(String::from_utf8(event.object.to_vec()).unwrap());
            }
            Ok(WatchItem::Disconnected { error: ClientError::Undecodable { .. }, .. }) => objects.push("!".to_owned()),
            Ok(WatchItem::Disconnected { .. }) => objects.push("-".to_owned()),
            _ => {}
        }
    }
    objects
}

/// Version, encoding and `state_kept` of each request.
fn requested_with(server: &Scripted) -> Vec<(String, pb::Encoding, bool)> {
    let requests = server.requests.lock().unwrap();
    requests
        .iter()
        .map(|requested| (requested.resource_version.clone(), requested.encoding(), requested.state_kept))
        .collect()
}

fn tried(version: &str, state_kept: bool) -> (String, pb::Encoding, bool) {
    (version.to_owned(), pb::Encoding::ZstdDelta, state_kept)
}

#[tokio::test]
async fn the_events_of_a_chunk_are_returned_one_by_one_in_order() {
    let script = vec![begin(), chunk_of(&[("a", "1"), ("b", "2")]), chunk_of(&[]), chunk_of(&[("c", "3")]), end()];
    let (server, client) = serve(vec![script]).await;
    let zstd = WatchOptions { encoding: Encoding::Zstd, ..options() };
    let received = received(client.watch(Target::default(), zstd)).await;
    assert_eq!(received[..5], ["begin", "a", "b", "c", "end"]);
    assert_eq!(requested_with(&server)[0], (String::new(), pb::Encoding::Zstd, false));
}

#[tokio::test]
async fn deltas_continue_after_a_break_from_the_same_delta_base() {
    let (server, client) = serve(vec![
        vec![begin(), chunk_of(&[("a", &state(1))]), end(), changed("6", 1, 2), drained()],
        vec![changed("7", 2, 3), drained()],
    ])
    .await;
    let received = objects(client.watch(Target::default(), deltas())).await;
    assert_eq!(received, [&state(1), &state(2), "-", &state(3), "-"]);
    assert_eq!(requested_with(&server), [tried("", false), tried("6", true), tried("7", true)]);
}

#[tokio::test]
async fn a_watch_with_deltas_starts_over_if_its_version_has_expired() {
    let whole = || vec![begin(), chunk_of(&[("a", &state(1))]), end(), drained()];
    let (server, client) = serve(vec![whole(), vec![expired()], whole()]).await;
    let received = objects(client.watch(Target::default(), deltas())).await;
    assert_eq!(received, [&state(1), "-", &state(1), "-"]);
    assert_eq!(requested_with(&server), [tried("", false), tried("5", true), tried("", false), tried("5", true)]);
}

#[tokio::test]
async fn a_delta_that_does_not_fit_is_requested_again_as_a_whole_object() {
    let garbled = |step: Step| {
        let mut response = step.unwrap();
        if let Some(Message::Event(Event { delta: Some(delta), .. })) = &mut response.message {
            let mut zstd = delta.zstd.to_vec();
            *zstd.last_mut().unwrap() ^= 1;
            delta.zstd = zstd.into();
        }
        Ok(response)
    };
    for wrong in [changed("6", 4, 2), garbled(changed("6", 1, 2))] {
        let (server, client) = serve(vec![
            vec![begin(), chunk_of(&[("a", &state(1))]), end(), wrong, changed("7", 2, 3)],
            vec![full("6", EventType::Modified, &state(2)), changed("7", 2, 3), drained()],
        ])
        .await;
        let received = objects(client.watch(Target::default(), deltas())).await;
        assert_eq!(received, [&state(1), "!", &state(2), &state(3), "-"]);
        let third = tried("7", false);
        assert_eq!(
            requested_with(&server),
            [tried("", false), tried("5", false), third],
            "the delta base is no longer complete"
        );
    }
}

#[tokio::test]
async fn a_damaged_chunk_restarts_the_snapshot() {
    let damaged =
        message("", Message::SnapshotChunk(pb::SnapshotChunk { zstd: b"\x28\xb5\x2f\xfd".as_slice().into() }));
    let whole = vec![begin(), chunk_of(&[("a", "1")]), end(), drained()];
    let (server, client) = serve(vec![vec![begin(), damaged, end()], whole]).await;
    let zstd = WatchOptions { encoding: Encoding::Zstd, ..options() };
    assert_eq!(objects(client.watch(Target::default(), zstd)).await, ["!", "1", "-"]);
    assert_eq!(requested(&server), ["", "", "5"]);
}

#[tokio::test]
async fn state_kept_needs_the_complete_state_at_exactly_the_resume_version() {
    let gap =
        || message("", Message::GapBegin(pb::GapBegin { resource_version: "5".into(), reason: "expired".into() }));
    let gap_end = || message("9", Message::GapEnd(pb::GapEnd {}));
    let changes = || full("", EventType::Modified, &state(2));
    let whole = || vec![begin(), chunk_of(&[("a", &state(1))]), end()];
    let (server, client) = serve(vec![
        vec![begin(), chunk_of(&[("a", &state(1))]), drained()],
        [whole(), vec![gap(), changes(), gap_end(), drained()]].concat(),
        vec![gap(), changes(), drained()],
        // `a` is in the state of a version that is not known: another replica need not reach it,
        // and etcd may be restored to a version before it.
        vec![message("10", Message::Bookmark(pb::Bookmark {})), drained()],
    ])
    .await;
    objects(client.watch(Target::default(), deltas())).await;
    let expected = [tried("", false), tried("", false), tried("9", true), tried("9", false), tried("10", false)];
    assert_eq!(requested_with(&server), expected);

    let (server, client) = serve(vec![vec![full("6", EventType::Added, &state(1)), drained()]]).await;
    let resumed = WatchOptions { resource_version: "5".to_owned(), ..deltas() };
    objects(client.watch(Target::default(), resumed)).await;
    assert_eq!(requested_with(&server), [tried("5", false), tried("6", false)], "the state at 5 was never sent");
}

#[tokio::test]
async fn above_the_memory_limit_the_same_bytes_are_sent_without_deltas() {
    let (server, client) = serve(vec![
        vec![begin(), chunk_of(&[("a", &state(1))]), end(), changed("6", 1, 2)],
        vec![full("6", EventType::Modified, &state(2)), drained()],
    ])
    .await;
    let projection = Projection { parts: Parts::Full, drop_last_applied: true, ..Projection::default() };
    let small = WatchOptions { delta_base_bytes_max: 100, only_changes: true, projection, ..deltas() };
    let received = objects(client.watch(Target::default(), small)).await;
    assert_eq!(received, [&state(1), "!", &state(2), "-"]);
    let plain = |version: &str| (version.to_owned(), pb::Encoding::Zstd, false);
    assert_eq!(requested_with(&server), [tried("", false), plain("5"), plain("6")]);
    let requests = server.requests.lock().unwrap();
    let requested = requests.last().and_then(|requested| requested.projection.clone()).unwrap();
    assert!(requested.drop_managed_fields && requested.drop_last_applied && requested.only_changes, "{requested:?}");
}
