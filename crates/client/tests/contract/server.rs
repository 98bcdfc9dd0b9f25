//! A server that answers lists and watches as the script says, and logs the requests.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use kubefan_client::{
    ApiStatus, ClientError, ListOptions, ListPage, ListerWatcher, RawObject, WatchEvent, WatchEventKind, WatchEvents,
};
use tokio::sync::mpsc;

use crate::{
    object::raw,
    script::{Log, option},
};

/// Events of one script that a watch has not read yet.
const EVENTS_MAX: usize = 1000;

/// Clones are the same server.
#[derive(Clone)]
pub(crate) struct Server {
    log: Log,
    watch_list: bool,
    /// Requests are logged.
    requests: bool,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    version: String,
    objects: Vec<RawObject>,
    /// Objects in a page of a list. 0: the client's limit has no effect.
    page: usize,
    /// The script sends the initial events of a watch-list itself.
    manual: bool,
    fail_list: VecDeque<String>,
    fail_watch: VecDeque<String>,
    watch: Option<mpsc::Sender<Result<WatchEvent, ClientError>>>,
    in_snapshot: bool,
}

fn failure(kind: &str) -> ClientError {
    let (code, reason, message) = match kind {
        "expired" => (410, "Expired", "too old resource version"),
        "too-large" => (504, "Timeout", "Too large resource version: 100, current: 10"),
        "too-many-requests" => (429, "TooManyRequests", "try again later"),
        "internal" => (500, "InternalError", "Internal error occurred: broken"),
        "unavailable" => (503, "ServiceUnavailable", "starting"),
        "forbidden" => (403, "Forbidden", "things is forbidden: no"),
        "invalid" => (422, "Invalid", "sendInitialEvents: Forbidden: not allowed"),
        "refused" => {
            return ClientError::Unreachable { address: "server".to_owned(), message: "Connection refused".to_owned() };
        }
        _ => panic!("unknown failure {kind}"),
    };
    let reason = reason.to_owned();
    let message = message.to_owned();
    ClientError::Api(Box::new(ApiStatus::new(code, &reason, &message)))
}

/// The next failure that the script has prepared.
fn take_failure(failures: &mut VecDeque<String>) -> Result<(), ClientError> {
    match failures.pop_front() {
        Some(kind) if kind != "none" => Err(failure(&kind)),
        _ => Ok(()),
    }
}

pub(crate) fn shown(version: &str) -> &str {
    if version.is_empty() { "none" } else { version }
}

impl Server {
    pub(crate) fn new(log: &Log, arguments: &[&str]) -> Self {
        let state = State { version: "0".to_owned(), ..State::default() };
        let watch_list = option(arguments, "list").is_none();
        let requests = option(arguments, "requests").is_some();
        Self { log: log.clone(), watch_list, requests, state: Arc::new(Mutex::new(state)) }
    }

    fn requested(&self, line: String) {
        if self.requests {
            self.log.add("server", line);
        }
    }

    /// Executes the steps that concern the server. False for another step.
    pub(crate) fn step(&self, command: &str, arguments: &[&str]) -> bool {
        let mut state = self.state.lock().unwrap();
        let words = || arguments.iter().map(|word| (*word).to_owned());
        match command {
            "state" => {
                state.version = arguments[0].to_owned();
                state.objects = arguments[1..].iter().map(|text| raw(text)).collect();
            }
            "pages" => state.page = arguments[0].parse().unwrap(),
            "manual-snapshot" => state.manual = true,
            "fail-list" => state.fail_list.extend(words()),
            "fail-watch" => state.fail_watch.extend(words()),
            "end-watch" => state.watch = None,
            "event" => self.event(&mut state, arguments[0], arguments.get(1).copied().unwrap_or_default()),
            _ => return false,
        }
        true
    }

    fn event(&self, state: &mut State, kind: &str, argument: &str) {
        let Some(watch) = state.watch.clone().filter(|watch| !watch.is_closed()) else {
            self.log.add("server", "no watch");
            return;
        };
        let object = |make: fn(RawObject) -> WatchEventKind| {
            let object = raw(argument);
            let version = object.resource_version.to_string();
            if state.in_snapshot { make(object).into() } else { make(object).at(&version) }
        };
        let event = match kind {
            "added" => object(WatchEventKind::Added),
            "modified" => object(WatchEventKind::Modified),
            "deleted" => object(WatchEventKind::Deleted),
            "bookmark" => WatchEventKind::Bookmark.at(argument),
            "initial-end" => {
                state.in_snapshot = false;
                WatchEventKind::SnapshotEnd.at(argument)
            }
            "unreadable" => WatchEventKind::Unreadable("no metadata".to_owned()).into(),
            "error" => {
                watch.try_send(Err(failure(argument))).unwrap();
                state.watch = None;
                return;
            }
            _ => panic!("unknown event {kind}"),
        };
        watch.try_send(Ok(event)).unwrap();
    }
}

impl ListerWatcher for Server {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        let mut request = format!("list rv={}", shown(&options.resource_version));
        if options.limit != 0 {
            request += &format!(" limit={}", options.limit);
        }
        if !options.continue_token.is_empty() {
            request += &format!(" continue={}", options.continue_token);
        }
        self.requested(request);
        let mut state = self.state.lock().unwrap();
        let page = take_failure(&mut state.fail_list).map(|()| {
            let start = options.continue_token.parse().unwrap_or_default();
            let all = state.objects.len();
            let paged = state.page != 0 && options.limit != 0 && start + state.page < all;
            let end = if paged { start + state.page } else { all };
            ListPage {
                resource_version: state.version.clone(),
                objects: state.objects[start..end].to_vec(),
                continue_token: if paged { end.to_string() } else { String::new() },
            }
        });
        async { page }.boxed()
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        let snapshot = options.send_initial_events;
        let request = if snapshot { "watch-list" } else { "watch" };
        self.requested(format!("{request} rv={}", shown(&options.resource_version)));
        let mut state = self.state.lock().unwrap();
        let result = take_failure(&mut state.fail_watch).map(|()| {
            let (sender, receiver) = mpsc::channel(EVENTS_MAX);
            let send = |event: WatchEvent| sender.try_send(Ok(event)).unwrap();
            state.in_snapshot = snapshot && state.manual;
            if snapshot {
                send(WatchEventKind::SnapshotBegin.into());
            }
            if snapshot && !state.manual {
                for object in &state.objects {
                    send(WatchEventKind::Added(object.clone()).into());
                }
                send(WatchEventKind::SnapshotEnd.at(&state.version));
            }
            state.watch = Some(sender);
            stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) }).boxed()
        });
        async { result }.boxed()
    }

    fn supports_watch_list(&self) -> bool {
        self.watch_list
    }

    fn describe(&self) -> String {
        "things from a script".to_owned()
    }
}
