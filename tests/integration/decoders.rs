//! HTTP clients of several languages decode gzip bodies, each in its usual configuration. A body is
//! one gzip member made of pieces, and a decoder could hold an event back until the next one
//! arrives, stop at the end of a piece, or take a cut connection for the end.
//!
//! Each decoder reads a list of several chunks, a watch of one second, and two watches without a
//! limit. One of these begins with the newest state, and its link is cut. The other begins with the
//! events since an old version, and ends when kubefan ends. An event is sent only after both have
//! reported the one before. For few readers kubefan stores or compresses an event, from 24 on it
//! compresses. Some events are larger than 64 KiB. The results are printed.

mod decoder_programs;
mod decoder_reads;
mod gzip_watch;
mod rust_decoders;

use std::{path::Path, sync::Arc};

use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::{
    decoder_programs::Decoder,
    decoder_reads::{End, Read, Seen, Source},
    gzip_watch::{GzipWatch, contains},
};
use crate::{
    clients::kubefan_at,
    harness::{apiserver::ApiServer, kubefan::Kubefan, leave_out, link::Link, servers::is_cached, tests, wait},
};

tests! {
    apiserver slow_programs: decoders_report_each_event_before_the_next_is_sent;
}

/// Payload of an object that needs several stored blocks, and more than the window of a decoder.
const LARGE_BYTES: usize = 200_000;
/// Payload of another one, so that a list has several chunks.
const MIDDLE_BYTES: usize = 150_000;
/// Payload of an object that arrives in one read of a socket.
const SMALL_BYTES: usize = 300;
/// With the observer these are 24 readers of the gzip view, whatever the decoder asks for.
const MORE_READERS: usize = 23;
/// A read at any version needs no proof.
const ANY_VERSION: &str = "0";
/// If the proof of the newest state is late, the apiserver answers.
const NEWEST_VERSION: &str = "";

/// The servers that all decoders read from.
struct World {
    api: ApiServer,
    kubefan: Kubefan,
}

/// The ConfigMaps of a decoder.
struct Objects {
    api: ApiServer,
    /// Their path.
    path: String,
    written: usize,
}

/// A decoder whose watch of [`Read::DIRECT`] goes on.
struct Followed {
    decoder: Decoder,
    source: Source,
    _observer: GzipWatch,
}

async fn decoders_report_each_event_before_the_next_is_sent() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let found = tokio::task::spawn_blocking(decoder_programs::all).await.expect("the builds do not panic");
    let api = ApiServer::shared().await;
    let kubefan = kubefan_at(&api, "127.0.0.1:0", &["--resource", "configmaps"]).await;
    let world = Arc::new(World { api, kubefan });
    // Objects that are created later are in the history of both caches.
    for accept in [decoder_programs::JSON, decoder_programs::PROTOBUF] {
        world.lists("default", accept, "").await;
    }
    let mut followed = JoinSet::new();
    for found in found {
        match found {
            Ok(decoder) => {
                let dir = dir.path().join(decoder.name.replace(['/', ' '], "-"));
                std::fs::create_dir(&dir).unwrap();
                let world = world.clone();
                followed.spawn(async move { follow(&world, decoder, &dir).await });
            }
            Err(missing) => leave_out(missing),
        }
    }
    let mut open = Vec::new();
    let mut failed = Vec::new();
    while let Some(followed) = followed.join_next().await {
        match followed {
            Ok(followed) => open.push(followed),
            Err(panic) => failed.push(panic.to_string()),
        }
    }
    assert!(failed.is_empty(), "{} decoders failed, as printed: {failed:?}", failed.len());
    // Watches of a decoder that are no gzip bodies have a view of their own.
    let views = open.iter().map(|followed| if followed.decoder.is_gzip { 1.0 } else { 2.0 }).sum();
    let has = world.kubefan.metric_sum("kubefan_views", "").await;
    assert_eq!(has, Some(views), "views, of which each decoder shares that of its observer");
    // A drain ends the watches cleanly, after all pieces that they were sent.
    world.kubefan.process.terminate();
    for Followed { decoder, mut source, .. } in open {
        let (end, error) = source.ended(Read::DIRECT).await;
        assert_eq!(end, End::Clean, "{}: {error}", decoder.name);
    }
}

