//! Finds the cache for a read, and waits until it is as fresh as the request demands.
//!
//! The hazard is a stale or partial answer. A cache that cannot prove its freshness in time does
//! not answer.

use std::sync::Arc;

use kubefan_access::{Authorized, Read};
use kubefan_admission::Holder;
use kubefan_audit::Notes;
use kubefan_cache::Refusal;
use kubefan_common::unless_planted;
use kubefan_fanout::{Catalog, Fresh, Patience, Served};
use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion, format::Format, selection::Selection, selector::FieldSelector,
};
use tokio::time::Instant;

use super::{negotiate, options::Freshness, path::Path, read_error::ReadError, status::Failure};
use crate::{
    reader::{NotReached, Reader},
    target_lookup::Selected,
};

/// Reads from the caches.
pub struct CacheReads<C> {
    /// Admission, and the catalog.
    pub reader: Arc<Reader<C>>,
    /// Whether upstream may answer instead: passthrough is on, and the request is not one that
    /// upstream might misread.
    pub has_upstream: bool,
    /// A consistent list of at least this many bytes of JSON waits a second or two for a freshness
    /// proof.
    pub consistent_list_bytes_min: usize,
    /// The field selector of the caches; objects that it does not select are not cached.
    pub narrowed_by: FieldSelector,
}

/// A read whose cache was found.
pub struct ResolvedRead<'a> {
    /// What the path names.
    pub path: &'a Path,
    /// The cache, and the objects in it.
    pub selected: Selected,
    /// The format of the response.
    pub format: Format,
    /// When the request arrived.
    pub arrived_at: Instant,
    /// What the caller may read.
    pub read: Authorized<Read>,
    /// The notes for its record.
    pub notes: Notes,
}

/// The reader's share, and how a read treats a cache that does not exist or is not synced.
#[derive(Clone, Copy)]
pub struct SelectOptions {
    /// The holder whose share has the memory of the selectors.
    pub holder: Holder,
    /// Whether the read may start the cache although upstream could answer it: a watch, which will
    /// continue to use the cache, and the list that informers send before their watch.
    pub starts_cache: bool,
    /// Whether the read waits for the first list: it accepts any state, or its client would only
    /// retry.
    pub waits_for_sync: bool,
}

impl<C: Catalog> CacheReads<C> {
    /// Whether what a path names is cached in an encoding. Starts nothing.
    pub fn is_cached(&self, path: &Path, media: Media) -> bool {
        self.reader.holds(&GroupVersionResource::new(&path.group, &path.version, &path.resource), media)
    }

    /// Whether every object of the resource that a path names is cached, as JSON or protobuf.
    pub fn holds_all(&self, path: &Path) -> bool {
        let is_cached = self.is_cached(path, Media::Json) || self.is_cached(path, Media::Protobuf);
        is_cached && self.narrowed_by.is_everything()
    }

    /// Whether a limit has refused a cache of the resource that a path names.
    pub fn is_known_uncached(&self, path: &Path) -> bool {
        self.reader.is_known_uncached(&GroupVersionResource::new(&path.group, &path.version, &path.resource))
    }

    /// What may be read at a path, in the first of the formats. If passthrough is off, in the first
    /// format that can be made here.
    pub async fn select(
        &self,
        path: &Path,
        read: &Authorized<Read>,
        formats: impl Iterator<Item = Option<Format>>,
        options: SelectOptions,
    ) -> Result<(Selected, Format), ReadError> {
        let mut reported = None;
        for format in formats {
            let selected = match format {
                Some(format) => {
                    let selected = self.select_in(format.media(), path, read, options).await;
                    selected.map(|selected| (selected, format))
                }
                None => Err(ReadError::Upstream(negotiate::not_acceptable())),
            };
            match selected {
                Err(ReadError::Upstream(failure)) if !self.has_upstream => {
                    reported = Some(more_helpful(reported, failure));
                }
                other => return other,
            }
        }
        Err(ReadError::Upstream(reported.unwrap_or_else(negotiate::not_acceptable)))
    }

