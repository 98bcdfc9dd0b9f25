//! Subscribers that can be told to stop reading, and that know what they have been told: what they hold in the end is compared with what
//! the apiserver holds.
//!
//! Every second one leaves its socket alone while it is stalled, so that its PINGs are not answered either and the server may take it for
//! gone; the others read the socket and nothing else, so that only their windows fill up. Whoever finds its connection closed resumes.

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

use super::{BenchError, board::Board, link::Connector, receivers};
use kubefan_common::proto::v1alpha1::{EventType, WatchRequest, WatchResponse, watch_response};

/// Before a connection that was lost is made again.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Compression flag and length.
const PREFIX_BYTES: usize = 5;

/// A set of them. Dropping it ends them.
pub(super) struct Laggards {
    reads: watch::Sender<bool>,
    each: Vec<watch::Receiver<u64>>,
    kept: Vec<Arc<Mutex<Kept>>>,
    /// One that ends has failed.
    tasks: JoinSet<String>,
}

/// What one holds.
#[derive(Default)]
struct Kept {
    /// The objects' versions, by namespace and name.
    objects: HashMap<String, String>,
    catch_ups: usize,
    resumes: usize,
}

impl Laggards {
    /// Subscribes so many, each over a connection of its own with the windows that HTTP/2 begins with.
    pub(super) fn start(connector: &Connector, request: &WatchRequest, count: usize) -> Self {
        let (reads, _) = watch::channel(true);
        let (mut each, mut kept, mut tasks) = (Vec::new(), Vec::new(), JoinSet::new());
        for number in 0..count {
            let (tell, told) = watch::channel(0);
            each.push(told);
            let own = Arc::new(Mutex::new(Kept::default()));
            kept.push(own.clone());
            let laggard = Laggard {
                connector: connector.clone(),
                request: request.clone(),
                is_deaf: number % 2 == 0,
                reads: reads.subscribe(),
                version: tell,
                kept: own,
            };
            tasks.spawn(laggard.run());
        }
        Self { reads, each, kept, tasks }
    }

    /// Tells all to stop reading, or to go on.
    pub(super) fn read(&self, reads: bool) {
        self.reads.send_replace(reads);
    }

    /// Waits until all have everything up to a version.
    pub(super) async fn until(&mut self, version: u64, limit: Duration) -> Result<(), BenchError> {
        let all = async {
            for each in &mut self.each {
                tokio::select! {
                    // Fails where its task has ended, which is what comes next.
                    _ = each.wait_for(|reached| *reached >= version) => {}
                    Some(ended) = self.tasks.join_next() => {
                        let message = ended.unwrap_or_else(|error| error.to_string());
                        return Err(BenchError::Subscriber(message));
                    }
                }
            }
            Ok(())
        };
        timeout(limit, all).await.unwrap_or_else(|_| {
            let there = self.each.iter().filter(|each| *each.borrow() >= version).count() as u64;
            Err(BenchError::Stuck { doing: "catching up", limit, there, expected: self.each.len() as u64 })
        })
    }

    /// How many were sent a catch-up, and how often a connection was made again.
    pub(super) fn catch_ups_and_resumes(&self) -> (usize, usize) {
        self.kept.iter().fold((0, 0), |(catch_ups, resumes), kept| {
            let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            (catch_ups + usize::from(kept.catch_ups > 0), resumes + kept.resumes)
        })
    }

    /// Compares what each holds with the versions of what there is.
    ///
    /// # Errors
    /// When one holds anything else.
    pub(super) fn check(&self, truth: &HashMap<String, String>) -> Result<(), BenchError> {
        for (number, kept) in self.kept.iter().enumerate() {
            let objects = &kept.lock().unwrap_or_else(PoisonError::into_inner).objects;
            let differs = |(key, version): &(&String, &String)| truth.get(*key) != Some(*version);
            let missing = truth.keys().find(|key| !objects.contains_key(*key));
            let wrong = objects.iter().find(differs).map(|(key, version)| {
                let right = truth.get(key).map_or("deleted", String::as_str);
                format!("{key} at {version}, which is {right}")
            });
            if let Some(what) = wrong.or_else(|| missing.map(|key| format!("no {key}"))) {
                return Err(BenchError::Subscriber(format!("stalled subscriber {number} ended with {what}")));
            }
        }
        Ok(())
    }
}

