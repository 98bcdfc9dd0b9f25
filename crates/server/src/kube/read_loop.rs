//! Answers a read: asks [`route`] for a decision, fetches the need that it returns, and asks again.
//!
//! For a read that came here, [`route`] decides whether the cache, upstream or a refusal answers,
//! and what must be fetched for that. (The mode of the read and its fallback were decided before,
//! in [`super::api`].) This module decides only how a need is fetched. It keeps each fetched value
//! twice: as a fact for the decision, and as the value itself for the answer.

use std::sync::Arc;

use axum::body::Body;
use http::{Response, request::Parts};
use kubefan_access::{Authorized, Read};
use kubefan_admission::{FairPermit, Holder};
use kubefan_cache::Refusal;
use kubefan_common::when_planted;
use kubefan_fanout::{Hub, Patience, ReadSource, SavedAge, StreamWaker, SubscribeOptions, Subscription};
use kubefan_model::{ObjectKey, ResourceVersion, format::Format};
use tokio::time::Instant;

use super::{
    answer::{Answer, refusal},
    cache_facts::{CacheFacts, FoundCacheFacts, NotAllowed, NotFresh, SnapshotFacts},
    cache_reads::CacheReads,
    fallback::{Fallback, Refused},
    found_cache::{FoundCache, Snapshot},
    get, hop_by_hop,
    http_read::HttpRead,
    kube_upstream::KubeUpstream,
    list::{self, ListParts},
    options::{ListOptions, ReadRequest, WatchOptions},
    pages::PageSnapshots,
    request_info::{client_of, notes_of},
    route::{Need, Proof, Route, depends_on_cached, route},
    status::Failure,
    watch::{self, DefaultTimeouts, WatchHandles, WatchParts},
};
use crate::{request_caller::RequestCaller, staleness::Staleness, target_lookup::Selected};

/// The parts of the Kubernetes API that reads share.
pub struct ReadContext<'a> {
    /// The caches.
    pub reads: &'a CacheReads,
    /// The snapshots of paged lists.
    pub pages: &'a Arc<PageSnapshots>,
    /// The timeouts of watches that name none.
    pub timeouts: &'a DefaultTimeouts,
    /// Requests to upstream, about the origins whose pages may open a websocket.
    pub upstream: &'a KubeUpstream,
}

/// Values that were fetched for a read.
#[derive(Default)]
struct Fetched {
    read: Option<Authorized<Read>>,
    place: Option<FairPermit>,
    /// The cache in the last format that had one. [`route`] asks for the next format only after it
    /// has rejected all before it, so no answer needs an earlier one.
    found: Option<FoundCache>,
    source: ReadSource,
    /// Age of the state before it was taken: it may be confirmed or dropped since.
    unconfirmed: Option<SavedAge>,
    snapshot: Option<Snapshot>,
    subscribed: Option<(Subscription, WatchHandles)>,
}

/// A step's input was not fetched: a bug in the rules of [`route`].
#[derive(Debug)]
struct NotFetched;

impl From<NotFetched> for Failure {
    fn from(NotFetched: NotFetched) -> Self {
        Self::internal("kubefan cannot answer this read, because of a bug in kubefan".to_owned())
    }
}

impl Fetched {
    fn read(&self) -> Result<&Authorized<Read>, NotFetched> {
        self.read.as_ref().ok_or(NotFetched)
    }

    fn place(&self) -> Result<&FairPermit, NotFetched> {
        self.place.as_ref().ok_or(NotFetched)
    }

    fn found(&self) -> Result<&FoundCache, NotFetched> {
        self.found.as_ref().ok_or(NotFetched)
    }

    fn hub(&self) -> Result<&Arc<Hub>, NotFetched> {
        self.found().map(|found| &found.selected.served.hub)
    }
}

/// A read that is being answered.
pub struct ReadLoop<'a> {
    context: ReadContext<'a>,
    request: &'a Parts,
    caller: &'a RequestCaller,
    read: HttpRead<'a>,
    arrived_at: Instant,
    facts: CacheFacts<'a>,
    fetched: Fetched,
    stream_waker: Option<StreamWaker>,
}

impl<'a> ReadLoop<'a> {
    /// Creates a read that has just arrived. A watch wakes `stream_waker` when it has something to
    /// send.
    pub fn new(
        context: ReadContext<'a>,
        request: &'a Parts,
        caller: &'a RequestCaller,
        read: HttpRead<'a>,
        fallback: Fallback,
        stream_waker: StreamWaker,
    ) -> Self {
        let facts = CacheFacts::new(fallback, &context.reads.narrowed_by, &read);
        let arrived_at = Instant::now();
        let fetched = Fetched::default();
        Self { context, request, caller, read, arrived_at, facts, fetched, stream_waker: Some(stream_waker) }
    }

