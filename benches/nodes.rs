//! Agents of one node each, in a cache of many nodes.

use std::sync::Arc;

use kubefan_cache::{CacheWriter, Update};
use kubefan_fanout::{ConnectionWaker, Hub, Start, StreamWaker};
use kubefan_model::{ResourceVersion, event::EventType, format::Format};
use tokio::time::Instant;

use crate::common::{BATCH_BYTES_MAX, PodKind, apply_list, hub};

/// A cache of small pods, [`PODS_PER_NODE`](Self::PODS_PER_NODE) on each node, indexed by node.
pub(crate) struct Nodes {
    hub: Arc<Hub>,
    kind: PodKind,
    /// The version of the list, before the changes.
    listed: ResourceVersion,
}

impl Nodes {
    pub(crate) const PODS_PER_NODE: usize = 30;
    /// The number of events. It does not depend on the number of pods.
    const EVENTS: usize = 10_000;
    /// The first of them change each pod of the first nodes; the others change pods of all others.
    const EVENTS_OF_FIRST_NODES: usize = 100 * Self::PODS_PER_NODE;

    /// Lists `count` pods, and then changes pods of all nodes.
    pub(crate) fn new(count: usize) -> Self {
        let kind = PodKind::new();
        let hub = hub(&kind, 2 * Self::EVENTS);
        let pod = |number: usize, version: usize| {
            let node = number / Self::PODS_PER_NODE;
            kind.parse(&format!(
                r#"{{"metadata":{{"namespace":"default","name":"pod-{number}","uid":"uid-{number}","resourceVersion":"{version}","labels":{{"app":"web"}}}},"spec":{{"nodeName":"node-{node}"}}}}"#
            ))
        };
        let mut writer = CacheWriter::default();
        let listed = count + 1;
        let pods = (0..count).map(|number| pod(number, number + 1)).collect();
        if let Some(commit) = apply_list(&mut writer, pods, listed as u64) {
            hub.batch().commit(commit, Instant::now());
        }
        for event in 0..Self::EVENTS {
            let first = Self::EVENTS_OF_FIRST_NODES;
            let number = match event.checked_sub(first) {
                None => event,
                Some(after) => first + after * (count - first) / (Self::EVENTS - first),
            };
            let changed = pod(number, listed + event + 1);
            let commit = writer.apply(Update::Event(EventType::Modified, changed)).expect("versions grow");
            if let Some(commit) = commit {
                hub.batch().commit(commit, Instant::now());
            }
        }
        let nodes = Self { hub, kind, listed: ResourceVersion::new(listed as u64).expect("not zero") };
        // An index is built at the second use.
        for _ in 0..2 {
            assert_eq!(nodes.snapshot(0), Self::PODS_PER_NODE + 2);
        }
        nodes
    }

    /// The messages of a subscriber that starts with the pods of a node.
    pub(crate) fn snapshot(&self, node: usize) -> usize {
        self.start(node, Start::Snapshot)
    }

    /// The messages of a subscriber that comes back to the pods of a node after the changes.
    pub(crate) fn resume(&self, node: usize) -> usize {
        self.start(node, Start::Resume(self.listed))
    }

    fn start(&self, node: usize, start: Start) -> usize {
        let selection = self.kind.select("", &format!("spec.nodeName=node-{node}"));
        let waker = StreamWaker::new(&ConnectionWaker::new(), 1);
        let subscription = self.hub.subscribe(selection, Format::default(), start, waker);
        let mut subscription = subscription.unwrap_or_else(|refusal| panic!("{refusal}"));
        let mut messages = 0;
        loop {
            match subscription.take(BATCH_BYTES_MAX) {
                Ok(Some(frames)) => messages += frames.messages(),
                // Without an index it lets other tasks run between slices of the scan.
                Ok(None) if subscription.in_backlog() => {}
                Ok(None) | Err(_) => break,
            }
        }
        messages
    }
}
