//! Subscribers of the scenario `stalled`: they stop and resume reading on command, and remember the
//! versions of all objects they receive. At the end these are compared with the apiserver's.
//!
//! While stalled, every second subscriber does not read its socket at all. It therefore does not
//! answer PINGs, and the server may close the connection as dead. The others keep reading the
//! socket but not the stream, so that only their flow-control windows fill up. A subscriber whose
//! connection was closed resumes from its last version.

use std::{
    collections::HashMap,
    ops::ControlFlow,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use h2::RecvStream;
use prost::Message;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{BenchError, connector::Connector, counters::Counters, messages::PREFIX_BYTES, receivers};
use kubefan_common::proto::v1alpha1::{EventType, WatchRequest, WatchResponse, watch_response};

/// Delay before a lost connection is opened again.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A set of such subscribers. Dropping it stops them.
pub(super) struct StalledSubscribers {
    reading: watch::Sender<bool>,
    versions: Vec<watch::Receiver<u64>>,
    states: Vec<Arc<Mutex<SubscriberState>>>,
    /// A task that ends has failed.
    tasks: JoinSet<String>,
}

/// The objects and counts of one subscriber.
#[derive(Default)]
struct SubscriberState {
    /// The objects' resource versions, by namespace and name.
    objects: HashMap<String, String>,
    catch_ups: usize,
    resumes: usize,
}

impl StalledSubscribers {
    /// Starts `count` subscribers, each on its own connection with HTTP/2's initial windows.
    pub(super) fn start(connector: &Connector, request: &WatchRequest, count: usize) -> Self {
        let (reading, _) = watch::channel(true);
        let mut versions = Vec::new();
        let mut states = Vec::new();
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let (version_sender, version_receiver) = watch::channel(0);
            versions.push(version_receiver);
            let state = Arc::new(Mutex::new(SubscriberState::default()));
            states.push(state.clone());
            let subscriber = StalledSubscriber {
                connector: connector.clone(),
                request: request.clone(),
                ignores_socket: number % 2 == 0,
                reading: reading.subscribe(),
                version: version_sender,
                state,
            };
            tasks.spawn(subscriber.run());
        }
        Self { reading, versions, states, tasks }
    }

    /// Makes all subscribers stop or resume reading.
    pub(super) fn set_reading(&self, reading: bool) {
        self.reading.send_replace(reading);
    }

    /// Waits until every subscriber has received everything up to a version.
    pub(super) async fn wait_for_version(&mut self, version: u64, limit: Duration) -> Result<(), BenchError> {
        let all = async {
            for version_receiver in &mut self.versions {
                tokio::select! {
                    // An error means that the task has ended. The other branch then reports why.
                    _ = version_receiver.wait_for(|reached| *reached >= version) => {}
                    Some(ended) = self.tasks.join_next() => {
                        let message = ended.unwrap_or_else(|error| error.to_string());
                        return Err(BenchError::Subscriber(message));
                    }
                }
            }
            Ok(())
        };
        timeout(limit, all).await.unwrap_or_else(|_| {
            let reached =
                self.versions.iter().filter(|version_receiver| *version_receiver.borrow() >= version).count() as u64;
            Err(BenchError::Stuck { doing: "catching up", limit, reached, expected: self.versions.len() as u64 })
        })
    }

    /// The number of subscribers that received a catch-up, and the number of reconnections.
    pub(super) fn catch_ups_and_resumes(&self) -> (usize, usize) {
        self.states.iter().fold((0, 0), |(catch_ups, resumes), state| {
            let state = state.lock().unwrap_or_else(PoisonError::into_inner);
            (catch_ups + usize::from(state.catch_ups > 0), resumes + state.resumes)
        })
    }

    /// Compares the objects of every subscriber with the expected versions.
    ///
    /// # Errors
    /// If a subscriber's objects differ.
    pub(super) fn check(&self, expected: &HashMap<String, String>) -> Result<(), BenchError> {
        for (number, state) in self.states.iter().enumerate() {
            let objects = &state.lock().unwrap_or_else(PoisonError::into_inner).objects;
            let differs = |(key, version): &(&String, &String)| expected.get(*key) != Some(*version);
            let missing = expected.keys().find(|key| !objects.contains_key(*key));
            let wrong = objects.iter().find(differs).map(|(key, version)| {
                let right = expected.get(key).map_or("deleted", String::as_str);
                format!("{key} at {version} (expected: {right})")
            });
            if let Some(what) = wrong.or_else(|| missing.map(|key| format!("no {key}"))) {
                return Err(BenchError::Subscriber(format!("stalled subscriber {number} ended with {what}")));
            }
        }
        Ok(())
    }
}

/// One such subscriber.
struct StalledSubscriber {
    connector: Connector,
    request: WatchRequest,
    /// Does not read the socket while stalled.
    ignores_socket: bool,
    reading: watch::Receiver<bool>,
    version: watch::Sender<u64>,
    state: Arc<Mutex<SubscriberState>>,
}