    /// Answers the read. `None` if upstream has to.
    pub async fn run(mut self) -> Option<Answer> {
        loop {
            let fetched = match route(&self.read, &self.facts) {
                Route::Needs(need) => self.fetch(need).await,
                Route::Cache => match self.answer().await {
                    Ok(answer) => return Some(answer),
                    Err(error) => Err(error),
                },
                Route::Forward => return None,
                Route::Refuse(refused) => return Some(self.refuse(&refused)),
            };
            if let Err(error) = fetched {
                return Some(self.refuse(&Refused::Plain(error.into())));
            }
        }
    }

    /// Fetches a need, and completes the facts with it.
    async fn fetch(&mut self, need: Need) -> Result<(), NotFetched> {
        match need {
            Need::Verdict => self.authorize().await,
            Need::Admission => self.admit()?,
            Need::StartForLater(format) => self.start_for_later(format)?,
            Need::Cache { format, waits_for_sync } => self.find(format, waits_for_sync).await?,
            Need::Size => self.measure().await?,
            Need::Proof(proof) => self.prove(proof).await?,
            Need::Version(version, patience) => self.reach(version, patience).await?,
            Need::Snapshot => self.take_snapshot().await?,
            Need::Page { version, last } => self.find_page(version, last).await?,
            Need::Subscription => self.subscribe().await?,
        }
        Ok(())
    }

    async fn authorize(&mut self) {
        let reader = &self.context.reads.reader;
        let read = reader.authorize_named(self.caller, self.read.to_authorize()).await;
        let verdict = match read {
            Ok(_) if hop_by_hop::is_websocket(&self.request.headers) => {
                let checked = self.context.upstream.check_websocket_origin(self.request).await;
                checked.map_err(NotAllowed::ForeignOrigin)
            }
            Ok(_) => Ok(()),
            Err(ref denial) if self.caller.presented.is_by_certificate() => {
                Err(NotAllowed::DeniedByCertificate(denial.clone()))
            }
            Err(ref denial) => Err(NotAllowed::Denied(denial.clone())),
        };
        self.fetched.read = read.ok();
        self.facts.verdict = Some(verdict);
    }

    /// Takes a place, before the read waits for its cache. The existing caches are looked up only
    /// now: others may have started them meanwhile.
    fn admit(&mut self) -> Result<(), NotFetched> {
        let reads = self.context.reads;
        let holder = self.holder()?;
        let place = match self.read.request {
            ReadRequest::Watch(_) => reads.reader.admit_stream(holder),
            ReadRequest::Get(_) | ReadRequest::List(_) => reads.reader.admit_read(holder),
        };
        self.facts.admission = Some(place.map(|place| self.fetched.place = Some(place)));
        if depends_on_cached(&self.read, self.facts.fallback) {
            self.facts.cached = reads.cached(self.read.path);
        }
        Ok(())
    }

    /// Starts a cache for later reads.
    fn start_for_later(&mut self, format: usize) -> Result<(), NotFetched> {
        let media = self.format(format)?.media();
        self.context.reads.reader.start_cache(self.fetched.read()?.clone(), media);
        self.facts.formats[format].is_started = true;
        Ok(())
    }

    /// Finds the cache in a format.
    async fn find(&mut self, index: usize, waits_for_sync: bool) -> Result<(), NotFetched> {
        let reader = &self.context.reads.reader;
        let format = self.format(index)?.clone();
        let read = self.fetched.read()?;
        let place = self.fetched.place()?;
        let holder = self.holder()?;
        let selected = if waits_for_sync {
            reader.select_synced(read, holder, format.media()).await
        } else {
            reader.select(read, holder, format.media()).await
        };
        let selected = match selected {
            Ok(selected) => selected,
            Err(refusal) => {
                self.facts.formats[index].cache = Some(Err(refusal));
                return Ok(());
            }
        };
        let hub = selected.served.hub.clone();
        let refusal = hub.refusal();
        let is_list = matches!(self.read.request, ReadRequest::List(_));
        // While the read waits for the first list there is nothing to index.
        if is_list && (refusal.is_none() || !waits_for_sync) {
            hub.index_for(&selected.selection, place.holder()).await;
        }
        let found = FoundCacheFacts {
            gvr: selected.served.gvr.clone(),
            media: selected.served.parser.media(),
            namespaced: selected.served.namespaced,
            is_listed_since: hub.is_listed_after(self.arrived_at),
            objects: if is_list { hub.state().map(|(store, _)| store.len()) } else { None },
            refusal,
        };
        // If the cache still refuses after the wait, the refusal is sent without its warnings.
        if !waits_for_sync || found.refusal.is_none() {
            self.fetched.found = Some(FoundCache { selected, format });
        }
        self.facts.formats[index].cache = Some(Ok(found));
        Ok(())
    }

