//! Decides how an HTTP read is answered whose mode is `Cache`: from the cache, by upstream, or with
//! a refusal.
//!
//! The hazard is a stale or partial answer. The decision depends on many inputs (the demands of the
//! request, the caches and their freshness, whether upstream may answer instead), so it is one pure
//! function, [`route`], over plain data. If it needs a value that takes time (a verdict, the first
//! list of a cache, a freshness proof, a snapshot), it returns that need; [`super::read_loop`]
//! fetches it and asks again. So no rule about caches and their freshness is in two places, and
//! each of them is a row of a table in the tests.
//!
//! Three decisions are made outside, because they concern requests that are no reads, too:
//! - [`super::api`] decides the mode of the resource, and whether upstream might ignore a part of
//!   the request. With that it makes the [`Fallback`] of the read. It answers requests in another
//!   mode, those whose caller the mode denies, and those that [`HttpRead::parse`] refuses.
//! - [`ReadError`] says for each reason why the cache does not answer whether upstream may.
//! - [`Fallback`] makes the refusal from both, or none if upstream answers.
//!
//! The rules are those of the apiserver's own cache: which lists it reads from etcd
//! (`delegator.ShouldDelegateList` of `storage/cacher`), how it waits for a version
//! (`waitUntilFreshAndBlock`), and where a watch starts. Upstream takes the place of etcd.

use kubefan_cache::Refusal;
use kubefan_common::planted::{self, Bug};
use kubefan_fanout::Patience;
use kubefan_model::{Media, ObjectKey, ResourceVersion};

use super::{
    cache_facts::{CacheFacts, FormatFacts, FoundCacheFacts, NotFresh},
    fallback::{Fallback, Refused},
    http_read::HttpRead,
    negotiate,
    options::{Freshness, ListOptions, ReadRequest, WatchOptions, WatchStart},
    pages::{ContinueToken, last_key},
    read_error::ReadError,
    selector_coverage,
    status::Failure,
};
use crate::reader::NotReached;

/// The way in which a request is answered.
#[derive(Debug, Clone, PartialEq)]
pub enum Route {
    /// From the cache.
    Cache,
    /// By upstream.
    Forward,
    /// By kubefan, with a refusal.
    Refuse(Refused),
    /// Not known before this is fetched.
    Needs(Need),
}

/// Something that must be fetched before a read can be answered.
#[derive(Debug, Clone, PartialEq)]
pub enum Need {
    /// The verdict about the caller.
    Verdict,
    /// The admission, which is a place among the reads or the streams. With it,
    /// [`CacheFacts::cached`] is looked up.
    Admission,
    /// The start of the cache in the format with this index. This read does not wait for it, and
    /// later ones find it.
    StartForLater(usize),
    /// The cache in the format with this index.
    Cache {
        /// The index of the format.
        format: usize,
        /// Whether to wait for the first list.
        waits_for_sync: bool,
    },
    /// Whether a list is large.
    Size,
    /// A proof that the cache is not older than the request.
    Proof(Proof),
    /// The cache at this version, or a later one.
    Version(ResourceVersion, Patience),
    /// The snapshot to answer from.
    Snapshot,
    /// The snapshot of the first page of a list, to continue after this key.
    Page {
        /// The version in the continue token.
        version: i64,
        /// The last key of the page before.
        last: ObjectKey,
    },
    /// The subscription of a watch. It has needs of its own, such as a backfill.
    Subscription,
}

/// The proof of freshness that a read needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// The patience of the read.
    pub patience: Patience,
    /// Whether upstream may list the metadata of the selected objects as the proof.
    pub lists: bool,
}

/// The reason why a read is not answered from the cache yet.
enum Unanswered {
    Needs(Need),
    Failed(ReadError),
}

impl From<Need> for Unanswered {
    fn from(need: Need) -> Self {
        Self::Needs(need)
    }
}

impl From<ReadError> for Unanswered {
    fn from(error: ReadError) -> Self {
        Self::Failed(error)
    }
}

impl From<Refusal> for Unanswered {
    fn from(refusal: Refusal) -> Self {
        ReadError::from(refusal).into()
    }
}

/// Decides how a read is answered.
pub fn route(read: &HttpRead<'_>, facts: &CacheFacts<'_>) -> Route {
    match check_answerable(read, facts) {
        Ok(()) => Route::Cache,
        Err(Unanswered::Needs(need)) => Route::Needs(need),
        Err(Unanswered::Failed(error)) => facts.fallback.refusal(error).map_or(Route::Forward, Route::Refuse),
    }
}

