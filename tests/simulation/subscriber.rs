//! Subscribers. Each keeps a watch as long as the simulation runs, with the generated client or the
//! client library, and records everything it receives. After each broken connection it connects to
//! the other replica.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use kubefan_client::{Client, ClientError, ClientOptions, OnExpired, OnLag, WatchItem, WatchOptions};
use kubefan_common::{
    encoding::{chunk, delta},
    proto::v1alpha1::{
        self, Event, EventType, WatchRequest, WatchResponse, watch_response::Message,
        watch_service_client::WatchServiceClient,
    },
};
use kubefan_model::format;
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use tokio::time::sleep;
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt;
use tower::service_fn;

use super::{
    history::{Encoding, Observation, ReceivedEvent, Recorder, Spec, mark, version},
    world::World,
};

/// Connection and request of a subscriber.
#[derive(Clone, Debug)]
pub(crate) struct ClientSettings {
    pub(crate) start_after: Duration,
    pub(crate) window_bytes: u32,
    pub(crate) bookmark_interval: Duration,
    /// For the generated client: its watches end after this many seconds, or never if 0.
    pub(crate) timeout_seconds: i64,
    pub(crate) first_replica: usize,
}

/// A channel that connects to the replicas in turn.
pub(crate) fn channel(
    world: &Arc<World>,
    number: usize,
    settings: &ClientSettings,
    turn: &Arc<AtomicUsize>,
) -> Channel {
    let world = world.clone();
    let turn = turn.clone();
    let connect = move |_| {
        let replica = turn.fetch_add(1, Ordering::Relaxed) % world.nodes.len();
        let connected = world.nodes[replica].connect(&world.controls[number].route);
        std::future::ready(connected.map(TokioIo::new))
    };
    Endpoint::from_static("http://kubefan.test")
        .initial_stream_window_size(settings.window_bytes)
        .initial_connection_window_size(2 * settings.window_bytes)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(service_fn(connect))
}

/// The replica of the last connection.
fn last(world: &World, turn: &AtomicUsize) -> usize {
    (turn.load(Ordering::Relaxed) + world.nodes.len() - 1) % world.nodes.len()
}

/// Watches forever with the generated client.
pub(crate) async fn generated(
    world: Arc<World>,
    spec: Spec,
    settings: ClientSettings,
    recorder: Recorder,
    random: Pcg64Mcg,
) {
    sleep(settings.start_after).await;
    world.controls[spec.number].can_start_over.store(true, Ordering::Relaxed);
    let delta_bases = DeltaBases::default();
    let turn = Arc::new(AtomicUsize::new(settings.first_replica));
    let cluster = String::new();
    let mut generated = Generated { world, spec, settings, recorder, random, turn, resume: None, cluster, delta_bases };
    loop {
        generated.world.controls[generated.spec.number].stay_away().await;
        let status = generated.watch().await.err().unwrap_or_else(|| Status::ok("the watch ended"));
        generated.ended(&status).await;
    }
}

struct Generated {
    world: Arc<World>,
    spec: Spec,
    settings: ClientSettings,
    recorder: Recorder,
    random: Pcg64Mcg,
    turn: Arc<AtomicUsize>,
    resume: Option<String>,
    /// The cluster of the last snapshot.
    cluster: String,
    delta_bases: DeltaBases,
}

/// The bases for decoding deltas.
#[derive(Default)]
struct DeltaBases {
    objects: BTreeMap<String, Bytes>,
    /// Whether the bases started with a whole snapshot, so none is missing.
    is_complete: bool,
    /// Whether the bases are the state at the resume version.
    is_current: bool,
}

/// Marks a resume version whose events were all sent.
const END: &str = ".end";

impl DeltaBases {
    fn decode(&mut self, mut event: Event) -> Result<ReceivedEvent, String> {
        let key = format!("{}/{}", event.namespace, event.name);
        if let Some(delta) = event.delta.take() {
            let base = self.objects.get(&key).ok_or_else(|| format!("a delta for {key}, which is not held"))?;
            event.object =
                delta::decode(base, &delta, delta::OBJECT_BYTES_MAX).map_err(|error| format!("{key}: {error}"))?;
        }
        if event.r#type() == EventType::Deleted {
            self.objects.remove(&key)
        } else {
            self.objects.insert(key, event.object.clone())
        };
        Ok(ReceivedEvent::of(&event))
    }
}