    /// Finds out whether a list is large.
    async fn measure(&mut self) -> Result<(), NotFetched> {
        let Selected { served, selection } = &self.fetched.found()?.selected;
        let limit = self.list_options()?.limit;
        let bytes_min = self.context.reads.consistent_list_bytes_min;
        let is_large = match served.hub.state() {
            Some((store, _)) => list::is_large(&store, selection, limit, bytes_min).await,
            None => false,
        };
        self.facts.is_large = Some(is_large);
        Ok(())
    }

    /// Waits for upstream's proof that the cache is not older than now.
    async fn prove(&mut self, Proof { patience, lists }: Proof) -> Result<(), NotFetched> {
        let Selected { served, selection } = &self.fetched.found()?.selected;
        let proved = self.context.reads.reader.prove(served, lists.then_some(selection), patience).await;
        let proved = proved.map(|source| self.fetched.source = source);
        self.facts.freshness = Some(proved.map_err(NotFresh::NotProved));
        Ok(())
    }

    /// Waits until the cache has reached a version.
    async fn reach(&mut self, version: ResourceVersion, patience: Patience) -> Result<(), NotFetched> {
        let served = &self.fetched.found()?.selected.served;
        let reached = self.context.reads.reader.reach(served, version, patience).await;
        let reached = reached.map(|source| self.fetched.source = source);
        self.facts.freshness = Some(reached.map_err(NotFresh::NotReached));
        Ok(())
    }

    /// Takes the snapshot that a get or the first page of a list is answered from.
    async fn take_snapshot(&mut self) -> Result<(), NotFetched> {
        self.fetched.unconfirmed = self.fetched.hub()?.unconfirmed_age();
        let hub = self.fetched.hub()?;
        let place = self.fetched.place()?;
        let source = &self.fetched.source;
        let snapshot = match self.read.request {
            ReadRequest::List(_) => snapshot_of_list(hub, source, place).await,
            ReadRequest::Get(_) | ReadRequest::Watch(_) => {
                hub.snapshot_of(source).map(|(store, version)| Snapshot::new(store, version))
            }
        };
        let key = self.key();
        self.facts.snapshot = Some(snapshot.map(|snapshot| {
            let has_object = snapshot.store.get(key.as_str()).is_some();
            let facts = SnapshotFacts { version: Some(snapshot.version), has_object };
            self.fetched.snapshot = Some(snapshot);
            facts
        }));
        Ok(())
    }

    /// Finds the snapshot that the first page of a list was answered from.
    async fn find_page(&mut self, version: i64, last: ObjectKey) -> Result<(), NotFetched> {
        self.fetched.unconfirmed = self.fetched.hub()?.unconfirmed_age();
        let hub = self.fetched.hub()?;
        let place = self.fetched.place()?;
        let pages = self.context.pages;
        let permit = hub.gate().acquire(place.holder()).await;
        let snapshot = permit.map(|permit| {
            let (mut store, version) = pages.find(hub, version)?;
            when_planted!(PagesOfTheNewestState => store = hub.snapshot().ok()?.0);
            Some(Snapshot { store, version, permit: Some(permit), last: Some(last) })
        });
        self.facts.snapshot = Some(snapshot.map(|snapshot| {
            let version = snapshot.as_ref().map(|snapshot| snapshot.version);
            self.fetched.snapshot = snapshot;
            SnapshotFacts { version, has_object: false }
        }));
        Ok(())
    }

    /// Subscribes a watch.
    async fn subscribe(&mut self) -> Result<(), NotFetched> {
        self.fetched.unconfirmed = self.fetched.hub()?.unconfirmed_age();
        let stream_waker = self.stream_waker.take().ok_or(NotFetched)?;
        let handles = WatchHandles { for_lease: stream_waker.of_stream(), for_operator: stream_waker.of_stream() };
        let FoundCache { selected: Selected { served, selection }, format } = self.fetched.found()?;
        let WatchOptions { start, marks_end, .. } = self.watch_options()?;
        let holder = self.fetched.place()?.holder();
        let source = self.fetched.source.clone();
        let subscribed = match watch::start(*start, &served.hub, &source) {
            Ok(start) => {
                let terms = SubscribeOptions { marks_end: *marks_end, source, holder, ..start.into() };
                let reader = &self.context.reads.reader;
                reader.subscribe(served, selection.clone(), format.clone(), terms, stream_waker).await
            }
            Err(refusal) => Err(refusal),
        };
        let subscribed = subscribed.map(|subscription| self.fetched.subscribed = Some((subscription, handles)));
        self.facts.subscription = Some(subscribed);
        Ok(())
    }

