//! The list of the watches, for operators.

use std::{cmp::Reverse, fmt, sync::Arc};

use kubefan_fanout::{Behind, Observed};
use kubefan_model::{
    GroupVersionResource,
    format::{Format, Wire},
};
use serde::Serialize;
use tokio::{task::yield_now, time::Instant};

use super::open_watches::{Subscriber, Subscribers, text_of};

/// Watches that are examined before other tasks run.
const SLICE: usize = 512;

/// Watches in a list, unless a request has another limit.
const LIMIT: usize = 100;
const LIMIT_MAX: usize = 10_000;

/// The longest selector that is shown, in bytes. It may have thousands of values.
const SELECTOR_BYTES_MAX: usize = 1 << 10;

/// Options of a list of subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListOptions {
    /// The order.
    pub sort: SortBy,
    /// Maximum number of subscribers.
    pub limit: usize,
}

/// The order of a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortBy {
    /// The furthest behind first: without retained events before all others, then by the time that
    /// the first event has waited, then by events.
    #[default]
    Lag,
    /// The most bytes sent first.
    Bytes,
    /// The oldest first.
    Age,
    /// By the name of their users.
    Identity,
}

/// Watches, in the order that was asked for.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSubscribers {
    /// Number of all watches, also those that are not listed.
    pub total: usize,
    /// The first of them.
    pub subscribers: Vec<ListedSubscriber>,
}

/// A watch.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSubscriber {
    /// Names it for as long as it lasts.
    pub id: String,
    /// The user; empty if callers are not distinguished.
    pub identity: String,
    /// The client's name for itself.
    pub user_agent: String,
    /// Address of the client, or `unix`. Behind a trusted proxy, the one that the proxy names.
    pub address: String,
    /// The resource, like `deployments.apps`.
    pub resource: String,
    /// Version of the resource in the API.
    pub api_version: String,
    /// The namespace; empty for all.
    pub namespace: String,
    /// The namespace of the cache that it reads from; empty for all.
    pub cache_namespace: String,
    /// The label selector; a long one is cut.
    pub label_selector: String,
    /// The field selector, likewise. A name is `metadata.name=NAME`.
    pub field_selector: String,
    /// The shard selector, likewise.
    pub shard_selector: String,
    /// `grpc` or `http`.
    pub protocol: &'static str,
    /// Encoding of objects: json, zstd, zstd-delta, protobuf, table.
    pub encoding: &'static str,
    /// The last version to resume from that was sent; empty before the first.
    pub resource_version: String,
    /// Whether it is still sent its backlog.
    pub in_backlog: bool,
    /// Events that wait to be handed to its connection.
    pub lag_events: usize,
    /// Time that the first of them has waited; `None` if none does.
    pub lag_seconds: Option<f64>,
    /// Whether some of them are no longer retained.
    pub is_expired: bool,
    /// Bytes of messages that were handed to its connection.
    pub bytes_sent: u64,
    /// Start of the watch: `snapshot`, or the way of its resume.
    pub started: &'static str,
    /// Age of the watch.
    pub age_seconds: f64,
}

impl ListOptions {
    /// Parses a query: `sort` (lag, bytes, age or identity) and `limit`.
    ///
    /// # Errors
    /// The mistake in it, worded for the operator.
    pub fn of_query(query: &str) -> Result<Self, String> {
        let mut options = Self { sort: SortBy::default(), limit: LIMIT };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "sort" => {
                    options.sort = match &*value {
                        "lag" => SortBy::Lag,
                        "bytes" => SortBy::Bytes,
                        "age" => SortBy::Age,
                        "identity" => SortBy::Identity,
                        _ => return Err("sort by lag, bytes, age or identity".to_owned()),
                    };
                }
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    options.limit = limit.ok_or(format!("limit is a number from 1 to {LIMIT_MAX}"))?;
                }
                other => return Err(format!("{other:?} is no parameter of this path")),
            }
        }
        Ok(options)
    }
}

impl Subscribers {
    /// Lists watches. Takes the lock of each of their views for a moment, and no lock of a cache.
    pub async fn list(&self, ListOptions { sort, limit }: ListOptions) -> ListedSubscribers {
        let now = Instant::now();
        let all = self.all();
        let total = all.len();
        let mut measured = Vec::with_capacity(total);
        for (at, subscriber) in all.into_iter().enumerate() {
            if at % SLICE == SLICE - 1 {
                yield_now().await;
            }
            let behind = subscriber.observer.behind(now);
            measured.push((subscriber, behind));
        }
        sort.first(&mut measured, limit);
        let mut subscribers = Vec::with_capacity(measured.len());
        for (at, (subscriber, behind)) in measured.iter().enumerate() {
            if at % SLICE == SLICE - 1 {
                yield_now().await;
            }
            subscribers.extend(subscriber.observer.observe().map(|observed| subscriber.listed(observed, *behind, now)));
        }
        ListedSubscribers { total, subscribers }
    }
}

