//! Delta queues as pieces of scripts.

use std::{collections::VecDeque, sync::Arc};

use futures::{FutureExt, future::LocalBoxFuture};
use kubefan_client::{Delta, DeltaFifo, Indexer, RealFifo, Store};
use serde_json::Value;

use crate::{
    object::{format, format_deleted, things},
    script::Piece,
    stores::{change, replacement},
};

/// A delta queue. The script sets its known objects, and no step changes them.
pub(crate) struct Queues {
    known: Indexer<Value>,
    queue: Queue,
    /// The deltas of the last batch that `pop` has not shown yet.
    popped: VecDeque<(Delta<Value>, bool)>,
}

enum Queue {
    Delta(DeltaFifo<Value>),
    Real(RealFifo<Value>),
}

impl Queue {
    fn store(&self) -> &dyn Store<Value> {
        match self {
            Self::Delta(queue) => queue,
            Self::Real(queue) => queue,
        }
    }

    /// The next deltas and whether they are initial. `None` if the queue is closed and empty.
    fn pop(&self) -> Option<(Vec<Delta<Value>>, bool)> {
        let mut popped = None;
        let process = |deltas, initial| popped = Some((deltas, initial));
        let waited = match self {
            Self::Delta(queue) => queue.pop(process).now_or_never(),
            Self::Real(queue) => queue.pop(process).now_or_never(),
        };
        let open = waited.expect("the script pops from an empty queue that is open");
        assert_eq!(open, popped.is_some());
        popped
    }
}

impl Queues {
    pub(crate) fn delta() -> Self {
        let known = Indexer::new();
        let queue = Queue::Delta(DeltaFifo::new(Some(Arc::new(known.clone()))));
        Self { known, queue, popped: VecDeque::new() }
    }

    pub(crate) fn real() -> Self {
        let known = Indexer::new();
        let queue = Queue::Real(RealFifo::new(Arc::new(known.clone())));
        Self { known, queue, popped: VecDeque::new() }
    }

    fn pop(&mut self) -> String {
        if matches!(self.queue, Queue::Delta(_)) {
            return self.pop_batch();
        }
        // A batch is one call here. A script sees its deltas one by one, as client-go delivers
        // them.
        if self.popped.is_empty() {
            let Some((deltas, initial)) = self.queue.pop() else { return "closed".to_owned() };
            self.popped.extend(deltas.into_iter().map(|delta| (delta, initial)));
        }
        let (delta, initial) = self.popped.pop_front().unwrap();
        show(&[delta], initial)
    }

    fn pop_batch(&self) -> String {
        self.queue.pop().map_or("closed".to_owned(), |(deltas, initial)| show(&deltas, initial))
    }
}

fn show(deltas: &[Delta<Value>], initial: bool) -> String {
    let texts: Vec<_> = deltas
        .iter()
        .map(|delta| match delta {
            Delta::Added(object) => format!("Added {}", format(object)),
            Delta::Updated(object) => format!("Updated {}", format(object)),
            Delta::Replaced(object) => format!("Replaced {}", format(object)),
            Delta::Sync(object) => format!("Sync {}", format(object)),
            Delta::Deleted(deleted) => format!("Deleted {}", format_deleted(deleted)),
        })
        .collect();
    texts.join(", ") + if initial { " (initial)" } else { "" }
}

impl Piece for Queues {
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>> {
        async move {
            if let Some(change) = change(command, arguments) {
                self.queue.store().apply(change);
                return Vec::new();
            }
            match command {
                "new" => {}
                "known" => {
                    for object in things(arguments) {
                        self.known.insert(object);
                    }
                }
                "replace" => self.queue.store().replace(replacement(arguments)),
                "resync" => self.queue.store().resync(),
                "close" => match &self.queue {
                    Queue::Delta(queue) => queue.close(),
                    Queue::Real(queue) => queue.close(),
                },
                "synced" => {
                    let synced = match &self.queue {
                        Queue::Delta(queue) => queue.has_synced(),
                        Queue::Real(queue) => queue.has_synced(),
                    };
                    return vec![synced.to_string()];
                }
                "pop" => return vec![self.pop()],
                "pop-batch" => return vec![self.pop_batch()],
                _ => panic!("unknown step {command}"),
            }
            Vec::new()
        }
        .boxed_local()
    }
}