/// Checks that the cache can answer a read.
fn check_answerable(read: &HttpRead<'_>, facts: &CacheFacts<'_>) -> Result<(), Unanswered> {
    let has_upstream = facts.fallback.is_upstream();
    let check_coverage = || selector_coverage::check(facts.narrowed_by, read.path, &read.spec);
    // If upstream answers a read in any case, kubefan does not review its caller.
    if has_upstream {
        check_coverage()?;
        // Upstream finds one object sooner than a freshness proof could arrive.
        if read.request == ReadRequest::Get(Freshness::Consistent) {
            return Err(ReadError::Upstream(Failure::unavailable("it must come from upstream".to_owned())).into());
        }
    }
    if let Some(problem) = &read.problem {
        return Err(problem.clone().into());
    }
    facts.verdict.as_ref().ok_or(Need::Verdict)?.clone().map_err(ReadError::from)?;
    // Checked only after the verdict, because the refusal shows whether the resource is cached. A
    // get is not checked: it is answered if the object is in the cache.
    if !has_upstream && !matches!(read.request, ReadRequest::Get(_)) {
        check_coverage()?;
    }
    facts.admission.as_ref().ok_or(Need::Admission)?.clone()?;
    let found = find_cache(read, facts)?;
    match &read.request {
        ReadRequest::Get(freshness) => get(*freshness, read, facts, found),
        ReadRequest::List(options) => list(options, read, facts, found),
        ReadRequest::Watch(options) => watch(options, facts, found),
    }
}

/// Returns the cache in the first of the formats. If upstream does not answer, in the first format
/// that can be made here.
fn find_cache<'a>(read: &HttpRead<'_>, facts: &'a CacheFacts<'_>) -> Result<&'a FoundCacheFacts, Unanswered> {
    let mut reported = None;
    for format in 0..read.formats.len() {
        match find_cache_in(format, read, facts) {
            Err(Unanswered::Failed(ReadError::Upstream(failure))) if !facts.fallback.is_upstream() => {
                reported = Some(more_helpful(reported, failure));
            }
            other => return other,
        }
    }
    Err(ReadError::Upstream(reported.unwrap_or_else(negotiate::not_acceptable)).into())
}

/// Returns the cache in one format.
fn find_cache_in<'a>(
    format: usize,
    read: &HttpRead<'_>,
    facts: &'a CacheFacts<'_>,
) -> Result<&'a FoundCacheFacts, Unanswered> {
    let has_upstream = facts.fallback.is_upstream();
    let resource = &read.path.resource;
    let not_served = |message| Err(ReadError::Upstream(Failure::not_served(message)).into());
    let Some(media) = read.formats[format].as_ref().map(|format| format.media()) else {
        return Err(ReadError::Upstream(negotiate::not_acceptable()).into());
    };
    let waits_for_sync = waits_for_sync(&read.request);
    let FormatFacts { is_started, cache } = &facts.formats[format];
    let Some(cache) = cache else {
        let is_cached = |media| facts.cached.contains(&media);
        // Upstream answers a single list or get sooner than a cache starts.
        if has_upstream && !may_start_cache(read) && !is_cached(Media::Json) && !is_cached(media) {
            return not_served(format!("{resource} is not cached"));
        }
        // A get or a consistent list does not wait while the cache in this encoding starts. A later
        // read finds the cache.
        if has_upstream && !waits_for_sync && media != Media::Json && !is_cached(media) {
            if !is_started {
                return Err(Need::StartForLater(format).into());
            }
            return not_served(format!("{resource} is not cached as {}", media.as_str()));
        }
        return Err(Need::Cache { format, waits_for_sync }.into());
    };
    let found = match cache {
        Ok(found) => found,
        Err(refusal) => {
            // Without room for JSON no other encoding finds room, and a retry may. Protobuf has a
            // limit of its own, so without room for it the next format is tried.
            let is_full = !has_upstream && media == Media::Json && matches!(refusal, Refusal::NoRoom(_));
            let is_unsynced = waits_for_sync && matches!(refusal, Refusal::NotSynced { .. });
            if is_full || is_unsynced {
                return Err(ReadError::ByCache(Failure::from(refusal)).into());
            }
            return Err(refusal.clone().into());
        }
    };
    // Clients that reconnect to a replica as soon as it starts must not all turn to upstream. They
    // get a 429 if the first list takes too long, as from an apiserver that has restarted.
    match found.refusal.as_ref().filter(|_| waits_for_sync) {
        Some(refusal @ (Refusal::NotSynced { .. } | Refusal::Failing { .. })) => {
            return Err(ReadError::ByCache(Failure::from(refusal)).into());
        }
        Some(refusal) => return Err(refusal.clone().into()),
        None => {}
    }
    // An object of a namespaced resource has no such path.
    if found.namespaced && read.path.namespace.is_empty() && !read.path.name.is_empty() {
        return not_served("the resource is namespaced".to_owned());
    }
    Ok(found)
}