/// Runs one decoder.
async fn follow(world: &World, decoder: Decoder, dir: &Path) -> Followed {
    let name = decoder.name;
    let mut objects = Objects::new(world).await;
    let mut state = Vec::new();
    for (object, bytes) in [("large", LARGE_BYTES), ("middle", MIDDLE_BYTES), ("small", SMALL_BYTES)] {
        state.push(objects.create(object, bytes).await);
    }
    world.lists(objects.namespace(), decoder.accept, &objects.marker()).await;

    let old = state[0].version.clone();
    let link = Link::to(world.kubefan.grpc_addr).await;
    let direct = format!("https://{}", world.kubefan.grpc_addr);
    let relayed = format!("https://{}", link.addr);
    let reads = [
        Read::list(Read::LIST, &direct, &objects),
        Read { seconds: 1, ..Read::watch(Read::ONE_SECOND, &direct, &objects, ANY_VERSION) },
        Read::watch(Read::RELAYED, &relayed, &objects, NEWEST_VERSION),
        Read::watch(Read::DIRECT, &direct, &objects, &old),
    ];
    let mut source = decoder.start(world, &reads, dir);
    // A watch from the version of the first object begins after it.
    for (read, begins) in [(Read::LIST, &state[..]), (Read::RELAYED, &state), (Read::DIRECT, &state[1..])] {
        let mut first = source.first(read, begins.len()).await;
        first.sort_by(|one, other| one.name.cmp(&other.name));
        assert_eq!(first, begins, "{name}: the start of {read}");
    }
    for read in [Read::LIST, Read::ONE_SECOND] {
        let (end, error) = source.ended(read).await;
        assert_eq!(end, End::Clean, "{name}: {read}: {error}");
    }
    // On a busy machine the second is over before the state is sent.
    let in_time = source.seen(Read::ONE_SECOND);
    assert!(state.starts_with(&in_time), "{name}: {in_time:?} of {state:?}");

    let mut observer = GzipWatch::open(world, &objects, decoder.accept).await;
    observer.is_stored(&objects.marker()).await;
    for (object, bytes) in [("small", SMALL_BYTES), ("large", LARGE_BYTES)] {
        let changed = objects.write(object, bytes).await;
        source.sees(Read::RELAYED, &changed).await;
        source.sees(Read::DIRECT, &changed).await;
        observer.is_stored(&objects.marker()).await;
    }
    let mut more = Vec::new();
    for _ in 0..MORE_READERS {
        let mut watch = GzipWatch::open(world, &objects, decoder.accept).await;
        watch.is_stored(&objects.marker()).await;
        more.push(watch);
    }
    for (object, bytes) in [("small", SMALL_BYTES), ("large", LARGE_BYTES), ("small", 10 * SMALL_BYTES)] {
        let changed = objects.write(object, bytes).await;
        source.sees(Read::RELAYED, &changed).await;
        source.sees(Read::DIRECT, &changed).await;
        assert!(!observer.is_stored(&objects.marker()).await, "{name}: an event for 24 readers");
        // They share a connection, whose window they would use up.
        for watch in &mut more {
            watch.is_stored(&objects.marker()).await;
        }
    }
    drop(more);

    link.cut();
    let (end, error) = source.ended(Read::RELAYED).await;
    assert_eq!(end, decoder.cut, "{name}: the end of a connection that is cut: {error}");
    let last = objects.write("small", SMALL_BYTES).await;
    source.sees(Read::DIRECT, &last).await;
    println!("{name:12} a cut connection: {}", if error.is_empty() { "the watch ends" } else { &error });
    Followed { decoder, source, _observer: observer }
}

impl Objects {
    async fn new(world: &World) -> Objects {
        let api = world.api.handle();
        let namespace = api.namespace("decoders").await;
        Objects { api, path: format!("/api/v1/namespaces/{namespace}/configmaps"), written: 0 }
    }

    fn namespace(&self) -> &str {
        self.path.split('/').nth(4).expect("the path has a namespace")
    }

    /// Creates an object with a payload of this size, which compresses to a half.
    async fn create(&mut self, name: &str, bytes: usize) -> Seen {
        let data = self.next_data(bytes);
        let object = json!({ "metadata": { "name": name }, "data": data });
        decoder_reads::seen(&self.api.create(&self.path, &object).await)
    }

    /// Overwrites an object with such a payload.
    async fn write(&mut self, name: &str, bytes: usize) -> Seen {
        let data = self.next_data(bytes);
        let path = format!("{}/{name}", self.path);
        decoder_reads::seen(&self.api.patch(&path, &json!({ "data": data })).await)
    }

    fn next_data(&mut self, bytes: usize) -> Value {
        self.written += 1;
        json!({ "marker": self.marker(), "payload": payload(&self.marker(), bytes) })
    }

    /// A text that is only in the last write.
    fn marker(&self) -> String {
        format!("write {} of {}", self.written, self.namespace())
    }
}

impl World {
    /// Waits until kubefan's cache lists the ConfigMaps of a namespace with this text. Fails unless
    /// a large list is compressed.
    async fn lists(&self, namespace: &str, accept: &str, text: &str) {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps?resourceVersion={ANY_VERSION}");
        let client = self.api.handle().client();
        let list = || client.get(format!("https://{}{path}", self.kubefan.grpc_addr)).header(ACCEPT, accept);
        let plain = wait::until("the objects in the cache", wait::SOON, || async {
            let list = list().send().await.ok().filter(is_cached)?.bytes().await.ok()?;
            contains(&list, text).then_some(list)
        })
        .await;
        let answer = list().header(ACCEPT_ENCODING, "gzip").send().await.expect("kubefan answers");
        let is_gzip = answer.headers().get(CONTENT_ENCODING).is_some_and(|coding| coding == "gzip");
        assert_eq!(is_gzip, plain.len() > LARGE_BYTES, "{:?}", answer.headers());
    }
}

/// A text of hexadecimal digits that no other seed has.
fn payload(seed: &str, bytes: usize) -> String {
    let mut payload = String::new();
    let mut link = seed.to_owned();
    while payload.len() < bytes {
        link = decoder_reads::digest(&link);
        payload += &link;
    }
    payload.truncate(bytes);
    payload
}