impl Generated {
    async fn watch(&mut self) -> Result<(), Status> {
        let from = self.resume.as_deref().and_then(version);
        let deltas = self.spec.encoding == Encoding::Deltas;
        if !self.delta_bases.is_current {
            // A span broke off, and no later message needs to undo its changes.
            self.delta_bases = DeltaBases::default();
        }
        let resume = self.resume.as_deref().unwrap_or_default();
        let complete = resume.strip_suffix(END);
        let request = WatchRequest {
            target: Some(self.spec.selection.target()),
            resource_version: complete.unwrap_or(resume).to_owned(),
            version_is_complete: (!resume.is_empty()).then_some(complete.is_some()),
            cluster: self.cluster.clone(),
            timeout_seconds: self.settings.timeout_seconds,
            bookmark_interval: self.settings.bookmark_interval.try_into().ok(),
            projection: self.spec.projected.request(),
            encoding: match self.spec.encoding {
                Encoding::Json => v1alpha1::Encoding::Json.into(),
                Encoding::Zstd => v1alpha1::Encoding::Zstd.into(),
                Encoding::Deltas => v1alpha1::Encoding::ZstdDelta.into(),
            },
            state_kept: deltas && from.is_some() && self.delta_bases.is_complete,
            on_lag: if self.spec.conflates { v1alpha1::OnLag::Conflate.into() } else { v1alpha1::OnLag::Expire.into() },
            on_expired: if self.spec.restarts {
                v1alpha1::OnExpired::Restart.into()
            } else {
                v1alpha1::OnExpired::Fail.into()
            },
        };
        let channel = channel(&self.world, self.spec.number, &self.settings, &self.turn);
        let mut client = WatchServiceClient::new(channel).max_decoding_message_size(64 << 20);
        // The channel is about to connect to the next replica in turn.
        let replica = self.turn.load(Ordering::Relaxed) % self.world.nodes.len();
        self.recorder.note(Observation::Opened { replica, from }, None);
        let mut stream = client.watch(request).await?.into_inner();
        loop {
            self.world.controls[self.spec.number].pause().await;
            match stream.message().await? {
                None => return Ok(()),
                Some(response) => self.record(response).map_err(|message| {
                    self.recorder.note(Observation::Undecodable(message.clone()), None);
                    Status::data_loss(message)
                })?,
            }
        }
    }

    fn record(&mut self, mut response: WatchResponse) -> Result<(), String> {
        if response.version_is_complete {
            response.resume_version += END;
        }
        let resume = version(&response.resume_version);
        if let Some(Message::SnapshotBegin(begin)) = &response.message {
            // There is only one cluster, and every replica knows it.
            self.cluster.clone_from(&begin.cluster);
        }
        // Set before decoding: a message that fails to decode may have changed some of the bases.
        self.delta_bases.is_current = false;
        match mark(&response) {
            Some(what) => {
                match what {
                    Observation::SnapshotBegin { .. } => self.delta_bases = DeltaBases::default(),
                    Observation::SnapshotEnd { .. } => self.delta_bases.is_complete = true,
                    _ => {}
                }
                self.recorder.note(what, resume);
            }
            None => match response.message {
                Some(Message::Event(event)) => {
                    let received = self.delta_bases.decode(event)?;
                    self.recorder.note(Observation::Event(received), resume);
                }
                Some(Message::SnapshotChunk(chunk)) => {
                    let events =
                        chunk::decode(&chunk.zstd, chunk::CONTENT_BYTES_MAX).map_err(|error| error.to_string())?;
                    for event in events {
                        let received = self.delta_bases.decode(event)?;
                        self.recorder.note(Observation::Event(received), resume);
                    }
                }
                _ => {}
            },
        }
        if resume.is_some() {
            self.resume = Some(response.resume_version);
            self.delta_bases.is_current = true;
        }
        Ok(())
    }

    async fn ended(&mut self, status: &Status) {
        let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
        let code = format!("{:?}", status.code());
        let message = status.message().to_owned();
        let over = matches!(reason.as_str(), "RESOURCE_VERSION_TOO_OLD" | "HISTORY_REWRITTEN");
        let over = over || self.world.controls[self.spec.number].takes_start_over();
        self.recorder.note(Observation::Ended { code, reason, message }, None);
        if over {
            self.recorder.note(Observation::StartsOver { goes_on: false }, None);
            self.resume = None;
            self.delta_bases = DeltaBases::default();
        } else if self.random.random_bool(0.3) {
            // Behaves like a restarted program that stored its resume version but not its state.
            self.delta_bases = DeltaBases::default();
        }
        sleep(Duration::from_millis(self.random.random_range(50..1500))).await;
    }
}