/// Whether a read waits for the first list: it accepts any state, or its client would only retry.
fn waits_for_sync(request: &ReadRequest) -> bool {
    match request {
        ReadRequest::Get(_) => false,
        ReadRequest::List(options) => options.freshness != Freshness::Consistent,
        ReadRequest::Watch(_) => true,
    }
}

/// Whether a read may start the first cache of a resource although upstream could answer it: a
/// watch, which will continue to use the cache, and the list that informers send before their
/// watch. If the resource is cached as JSON, any read may start the cache of its encoding.
fn may_start_cache(read: &HttpRead<'_>) -> bool {
    match &read.request {
        ReadRequest::Get(_) => false,
        ReadRequest::List(_) => read.may_begin_informer(),
        ReadRequest::Watch(_) => true,
    }
}

/// Whether [`route`] needs to know which encodings are cached. It does for each read that upstream
/// could answer, except for one that may start its cache and waits for it.
pub fn depends_on_cached(read: &HttpRead<'_>, fallback: Fallback) -> bool {
    fallback.is_upstream() && !(may_start_cache(read) && waits_for_sync(&read.request))
}

fn get(
    freshness: Freshness,
    read: &HttpRead<'_>,
    facts: &CacheFacts<'_>,
    found: &FoundCacheFacts,
) -> Result<(), Unanswered> {
    let proof = Proof { patience: facts.fallback.patience(), lists: true };
    let answered = check_freshness(freshness, facts, found, || Ok(proof)).and_then(|()| {
        let snapshot = facts.snapshot.as_ref().ok_or(Need::Snapshot)?.clone()?;
        if !snapshot.has_object {
            let missing = selector_coverage::object_not_found(facts.narrowed_by, &found.gvr, read.path);
            return Err(ReadError::ByCache(missing).into());
        }
        Ok(())
    });
    match answered {
        // A failure in an encoding that kubefan cannot make, such as YAML.
        Err(Unanswered::Failed(ReadError::ByCache(failure)))
            if facts.fallback.is_upstream() && !read.encodes_failures =>
        {
            Err(ReadError::Upstream(failure).into())
        }
        other => other,
    }
}

fn list(
    options: &ListOptions,
    read: &HttpRead<'_>,
    facts: &CacheFacts<'_>,
    found: &FoundCacheFacts,
) -> Result<(), Unanswered> {
    let expired = || ReadError::Upstream(Failure::list_expired());
    let snapshot = if options.continues.is_empty() {
        check_freshness(options.freshness, facts, found, || proof_of_list(options, read, facts, found))?;
        facts.snapshot.as_ref().ok_or(Need::Snapshot)?
    } else if let Some(snapshot) = &facts.snapshot {
        snapshot
    } else {
        let invalid = || Failure::bad_request("invalid continue token: continue key is not valid".to_owned());
        let token = ContinueToken::decode(&options.continues).ok_or_else(|| ReadError::Upstream(invalid()))?;
        let last = last_key(&token, &read.path.namespace, found.namespaced).ok_or_else(expired)?;
        return Err(Need::Page { version: token.rv, last }.into());
    };
    let version = snapshot.clone()?.version.ok_or_else(expired)?;
    match options.freshness {
        Freshness::Exact(exact) if !exact.is_at(version) && !planted::is(Bug::ExactIsNewest) => Err(expired().into()),
        _ => Ok(()),
    }
}

