//! What servers see of everything above them: one small trait, so that they are tested without an upstream.

use std::{future::Future, sync::Arc};

use tokio::time::Instant;

use crate::{
    cache::{Backfill, Refusal},
    fanout::hub::Hub,
};
use kubefan_common::proto::v1alpha1::ResourceStatus;
use kubefan_common::sync::watch;
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, Scope, fields::FieldTable, object::ObjectParser};

/// A resource that is served, in one scope.
#[derive(Clone)]
pub struct Served {
    /// Its full name.
    pub gvr: GroupVersionResource,
    /// Whether its objects have a namespace.
    pub namespaced: bool,
    /// What it is cached for.
    pub scope: Scope,
    /// The fields that selectors may name.
    pub fields: Arc<FieldTable>,
    /// The kind that its lists name, which a CRD may choose.
    pub list_kind: Arc<str>,
    /// How its objects are read, and in which encoding.
    pub parser: Arc<ObjectParser>,
    /// State, history and views.
    pub hub: Arc<Hub>,
}

/// How long a reader waits for the proof that a cache is fresh; the longer, the greater.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Patience {
    /// Only if there is one at once: upstream answers soon.
    #[default]
    AtOnce,
    /// A second or two, for upstream's next bookmark: its own answer would cost it more than a proof, or the reader itself.
    Bookmark,
    /// The same also after a wait that was in vain: nobody else can be asked.
    Insistent,
}

/// The resources that can be asked for.
pub trait Catalog: Send + Sync + 'static {
    /// Finds the cache for a resource in an encoding, by any name that kubectl takes where `group` and `version` are empty; may start it.
    /// `namespace` is the one asked for, empty for all.
    ///
    /// # Errors
    /// Of protobuf, [`Refusal::NotCached`] for whatever reason there is no such cache: the objects can be had upstream, or as JSON.
    fn find(
        &self,
        group: &str,
        version: &str,
        resource: &str,
        namespace: &str,
        media: Media,
    ) -> impl Future<Output = Result<Served, Refusal>> + Send;

    /// Reads again from upstream what came after `version`, for one who comes back from before this cache began; one who selects by
    /// labels or fields `needs_state`. One read serves all who ask at about the same time.
    ///
    /// # Errors
    /// [`Refusal::Expired`] where upstream does not hold it either; [`Refusal::Unavailable`] where it could not be asked.
    fn backfill(
        &self,
        served: &Served,
        version: ResourceVersion,
        needs_state: bool,
    ) -> impl Future<Output = Result<Arc<Backfill>, Refusal>> + Send;

    /// Waits for upstream's word that the state of a cache is not older than this call. One proof serves all who wait.
    ///
    /// # Errors
    /// [`Refusal::Unavailable`] where none came in time: the read is upstream's then.
    fn prove(&self, served: &Served, patience: Patience) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// The version that the cluster has reached by upstream's word, which was asked for after `asked` and cannot be behind. One question
    /// serves all who began to wait before it.
    ///
    /// # Errors
    /// [`Refusal::Unavailable`] where upstream could not be asked, or where another cluster answers.
    fn cluster_version(
        &self,
        served: &Served,
        asked: Instant,
    ) -> impl Future<Output = Result<ResourceVersion, Refusal>> + Send;

    /// Whether there is a cache of a resource, in any scope; starts nothing.
    fn holds(&self, gvr: &GroupVersionResource, media: Media) -> bool;

    /// Changes whenever a cache comes, goes or enters another phase.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Every cache with the encoding that it holds, ordered by name; a resource that is cached in several forms is there with each.
    fn list(&self) -> Vec<(Media, ResourceStatus)>;
}