    /// What may be read at a path in one encoding, if the cache serves it. With passthrough,
    /// other reads than informers' do not start the cache of a resource: upstream answers a single
    /// list or get sooner.
    async fn select_in(
        &self,
        media: Media,
        path: &Path,
        read: &Authorized<Read>,
        SelectOptions { holder, starts_cache, waits_for_sync }: SelectOptions,
    ) -> Result<Selected, ReadError> {
        let is_cached = |media| self.is_cached(path, media);
        if !starts_cache && self.has_upstream && !is_cached(Media::Json) && !is_cached(media) {
            return Err(ReadError::Upstream(Failure::not_served(format!("{} is not cached", path.resource))));
        }
        // A consistent read does not wait while the cache in this encoding starts; the next one
        // will find it.
        if !waits_for_sync && self.has_upstream && media != Media::Json && !is_cached(media) {
            self.reader.start_cache(read.clone(), media);
            let message = format!("{} is not cached as {}", path.resource, media.as_str());
            return Err(ReadError::Upstream(Failure::not_served(message)));
        }
        // Clients reconnect to a replica as soon as it starts, and must not all turn to upstream:
        // they wait for the first list, and get a 429 if it takes too long, as from an apiserver
        // that has restarted.
        let selected = if waits_for_sync {
            self.reader.select_synced(read, holder, media).await
        } else {
            self.reader.select(read, holder, media).await
        };
        let selected = selected.map_err(|refusal| match refusal {
            Refusal::NotSynced { .. } if waits_for_sync => ReadError::Final(Failure::from(&refusal)),
            // No other encoding would find room, and a retry may. Protobuf has a limit of its own.
            Refusal::NoRoom(_) if !self.has_upstream && media == Media::Json => {
                ReadError::Final(Failure::from(&refusal))
            }
            refusal => refusal.into(),
        })?;
        if waits_for_sync && let Some(refusal) = selected.served.hub.refusal() {
            return Err(match refusal {
                Refusal::NotSynced { .. } | Refusal::Failing { .. } => ReadError::Final(Failure::from(&refusal)),
                refusal => refusal.into(),
            });
        }
        let lacks_namespace = selected.served.namespaced && path.namespace.is_empty() && !path.name.is_empty();
        match lacks_namespace {
            // No object has this path.
            true => Err(ReadError::Upstream(Failure::not_served("the resource is namespaced".to_owned()))),
            false => Ok(selected),
        }
    }

    /// How long a read waits for a freshness proof, unless upstream would answer sooner.
    pub fn patience(&self) -> Patience {
        if self.has_upstream { Patience::Bookmark } else { Patience::NoFallback }
    }

    /// Waits for a state as fresh as demanded by a request that arrived at `arrived_at`. The proof
    /// may list the `listed` objects upstream (see [`Catalog::prove`]).
    pub async fn wait_until_fresh(
        &self,
        served: &Served,
        freshness: Freshness,
        (listed, patience): (Option<&Selection>, Patience),
        arrived_at: Instant,
    ) -> Result<Fresh, ReadError> {
        match freshness {
            // The request has started this cache, or has waited for its list.
            Freshness::Consistent if served.hub.is_listed_after(arrived_at) => {}
            Freshness::Consistent => {
                unless_planted!(ConsistentIsCached => return Ok(self.reader.prove(served, listed, patience).await?))
            }
            Freshness::NotOlderThan(version) => {
                unless_planted!(NotOlderThanIsAny => return self.wait_for_version(served, version).await)
            }
            // The caller compares the version of the snapshot.
            Freshness::Any | Freshness::Exact(_) => {}
        }
        Ok(Fresh::Cache)
    }

    async fn wait_for_version(&self, served: &Served, version: ResourceVersion) -> Result<Fresh, ReadError> {
        let reached = self.reader.reach(served, version, self.patience()).await;
        reached.map_err(|NotReached { refusal, is_proved }| match refusal {
            // The cluster itself has not reached the version, so upstream would time out as well.
            Refusal::Future { .. } if is_proved => ReadError::Final(Failure::from(&refusal)),
            other => ReadError::Upstream(Failure::from(&other)),
        })
    }
}

/// Of the failures of two forms, the one to report if no form can be made: the first, unless only
/// the other one says that a retry may help. A resource that is still syncing as JSON must not look
/// as if it did not exist, only because it is never cached as protobuf.
fn more_helpful(known: Option<Failure>, other: Failure) -> Failure {
    let is_temporary = |failure: &Failure| matches!(failure.code(), 429 | 503 | 504);
    match known {
        Some(known) if is_temporary(&known) || !is_temporary(&other) => known,
        _ => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::tests::OneCache;

    #[tokio::test(start_paused = true)]
    async fn a_list_that_waits_after_it_has_found_its_version_is_not_served_an_older_state() {
        let catalog = OneCache::new();
        let reads = CacheReads {
            reader: catalog.reader(),
            has_upstream: false,
            consistent_list_bytes_min: 0,
            narrowed_by: FieldSelector::default(),
        };
        let (served, hub) = (&catalog.served, &catalog.served.hub);
        let not_older = Freshness::NotOlderThan(ResourceVersion::new(422).unwrap());
        catalog.list(430);
        let fresh = reads.wait_until_fresh(served, not_older, (None, Patience::AtOnce), Instant::now()).await;
        let fresh = fresh.ok().unwrap();
        assert!(hub.snapshot_of(&fresh).is_ok());
        // The list waits for a permit. Meanwhile etcd is restored from a backup.
        catalog.list(136);
        let refused = hub.snapshot_of(&fresh).err();
        assert!(matches!(refused, Some(Refusal::Future { .. })), "{refused:?}");
    }

    #[test]
    fn a_retriable_failure_of_any_form_is_reported_before_a_final_one() {
        let missing = || Failure::not_served("nothing is cached as protobuf".to_owned());
        let syncing = || Failure::unavailable("not synced".to_owned());
        let code = |known: Option<Failure>, other: Failure| more_helpful(known, other).code();
        assert_eq!(code(None, missing()), 404);
        assert_eq!(code(Some(missing()), syncing()), 503);
        assert_eq!(code(Some(syncing()), missing()), 503);
        assert_eq!(code(Some(missing()), negotiate::not_acceptable()), 404, "the first");
    }
}