/// Watches forever with the client library.
pub(crate) async fn library(
    world: Arc<World>,
    spec: Spec,
    settings: ClientSettings,
    recorder: Recorder,
    mut random: Pcg64Mcg,
) {
    sleep(settings.start_after).await;
    let turn = Arc::new(AtomicUsize::new(settings.first_replica));
    let channel = channel(&world, spec.number, &settings, &turn);
    let client = Client::from_channel(channel, "kubefan.test", &ClientOptions::default());
    loop {
        let options = WatchOptions {
            bookmark_interval: Some(settings.bookmark_interval),
            encoding: match spec.encoding {
                Encoding::Json => format::Encoding::Json,
                Encoding::Zstd => format::Encoding::Zstd,
                Encoding::Deltas => format::Encoding::ZstdDelta,
            },
            on_expired: if spec.restarts { OnExpired::Restart } else { OnExpired::Fail },
            on_lag: if spec.conflates { OnLag::Conflate } else { OnLag::Expire },
            seed: Some(random.random()),
            ..WatchOptions::default()
        };
        let mut watch = client.watch(spec.selection.target(), options);
        let mut open = true;
        let mut resume = None;
        recorder.note(Observation::Opened { replica: last(&world, &turn), from: None }, None);
        loop {
            world.controls[spec.number].pause().await;
            let item = match watch.next().await {
                Some(Ok(item)) => item,
                Some(Err(error)) => {
                    recorder.note(ended(&error), None);
                    break;
                }
                None => break,
            };
            // The end of a snapshot may be at the version from which the watch could not resume.
            let is_given = matches!(item, WatchItem::SnapshotEnd { .. } | WatchItem::GapEnd | WatchItem::CatchUpEnd);
            let given = version(watch.resume_version()).filter(|version| is_given || Some(*version) != resume);
            resume = given.or(resume);
            let what = match item {
                WatchItem::Disconnected { error, .. } => {
                    recorder.note(ended(&error), None);
                    world.controls[spec.number].stay_away().await;
                    continue;
                }
                WatchItem::Restarted { error } => {
                    recorder.note(ended(&error), None);
                    recorder.note(Observation::StartsOver { goes_on: true }, None);
                    open = false;
                    resume = None;
                    continue;
                }
                WatchItem::Reconnected { from } => {
                    open = true;
                    Observation::Opened { replica: last(&world, &turn), from: version(&from) }
                }
                WatchItem::SnapshotBegin { resource_version, restarted_from, .. } => {
                    if !std::mem::replace(&mut open, true) {
                        recorder.note(Observation::Opened { replica: last(&world, &turn), from: None }, None);
                    }
                    let version_of = |text: &str| version(text).unwrap_or(0);
                    Observation::SnapshotBegin {
                        version: version_of(&resource_version),
                        restarted_from: version(&restarted_from),
                    }
                }
                WatchItem::SnapshotEnd { object_count } => Observation::SnapshotEnd { objects: object_count },
                WatchItem::Event(event) => Observation::Event(ReceivedEvent::of(&event)),
                WatchItem::GapBegin { resource_version, reason } => {
                    Observation::GapBegin { from: version(&resource_version).unwrap_or(0), reason }
                }
                WatchItem::GapEnd => Observation::GapEnd,
                WatchItem::CatchUpBegin { resource_version } => {
                    Observation::CatchUpBegin { from: version(&resource_version).unwrap_or(0) }
                }
                WatchItem::CatchUpEnd => Observation::CatchUpEnd,
                WatchItem::Bookmark => Observation::Bookmark,
            };
            recorder.note(what, given);
        }
        recorder.note(Observation::StartsOver { goes_on: false }, None);
        sleep(Duration::from_millis(random.random_range(50..1500))).await;
    }
}

fn ended(error: &ClientError) -> Observation {
    match error {
        ClientError::Undecodable { message, .. } => Observation::Undecodable(message.clone()),
        error => Observation::Ended {
            code: format!("{:?}", error.code()),
            reason: error.reason().to_owned(),
            message: error.to_string(),
        },
    }
}