/// Returns the proof that a consistent list waits for. If none comes in time, the list goes to the
/// apiserver: after 40 ms for a small list, which costs the apiserver little, and after a second or
/// two for a large one.
fn proof_of_list(
    options: &ListOptions,
    read: &HttpRead<'_>,
    facts: &CacheFacts<'_>,
    found: &FoundCacheFacts,
) -> Result<Proof, Need> {
    let patience = if found.objects.is_none() {
        Patience::AtOnce
    } else if !facts.fallback.is_upstream() {
        facts.fallback.patience()
    } else if facts.is_large.ok_or(Need::Size)? {
        Patience::Bookmark
    } else {
        Patience::AtOnce
    };
    let is_whole = read.spec.is_empty() && read.path.namespace.is_empty();
    let lists = match options.limit {
        // Upstream lists a few objects about as soon as their metadata, so a small list of some
        // objects is proved without.
        None => is_whole || patience > Patience::AtOnce,
        // The state must be proved as a whole, because later pages are served from it.
        Some(limit) => is_whole && limit >= found.objects.unwrap_or_default(),
    };
    Ok(Proof { patience, lists })
}

fn watch(options: &WatchOptions, facts: &CacheFacts<'_>, found: &FoundCacheFacts) -> Result<(), Unanswered> {
    let proof = |lists| Proof { patience: facts.fallback.patience(), lists };
    match options.start {
        WatchStart::State(freshness) => match check_freshness(freshness, facts, found, || Ok(proof(true))) {
            // The apiserver notices this only after it has sent the headers of the watch. So the
            // failure is an event.
            Err(Unanswered::Failed(ReadError::ByCache(failure))) if matches!(freshness, Freshness::NotOlderThan(_)) => {
                return Err(ReadError::Event(failure, found.media).into());
            }
            other => other?,
        },
        // Upstream would read no object for such a watch, so it lists no metadata either.
        WatchStart::Now(freshness) => check_freshness(freshness, facts, found, || Ok(proof(false)))?,
        WatchStart::After(_) => {}
    }
    match facts.subscription.as_ref().ok_or(Need::Subscription)? {
        Ok(()) => Ok(()),
        Err(Refusal::Expired(expired)) => Err(ReadError::Event(Failure::watch_expired(expired), found.media).into()),
        Err(refusal) => Err(refusal.clone().into()),
    }
}

/// Checks that the cache is as fresh as a read demands. A consistent one needs `proof`.
fn check_freshness(
    freshness: Freshness,
    facts: &CacheFacts<'_>,
    found: &FoundCacheFacts,
    proof: impl FnOnce() -> Result<Proof, Need>,
) -> Result<(), Unanswered> {
    match freshness {
        // The request has started this cache, or has waited for its list.
        Freshness::Consistent if found.is_listed_since || planted::is(Bug::ConsistentIsCached) => Ok(()),
        Freshness::Consistent => match &facts.freshness {
            None => Err(Need::Proof(proof()?).into()),
            Some(Ok(())) => Ok(()),
            Some(Err(not_fresh)) => Err(not_fresh.refusal().clone().into()),
        },
        Freshness::NotOlderThan(_) if planted::is(Bug::NotOlderThanIsAny) => Ok(()),
        Freshness::NotOlderThan(version) => match &facts.freshness {
            None => Err(Need::Version(version, facts.fallback.patience()).into()),
            Some(Ok(())) => Ok(()),
            // The cluster itself has not reached the version, so upstream would time out as well.
            Some(Err(NotFresh::NotReached(NotReached {
                refusal: refusal @ Refusal::Future { .. },
                is_proved: true,
            }))) => Err(ReadError::ByCache(Failure::from(refusal)).into()),
            Some(Err(not_fresh)) => Err(ReadError::Upstream(Failure::from(not_fresh.refusal())).into()),
        },
        // The version of the snapshot is compared.
        Freshness::Any | Freshness::Exact(_) => Ok(()),
    }
}

/// Returns the failure to report if neither of two formats can be made: the first, unless only the
/// other one says that a retry may help. A resource that is still syncing as JSON must not look as
/// if it did not exist, only because it is never cached as protobuf.
fn more_helpful(known: Option<Failure>, other: Failure) -> Failure {
    let is_temporary = |failure: &Failure| matches!(failure.code(), 429 | 503 | 504);
    match known {
        Some(known) if is_temporary(&known) || !is_temporary(&other) => known,
        _ => other,
    }
}

#[cfg(test)]
mod tests;
