//! Programs that read with plain HTTP requests: lists of every freshness, in pages or not, and
//! watches from a version or from the state, in JSON or protobuf. Each follows the pods as a
//! reflector does, and now and then starts over as another program would.

pub(crate) mod wire;

use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use kubefan_client::{ClientError, http::HttpTransport};
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use tokio::time::sleep;

use super::{
    history::{Freshness, HttpReads, Observation, ReceivedEvent, Recorder, Spec},
    http_transport::{RequestOptions, Servers, Transport},
    schema,
    subscriber::ClientSettings,
    truth::{Kind, last_place},
    world::World,
};
use wire::{Events, Message, Page, Pod};

/// The most watches of one state. Then the program lists again.
const WATCHES_MAX: usize = 8;

/// A request or a stream has ended without a result.
struct Ended;

/// Reads for ever.
pub(crate) async fn run(
    world: Arc<World>,
    spec: Spec,
    reads: HttpReads,
    settings: ClientSettings,
    recorder: Recorder,
    random: Pcg64Mcg,
) {
    sleep(settings.start_after).await;
    let turn = Arc::new(AtomicUsize::new(settings.first_replica));
    let HttpReads { is_http2, accepts_gzip, .. } = reads;
    let servers = if reads.is_in_crowd { Servers::FirstReplica } else { Servers::Replicas };
    let options = RequestOptions { is_http2, accepts_gzip, servers };
    let transport = Transport::new(&world, spec.number, &settings, &turn, options);
    world.controls[spec.number].can_start_over.store(true, Ordering::Relaxed);
    let mut reader = Reader { world, spec, reads, transport, recorder, random, known: 0 };
    loop {
        reader.pause().await;
        reader.recorder.note(Observation::StartsOver { goes_on: false }, None);
        if let Ok(mut at) = reader.start().await {
            for _ in 0..reader.random.random_range(1..WATCHES_MAX) {
                reader.known = at;
                reader.pause().await;
                if reader.world.controls[reader.spec.number].takes_start_over() {
                    break;
                }
                match reader.follow(at).await {
                    Ok(reached) => at = reached,
                    Err(Ended) => break,
                }
            }
        }
    }
}

struct Reader {
    world: Arc<World>,
    spec: Spec,
    reads: HttpReads,
    transport: Transport,
    recorder: Recorder,
    random: Pcg64Mcg,
    /// The last version that it has reached; 0 if there is none.
    known: u64,
}

type Body = BoxStream<'static, Result<Bytes, ClientError>>;

impl Reader {
    async fn pause(&mut self) {
        sleep(Duration::from_millis(self.random.random_range(50..1500))).await;
        self.world.controls[self.spec.number].stay_away().await;
    }

    fn path(&self) -> String {
        let target = self.spec.selection.target();
        let namespace = match target.namespace.as_str() {
            "" => String::new(),
            namespace => format!("/namespaces/{namespace}"),
        };
        let query = [
            ("labelSelector", &target.label_selector),
            ("fieldSelector", &target.field_selector),
            ("shardSelector", &self.spec.selection.shard()),
        ];
        let query = query.into_iter().filter(|(_, selector)| !selector.is_empty());
        let query = query.fold(String::new(), |mut query, (name, selector)| {
            let selector: String = form_urlencoded::byte_serialize(selector.as_bytes()).collect();
            write!(query, "&{name}={selector}").unwrap();
            query
        });
        format!("/api/v1{namespace}/pods?x=1{query}")
    }

    /// Sends a request. Notes a failure.
    async fn get(&self, path: String, is_watch: bool) -> Result<Body, Ended> {
        let accept = if !self.reads.is_protobuf {
            "application/json"
        } else if is_watch {
            "application/vnd.kubernetes.protobuf;stream=watch,application/json"
        } else {
            "application/vnd.kubernetes.protobuf,application/json"
        };
        let response = match self.transport.get(path, accept).await {
            Ok(response) => response,
            Err(error) => return Err(self.lost(&error)),
        };
        if response.status == 200 {
            return Ok(response.body);
        }
        let body = self.read_all(response.body).await?;
        match wire::failure(&body) {
            Ok(wire::Failure { reason, message, .. }) => {
                let code = response.status.to_string();
                self.recorder.note(Observation::Ended { code, reason, message }, None);
            }
            Err(why) => self.recorder.note(Observation::Undecodable(why), None),
        }
        Err(Ended)
    }