impl StalledSubscriber {
    /// Reconnects until the server refuses the watch. Returns the reason.
    async fn run(mut self) -> String {
        loop {
            if let ControlFlow::Break(message) = self.run_connection().await {
                return message;
            }
            sleep(RETRY_DELAY).await;
            if *self.version.borrow() > 0 {
                self.request.resource_version = self.version.borrow().to_string();
                self.state.lock().unwrap_or_else(PoisonError::into_inner).resumes += 1;
            }
        }
    }

    /// Runs one connection. `Continue` means that it was lost and can be opened again.
    async fn run_connection(&mut self) -> ControlFlow<String> {
        // A placeholder: these bytes are not part of the measurement.
        let counters = Arc::new(Counters::new(0, false));
        let Ok(transport) = self.connector.connect(&counters).await else { return ControlFlow::Continue(()) };
        let Ok((send, connection)) = h2::client::handshake(transport).await else { return ControlFlow::Continue(()) };
        let mut connection = pin!(connection);
        let request = Bytes::from(self.request.encode_to_vec());
        let version = &self.version;
        let state = &self.state;
        let mut receiving = pin!(async {
            match receivers::open_watch(send, request).await {
                Ok(Some(body)) => receive(body, version, state).await,
                // The server is not ready yet.
                Ok(None) => ControlFlow::Continue(()),
                Err(message) => ControlFlow::Break(message),
            }
        });
        let mut reading = self.reading.clone();
        let ignores_socket = self.ignores_socket;
        loop {
            tokio::select! {
                biased;
                stalled = reading.wait_for(|reading| !*reading) => if stalled.is_err() { return stopped() },
                ended = &mut receiving => return ended,
                _ = &mut connection => return ControlFlow::Continue(()),
            }
            let mut resumes = self.reading.clone();
            tokio::select! {
                resumed = resumes.wait_for(|reading| *reading) => if resumed.is_err() { return stopped() },
                _ = &mut connection, if !ignores_socket => return ControlFlow::Continue(()),
            }
        }
    }
}

/// The controlling [`StalledSubscribers`] no longer exists.
fn stopped() -> ControlFlow<String> {
    ControlFlow::Break("the set of subscribers was dropped".to_owned())
}

/// Receives messages until the stream ends.
async fn receive(
    mut body: RecvStream,
    version: &watch::Sender<u64>,
    state: &Mutex<SubscriberState>,
) -> ControlFlow<String> {
    let mut buffer = BytesMut::new();
    while let Some(data) = body.data().await {
        let Ok(data) = data else { return ControlFlow::Continue(()) };
        // Cannot fail: this many bytes were just received.
        let _ = body.flow_control().release_capacity(data.len());
        buffer.extend_from_slice(&data);
        while let Some(message) = next_message(&mut buffer) {
            let response = match WatchResponse::decode(message) {
                Ok(response) => response,
                Err(error) => return ControlFlow::Break(error.to_string()),
            };
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(message) = state.apply(&response) {
                return ControlFlow::Break(message);
            }
            if let Ok(reached) = response.resume_version.split('.').next().unwrap_or_default().parse() {
                version.send_replace(reached);
            }
        }
    }
    match body.trailers().await {
        // The server ended the watch with a status, which says why it cannot be resumed.
        Ok(Some(trailers)) if trailers.get("grpc-status").is_some_and(|code| code != receivers::UNAVAILABLE) => {
            ControlFlow::Break(format!("a stalled watch ended: {}", receivers::grpc_status(&trailers)))
        }
        _ => ControlFlow::Continue(()),
    }
}

impl SubscriberState {
    fn apply(&mut self, response: &WatchResponse) -> Result<(), String> {
        match &response.message {
            Some(watch_response::Message::Event(event)) => {
                let key = format!("{}/{}", event.namespace, event.name);
                match event.r#type() {
                    EventType::Deleted => drop(self.objects.remove(&key)),
                    _ => drop(self.objects.insert(key, event.resource_version.clone())),
                }
            }
            Some(watch_response::Message::SnapshotBegin(_)) if !self.objects.is_empty() => {
                return Err("a stalled watch was restarted with a snapshot".to_owned());
            }
            Some(watch_response::Message::CatchUpBegin(_)) => self.catch_ups += 1,
            _ => {}
        }
        Ok(())
    }
}

/// Removes the first complete message from the buffer, if there is one.
fn next_message(buffer: &mut BytesMut) -> Option<Bytes> {
    let length = (buffer.get(1..PREFIX_BYTES)?).get_u32() as usize;
    (buffer.len() >= PREFIX_BYTES + length).then(|| {
        buffer.advance(PREFIX_BYTES);
        buffer.split_to(length).freeze()
    })
}