impl SortBy {
    /// Keeps the first ones, in order.
    fn first(self, all: &mut Vec<(Arc<Subscriber>, Behind)>, limit: usize) {
        type Of = (Arc<Subscriber>, Behind);
        match self {
            Self::Lag => {
                keep(all, limit, |(one, behind): &Of| {
                    (Reverse((behind.is_expired, behind.time, behind.events)), one.id)
                });
            }
            Self::Bytes => keep(all, limit, |(one, _)| (Reverse(one.observer.bytes()), one.id)),
            Self::Age => keep(all, limit, |(one, _)| (one.opened_at, one.id)),
            Self::Identity => keep(all, limit, |(one, _)| (one.user.clone(), one.id)),
        }
    }
}

/// Keeps the `limit` smallest, in order. Each key is made once, because the values behind it may
/// change.
fn keep<T, K: Ord>(all: &mut Vec<T>, limit: usize, key: impl Fn(&T) -> K) {
    let mut keyed: Vec<(K, T)> = all.drain(..).map(|one| (key(&one), one)).collect();
    if limit < keyed.len() {
        keyed.select_nth_unstable_by(limit, |a, b| a.0.cmp(&b.0));
        keyed.truncate(limit);
    }
    keyed.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    all.extend(keyed.into_iter().map(|(_, one)| one));
}

impl Subscriber {
    fn listed(&self, observed: Observed, behind: Behind, now: Instant) -> ListedSubscriber {
        let Observed { resource, selection, format, version } = observed;
        let gvr = GroupVersionResource::new(resource.group, resource.version, resource.resource);
        let (protocol, encoding) = names(&format);
        ListedSubscriber {
            id: text_of(self.id),
            identity: self.user.to_string(),
            user_agent: self.user_agent.to_string(),
            address: self.address(),
            resource: gvr.to_string(),
            api_version: gvr.version,
            namespace: selection.spec().namespace.clone(),
            cache_namespace: self.cache_namespace.to_string(),
            label_selector: cut(&selection.spec().labels),
            field_selector: cut(&selection.field_selector(&self.fields)),
            shard_selector: selection.spec().shards().map(cut).unwrap_or_default(),
            protocol,
            encoding,
            resource_version: version.map(|version| version.least_reached().to_string()).unwrap_or_default(),
            in_backlog: self.observer.in_backlog(),
            lag_events: behind.events,
            lag_seconds: behind.time.map(|time| time.as_secs_f64()),
            is_expired: behind.is_expired,
            bytes_sent: self.observer.bytes(),
            started: self.observer.way(),
            age_seconds: now.saturating_duration_since(self.opened_at).as_secs_f64(),
        }
    }

    fn address(&self) -> String {
        match (self.forwarded_for, self.address) {
            (Some(client), _) => client.to_string(),
            (None, Some(address)) => address.to_string(),
            (None, None) => "unix".to_owned(),
        }
    }
}

/// The protocol and the encoding of a format.
fn names(format: &Format) -> (&'static str, &'static str) {
    match format.wire() {
        Wire::Grpc => ("grpc", format.encoding().as_str()),
        Wire::Http(media) => ("http", media.as_str()),
    }
}

/// The start of a text. The rest of it is not even made.
fn cut(text: &impl fmt::Display) -> String {
    struct Start(String);

    impl fmt::Write for Start {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let room = SELECTOR_BYTES_MAX - self.0.len();
            if text.len() <= room {
                self.0.push_str(text);
                return Ok(());
            }
            let end = (0..=room).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
            self.0.push_str(&text[..end]);
            self.0.push('…');
            Err(fmt::Error)
        }
    }

    let mut start = Start(String::new());
    // Fails where it is cut.
    let _ = fmt::Write::write_fmt(&mut start, format_args!("{text}"));
    start.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_selector_is_cut_between_characters() {
        assert_eq!(cut(&"app=web"), "app=web");
        let long = "ä".repeat(SELECTOR_BYTES_MAX);
        let shown = cut(&format!("x{long}"));
        assert!(shown.starts_with("xä") && shown.ends_with("ä…") && shown.len() < SELECTOR_BYTES_MAX + 4, "{shown}");
    }

    #[test]
    fn a_query_has_an_order_and_a_limit() {
        assert_eq!(ListOptions::of_query(""), Ok(ListOptions { sort: SortBy::Lag, limit: LIMIT }));
        let of = |query| ListOptions::of_query(query).map(|options| (options.sort, options.limit));
        assert_eq!(of("sort=bytes&limit=7"), Ok((SortBy::Bytes, 7)));
        for (query, problem) in [
            ("sort=size", "sort by"),
            ("limit=0", "1 to"),
            ("limit=x", "1 to"),
            ("limit=99999", "1 to"),
            ("a=b", "\"a\""),
        ] {
            assert!(of(query).is_err_and(|error| error.contains(problem)), "{query}");
        }
    }

    #[test]
    fn only_the_first_are_kept_and_in_order() {
        let mut all: Vec<u32> = (0..1000).map(|number| number * 7919 % 1000).collect();
        keep(&mut all, 3, |number| Reverse(*number));
        assert_eq!(all, [999, 998, 997]);
        keep(&mut all, 9, |number| *number);
        assert_eq!(all, [997, 998, 999]);
    }
}