    /// The network broke the connection, or the body cannot be decoded.
    fn lost(&self, error: &ClientError) -> Ended {
        if let ClientError::Undecodable { message, .. } = error {
            return self.undecodable(message.clone());
        }
        let code = format!("{:?}", error.code());
        let message = error.to_string();
        self.recorder.note(Observation::Ended { code, reason: String::new(), message }, None);
        Ended
    }

    fn undecodable(&self, why: String) -> Ended {
        self.recorder.note(Observation::Undecodable(why), None);
        Ended
    }

    async fn read_all(&self, mut body: Body) -> Result<Vec<u8>, Ended> {
        let mut all = Vec::new();
        loop {
            self.world.controls[self.spec.number].pause().await;
            match body.next().await {
                Some(Ok(data)) => all.extend_from_slice(&data),
                Some(Err(error)) => return Err(self.lost(&error)),
                None => return Ok(all),
            }
        }
    }

    /// Gets the state, by a list or by a watch. Returns its version, or that of the last event.
    async fn start(&mut self) -> Result<u64, Ended> {
        let freshness = match self.random.random_range(0..10u32) {
            0..5 => Freshness::Consistent,
            5..7 => Freshness::Any,
            _ if self.known == 0 => Freshness::Consistent,
            7..9 => Freshness::NotOlderThan(self.known),
            _ => Freshness::Exact(self.known),
        };
        let is_watch = self.random.random_bool(0.4) && !matches!(freshness, Freshness::Exact(_));
        self.recorder.note(Observation::Asked(freshness), None);
        self.recorder.note(Observation::Opened { replica: self.transport.next_replica(), from: None }, None);
        let started = if is_watch { self.watch_state(freshness).await } else { self.list(freshness).await };
        if started.is_err() {
            // The version may be too old, or of a history that was undone.
            self.known = 0;
        }
        started
    }

    async fn list(&mut self, freshness: Freshness) -> Result<u64, Ended> {
        let mut query = match freshness {
            Freshness::Consistent => String::new(),
            Freshness::Any => "&resourceVersion=0".to_owned(),
            Freshness::NotOlderThan(at) => format!("&resourceVersion={at}&resourceVersionMatch=NotOlderThan"),
            Freshness::Exact(at) => format!("&resourceVersion={at}&resourceVersionMatch=Exact"),
        };
        let limit = self.reads.page_size.map(|limit| format!("&limit={limit}")).unwrap_or_default();
        let mut pods: Vec<Pod> = Vec::new();
        let mut version = None;
        let mut remaining = None;
        loop {
            let body = self.get(format!("{}{limit}{query}", self.path()), false).await?;
            let body = self.read_all(body).await?;
            let page = wire::page(&body).map_err(|why| self.undecodable(why))?;
            let Page { version: of_page, next, remaining: rest, items } = page;
            if *version.get_or_insert(of_page) != of_page {
                return Err(self.undecodable(format!("a page at {of_page} of a list at {version:?}")));
            }
            if remaining.is_some_and(|remaining| remaining != items.len() as u64 + rest.unwrap_or(0)) {
                let text =
                    format!("a page of {} objects, {rest:?} after it, and there were {remaining:?}", items.len());
                return Err(self.undecodable(text));
            }
            remaining = rest;
            pods.extend(items);
            if next.is_empty() {
                break;
            }
            query = format!("&continue={next}");
        }
        let version = version.unwrap_or(0);
        self.state(version, pods);
        Ok(version)
    }

    /// Notes a complete state.
    fn state(&self, version: u64, pods: Vec<Pod>) {
        // HTTP knows no places inside a version.
        let version = last_place(version);
        self.recorder.note(Observation::SnapshotBegin { version, restarted_from: None }, None);
        let objects = pods.len() as i64;
        for pod in pods {
            self.recorder.note(Observation::Event(received(Kind::Added, pod)), None);
        }
        self.recorder.note(Observation::SnapshotEnd { objects }, Some(version));
    }

    fn watch_query(&mut self) -> String {
        let timeout = self.random.random_bool(0.5).then(|| self.random.random_range(5..300));
        timeout.map(|seconds| format!("&timeoutSeconds={seconds}")).unwrap_or_default()
    }

