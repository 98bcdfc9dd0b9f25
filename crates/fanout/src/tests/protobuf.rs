//! Subscribers over gRPC that ask for protobuf: the same messages as with JSON, with objects that
//! read the same.

use kubefan_cache::{OnExpired, OnLag};
use kubefan_model::{
    format::Encoding,
    projection::Projection,
    protobuf::{self, METADATA, wire::put_bytes},
};

use super::*;
use crate::SubscribeOptions;

/// A pod as a watch of the apiserver sends it. The object in JSON has the same attributes.
pub(super) fn pod(name: &str, app: &str, version: u64) -> Bytes {
    let message = |fields: &[(u32, &[u8])]| {
        let mut out = Vec::new();
        for (number, bytes) in fields {
            put_bytes(*number, bytes, &mut out);
        }
        out
    };
    let label = message(&[(protobuf::ENTRY_KEY, b"app"), (protobuf::ENTRY_VALUE, app.as_bytes())]);
    let version = version.to_string();
    let metadata = message(&[
        (protobuf::META_NAME, name.as_bytes()),
        (protobuf::META_NAMESPACE, b"ns"),
        (protobuf::META_UID, name.as_bytes()),
        (protobuf::META_RESOURCE_VERSION, version.as_bytes()),
        (protobuf::META_LABELS, &label),
    ]);
    // `spec.schedulerName`, which no selector reads.
    let spec = message(&[(19, b"default-scheduler")]);
    protobuf::enveloped("v1", "Pod", &message(&[(METADATA, &metadata), (2, &spec)]))
}

fn cache(media: Media) -> Cache {
    Cache::of(&ProcessBudgets::default(), RingLimits { conflated_bytes_max: Some(1 << 20), ..LIMITS }, media)
}

fn format(media: Media) -> Format {
    let encoding = if media == Media::Protobuf { Encoding::Protobuf } else { Encoding::Json };
    Format::new(Projection::default(), false, encoding).unwrap()
}

impl Cache {
    fn read(&self, labels: &str, format: Format, start: Start) -> Subscription {
        let options = SubscribeOptions { on_lag: OnLag::Conflate, on_expired: OnExpired::Fail, ..start.into() };
        let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
        self.hub.subscribe(self.select(labels), format, options, waker).unwrap()
    }
}

/// A message in one line, and the facts in its object.
type Read = (String, Option<(String, String, u64, Vec<(String, String)>)>);

async fn read(cache: &Cache, subscription: &mut Subscription) -> Vec<Read> {
    let read = |message: &WatchResponse| {
        let object = match message.message.as_ref().unwrap() {
            watch_response::Message::Event(event) => {
                assert_eq!(protobuf::is_enveloped(&event.object), cache.parser.media() == Media::Protobuf);
                let object = cache.parser.parse(&event.object).unwrap();
                let labels = object.labels().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
                Some((object.key().to_string(), object.uid().to_owned(), object.version().get(), labels))
            }
            _ => None,
        };
        (line(message), object)
    };
    messages(subscription).await.iter().map(read).collect()
}

/// All ways in which a subscriber of `app=web` can be sent an object.
async fn every_way(media: Media) -> Vec<Vec<Read>> {
    let mut cache = cache(media);
    let mut all = Vec::new();
    cache.list(&[("a", "web", 5), ("b", "web", 6), ("c", "db", 7)], 10);
    let mut web = cache.read("app=web", format(media), Start::Snapshot);
    all.push(read(&cache, &mut web).await);
    cache.event(Modified, "c", "web", 11);
    cache.event(Modified, "a", "db", 12);
    cache.event(Modified, "c", "web", 13);
    cache.event(Deleted, "b", "web", 14);
    all.push(read(&cache, &mut web).await);
    let mut resumed = cache.read("app=web", format(media), Start::Resume(version(11)));
    all.push(read(&cache, &mut resumed).await);
    // The ring has four records, so this evicts those above.
    for at in 15..20 {
        cache.event(Modified, "c", "web", at);
    }
    let mut caught_up = cache.read("app=web", format(media), Start::Resume(version(10)));
    all.push(read(&cache, &mut caught_up).await);
    cache.list(&[("d", "web", 25), ("a", "web", 26)], 30);
    for subscription in [&mut web, &mut resumed, &mut caught_up] {
        all.push(read(&cache, subscription).await);
    }
    all
}

#[tokio::test(start_paused = true)]
async fn protobuf_is_sent_in_the_same_messages_as_json_in_snapshots_resumes_catch_ups_and_gaps() {
    let json = every_way(Media::Json).await;
    let protobuf = every_way(Media::Protobuf).await;
    for (json, protobuf) in json.iter().zip(&protobuf) {
        assert_eq!(json, protobuf);
    }
    let lines = |read: &[Read]| read.iter().map(|(line, _)| line.clone()).collect::<Vec<_>>();
    assert_eq!(lines(&protobuf[0]), ["snapshot@10", "+a@5", "+b@6", "end of 2 (10)"]);
    assert_eq!(lines(&protobuf[1]), ["+c@11 (11)", "<a@12 (12)", "~c@13 (13)", "-b@14 (14)"]);
    assert_eq!(lines(&protobuf[2]), lines(&protobuf[1])[1..]);
    let catch_up = ["catch-up from 10", "<a@5", "?b@6", "+c@19", "end of catch-up (19)"];
    assert_eq!(lines(&protobuf[3]), catch_up, "of the deleted ones only the selectable attributes are left");
    assert_eq!(lines(&protobuf[4])[0], "catch-up from 14", "it has read too slowly");
    assert_eq!(lines(&protobuf[6]), ["gap from 19 expired", "?c@19", "+d@25", "+a@26", "end of gap (30)"]);
}

#[tokio::test(start_paused = true)]
async fn metadata_as_protobuf_is_that_of_the_whole_object_at_the_version_of_the_event() {
    let mut cache = cache(Media::Protobuf);
    cache.list(&[("a", "web", 5)], 10);
    let partial = Format::new(Projection::partial_object_metadata(), false, Encoding::Protobuf).unwrap();
    let mut whole = cache.read("app=web", format(Media::Protobuf), Start::Snapshot);
    let mut metadata = cache.read("app=web", partial, Start::Snapshot);
    cache.event(Modified, "a", "web", 11);
    cache.event(Modified, "a", "db", 12);
    let whole = messages(&mut whole).await;
    let metadata = messages(&mut metadata).await;
    assert_eq!(whole.len(), 5);
    for (whole, metadata) in whole.iter().zip(&metadata) {
        assert_eq!(line(whole), line(metadata));
        if let (Some(watch_response::Message::Event(whole)), Some(watch_response::Message::Event(metadata))) =
            (&whole.message, &metadata.message)
        {
            assert_eq!(
                metadata.object,
                protobuf::projected(&whole.object, &Projection::partial_object_metadata()).unwrap()
            );
            assert_eq!(cache.parser.parse(&metadata.object).unwrap().version().to_string(), metadata.resource_version);
        }
    }
}