/// One of them.
struct Laggard {
    connector: Connector,
    request: WatchRequest,
    /// Leaves the socket alone while it is stalled.
    is_deaf: bool,
    reads: watch::Receiver<bool>,
    version: watch::Sender<u64>,
    kept: Arc<Mutex<Kept>>,
}

impl Laggard {
    /// Comes back until it is told that it cannot.
    async fn run(mut self) -> String {
        loop {
            if let ControlFlow::Break(message) = self.connected().await {
                return message;
            }
            sleep(RETRY_DELAY).await;
            if *self.version.borrow() > 0 {
                self.request.resource_version = self.version.borrow().to_string();
                self.kept.lock().unwrap_or_else(PoisonError::into_inner).resumes += 1;
            }
        }
    }

    /// One connection to its end: one that broke is made again.
    async fn connected(&mut self) -> ControlFlow<String> {
        // Bytes are counted elsewhere.
        let board = Arc::new(Board::new(0, false));
        let Ok(link) = self.connector.connect(&board).await else { return ControlFlow::Continue(()) };
        let Ok((send, connection)) = h2::client::handshake(link).await else { return ControlFlow::Continue(()) };
        let (mut connection, request) = (pin!(connection), Bytes::from(self.request.encode_to_vec()));
        let (version, kept) = (&self.version, &self.kept);
        let mut receiving = pin!(async {
            match receivers::open(send, request).await {
                Ok(Some(body)) => receive(body, version, kept).await,
                // Not ready.
                Ok(None) => ControlFlow::Continue(()),
                Err(message) => ControlFlow::Break(message),
            }
        });
        let (mut reads, is_deaf) = (self.reads.clone(), self.is_deaf);
        loop {
            tokio::select! {
                biased;
                stalls = reads.wait_for(|reads| !*reads) => if stalls.is_err() { return dropped() },
                ended = &mut receiving => return ended,
                _ = &mut connection => return ControlFlow::Continue(()),
            }
            let mut again = self.reads.clone();
            tokio::select! {
                goes_on = again.wait_for(|reads| *reads) => if goes_on.is_err() { return dropped() },
                _ = &mut connection, if !is_deaf => return ControlFlow::Continue(()),
            }
        }
    }
}

/// Nobody is left to tell it anything.
fn dropped() -> ControlFlow<String> {
    ControlFlow::Break("its set was dropped".to_owned())
}

/// Takes what comes on a stream until it ends.
async fn receive(mut body: RecvStream, version: &watch::Sender<u64>, kept: &Mutex<Kept>) -> ControlFlow<String> {
    let mut buffer = BytesMut::new();
    while let Some(data) = body.data().await {
        let Ok(data) = data else { return ControlFlow::Continue(()) };
        // Cannot fail: so much was just received.
        let _ = body.flow_control().release_capacity(data.len());
        buffer.extend_from_slice(&data);
        while let Some(message) = next_message(&mut buffer) {
            let response = match WatchResponse::decode(message) {
                Ok(response) => response,
                Err(error) => return ControlFlow::Break(error.to_string()),
            };
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(message) = kept.apply(&response) {
                return ControlFlow::Break(message);
            }
            if let Ok(reached) = response.resume_version.parse() {
                version.send_replace(reached);
            }
        }
    }
    match body.trailers().await {
        // Ended in order: the server says why it does not go on.
        Ok(Some(trailers)) if trailers.get("grpc-status").is_some_and(|code| code != receivers::UNAVAILABLE) => {
            ControlFlow::Break(format!("a stalled watch ended: {}", receivers::status(&trailers)))
        }
        _ => ControlFlow::Continue(()),
    }
}

impl Kept {
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
                return Err("a stalled watch was started over with a snapshot".to_owned());
            }
            Some(watch_response::Message::CatchUpBegin(_)) => self.catch_ups += 1,
            _ => {}
        }
        Ok(())
    }
}

/// Takes a whole message off the front, if there is one.
fn next_message(buffer: &mut BytesMut) -> Option<Bytes> {
    let length = (buffer.get(1..PREFIX_BYTES)?).get_u32() as usize;
    (buffer.len() >= PREFIX_BYTES + length).then(|| {
        buffer.advance(PREFIX_BYTES);
        buffer.split_to(length).freeze()
    })
}