    /// A watch that starts with the state, until it ends.
    async fn watch_state(&mut self, freshness: Freshness) -> Result<u64, Ended> {
        let initial = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        let query = match freshness {
            Freshness::Consistent if self.random.random_bool(0.3) => String::new(),
            Freshness::Consistent => initial.to_owned(),
            Freshness::Any => format!("&resourceVersion=0{initial}"),
            Freshness::NotOlderThan(at) | Freshness::Exact(at) => format!("&resourceVersion={at}{initial}"),
        };
        let path = format!("{}&watch=1&allowWatchBookmarks=true{query}{}", self.path(), self.watch_query());
        let mut body = self.get(path, true).await?;
        let mut events = Events::default();
        let mut pods = Vec::new();
        let at = loop {
            match self.next(&mut body, &mut events).await? {
                Some(Message::Event(kind, pod)) if kind == "ADDED" => pods.push(pod),
                Some(Message::Event(kind, pod)) => {
                    return Err(self.undecodable(format!("{kind} {} in the initial events", pod.key)));
                }
                Some(Message::Bookmark { version, ends_state: true }) => break version,
                Some(Message::Bookmark { version, .. }) => {
                    return Err(self.undecodable(format!("a bookmark at {version} in the initial events")));
                }
                Some(Message::Error(failure)) => return Err(self.refused(failure)),
                None => return Err(self.ended()),
            }
        };
        self.state(at, pods);
        self.events(at, &mut body, &mut events).await
    }

    /// A watch from a version, until it ends. Returns the version that it has reached.
    async fn follow(&mut self, from: u64) -> Result<u64, Ended> {
        let replica = self.transport.next_replica();
        self.recorder.note(Observation::Opened { replica, from: Some(last_place(from)) }, None);
        let bookmarks = if self.reads.bookmarks { "&allowWatchBookmarks=true" } else { "" };
        let path = format!("{}&watch=1&resourceVersion={from}{bookmarks}{}", self.path(), self.watch_query());
        let Ok(mut body) = self.get(path, true).await else { return Ok(from) };
        let mut events = Events::default();
        self.events(from, &mut body, &mut events).await
    }

    async fn events(&mut self, mut at: u64, body: &mut Body, events: &mut Events) -> Result<u64, Ended> {
        loop {
            match self.next(body, events).await {
                Err(Ended) => return Ok(at),
                Ok(None) => {
                    self.ended();
                    return Ok(at);
                }
                Ok(Some(Message::Error(failure))) => return Err(self.refused(failure)),
                Ok(Some(Message::Bookmark { ends_state: true, version })) => {
                    return Err(self.undecodable(format!("the initial events end a second time, at {version}")));
                }
                Ok(Some(Message::Bookmark { version, .. })) if self.reads.bookmarks => {
                    at = version;
                    self.recorder.note(Observation::Bookmark, Some(last_place(version)));
                }
                // A watch that begins with the state asks for bookmarks for its sake.
                Ok(Some(Message::Bookmark { .. })) => {}
                Ok(Some(Message::Event(kind, pod))) => {
                    let kind = match kind.as_str() {
                        "ADDED" => Kind::Added,
                        "MODIFIED" => Kind::Modified,
                        "DELETED" => Kind::Deleted,
                        _ => Kind::Invalid,
                    };
                    at = pod.version;
                    self.recorder.note(Observation::Event(received(kind, pod)), Some(last_place(at)));
                }
            }
        }
    }

    /// The next event of a watch; `None` at its end.
    async fn next(&self, body: &mut Body, events: &mut Events) -> Result<Option<Message>, Ended> {
        loop {
            if let Some(event) = events.next() {
                return event.map(Some).map_err(|why| self.undecodable(why));
            }
            self.world.controls[self.spec.number].pause().await;
            match body.next().await {
                Some(Ok(data)) => events.push(&data),
                Some(Err(error)) => return Err(self.lost(&error)),
                None => return Ok(None),
            }
        }
    }

    fn ended(&self) -> Ended {
        let message = "the watch ended".to_owned();
        self.recorder.note(Observation::Ended { code: "200".to_owned(), reason: String::new(), message }, None);
        Ended
    }

    /// An ERROR event has ended the watch.
    fn refused(&self, failure: wire::Failure) -> Ended {
        let wire::Failure { code, reason, message } = failure;
        self.recorder.note(Observation::Ended { code: format!("ERROR {code}"), reason, message }, None);
        Ended
    }
}

fn received(kind: Kind, Pod { key, uid, version, bytes }: Pod) -> ReceivedEvent {
    let (bytes, schema) = schema::split(bytes);
    ReceivedEvent { kind, key, uid, version, bytes, schema }
}