    /// Returns the answer from the cache, with the warnings of upstream.
    async fn answer(&mut self) -> Result<Answer, NotFetched> {
        let notes = notes_of(self.request);
        let Fetched { read, place, found, unconfirmed, snapshot, subscribed, .. } = std::mem::take(&mut self.fetched);
        let read = read.ok_or(NotFetched)?;
        let place = place.ok_or(NotFetched)?;
        let found = found.ok_or(NotFetched)?;
        let warnings = found.selected.served.hub.warnings();
        let staleness = self.staleness(unconfirmed);
        let mut response: Response<Body> = match &self.read.request {
            ReadRequest::Get(_) => {
                let snapshot = snapshot.ok_or(NotFetched)?;
                get::get(&found, &snapshot, &self.key(), &notes).ok_or(NotFetched)?
            }
            ReadRequest::List(options) => {
                let snapshot = snapshot.ok_or(NotFetched)?;
                let parts = ListParts { read, found, snapshot, place, notes };
                list::list(self.context.pages, options, parts).await
            }
            // A watch has the warnings in its own headers.
            ReadRequest::Watch(options) => {
                let (subscription, handles) = subscribed.ok_or(NotFetched)?;
                let sender = client_of(self.request).sender(&self.request.headers);
                let served = found.selected.served;
                let parts = WatchParts { read, served, subscription, place, sender, staleness, handles };
                return Ok(watch::open(&self.context.reads.reader, self.context.timeouts, options, parts));
            }
        };
        warnings.put(response.headers_mut());
        staleness.put(response.headers_mut());
        Ok(Answer::Response(response))
    }

    /// Returns a refusal. A refusal that a cache has decided gets the warnings of upstream, too.
    fn refuse(&self, refused: &Refused) -> Answer {
        let mut response = refusal(&self.request.headers, refused);
        if let (Refused::ByCache(_) | Refused::Event(..), Some(found)) = (refused, &self.fetched.found) {
            found.selected.served.hub.warnings().put(response.headers_mut());
            let unconfirmed = self.fetched.unconfirmed.or_else(|| found.selected.served.hub.unconfirmed_age());
            self.staleness(unconfirmed).put(response.headers_mut());
        }
        Answer::Response(response)
    }

    fn staleness(&self, unconfirmed: Option<SavedAge>) -> Staleness {
        Staleness::of(unconfirmed, &client_of(self.request).stale_warning)
    }

    /// Returns the holder of the places that the read takes.
    fn holder(&self) -> Result<Holder, NotFetched> {
        Ok(self.fetched.read()?.holder(self.caller.presented.holder))
    }

    fn key(&self) -> ObjectKey {
        ObjectKey::new(&self.read.path.namespace, &self.read.path.name)
    }

    fn format(&self, index: usize) -> Result<&Format, NotFetched> {
        self.read.formats.get(index).and_then(Option::as_ref).ok_or(NotFetched)
    }

    fn list_options(&self) -> Result<&ListOptions, NotFetched> {
        match &self.read.request {
            ReadRequest::List(options) => Ok(options),
            ReadRequest::Get(_) | ReadRequest::Watch(_) => Err(NotFetched),
        }
    }

    fn watch_options(&self) -> Result<&WatchOptions, NotFetched> {
        match &self.read.request {
            ReadRequest::Watch(options) => Ok(options),
            ReadRequest::Get(_) | ReadRequest::List(_) => Err(NotFetched),
        }
    }
}

async fn snapshot_of_list(hub: &Arc<Hub>, source: &ReadSource, place: &FairPermit) -> Result<Snapshot, Refusal> {
    // Waits for the other events of the version first, because that needs no permit.
    drop(hub.whole_snapshot_of(source).await?);
    // The snapshot is taken again after the gate, so that a list that waits there pins none. Only a
    // proved state is pinned meanwhile, and that is small.
    let permit = Some(hub.gate().acquire(place.holder()).await?);
    let (store, version) = hub.whole_snapshot_of(source).await?;
    Ok(Snapshot { store, version, permit, last: None })
}
