//! The reflector of a cache, over the protocol of its source. The caches do not know the protocol.

use kubefan_cache::{RelistReason, warnings::Warnings};
use kubefan_model::ResourceVersion;

use super::{
    grpc_reflector::GrpcReflector,
    reflector::{NextStep, Reflector, ReflectorError, ReflectorEvent},
};

/// A list and watch of one target. The methods are those of [`Reflector`].
pub enum SourceReflector {
    /// At an apiserver, or at the Kubernetes API of a kubefan.
    Http(Box<Reflector>),
    /// At a kubefan.
    Grpc(Box<GrpcReflector>),
}

macro_rules! each {
    ($self:ident, $reflector:ident => $call:expr) => {
        match $self {
            Self::Http($reflector) => $call,
            Self::Grpc($reflector) => $call,
        }
    };
}

impl SourceReflector {
    /// See [`Reflector::for_backfill`].
    pub fn for_backfill(self, version: ResourceVersion, with_state: bool) -> Self {
        match self {
            Self::Http(reflector) => Self::Http(Box::new(reflector.for_backfill(version, with_state))),
            Self::Grpc(reflector) => Self::Grpc(Box::new(reflector.for_backfill(version, with_state))),
        }
    }

    /// See [`Reflector::step`].
    ///
    /// # Errors
    /// The failure of the request or stream.
    pub async fn step(&mut self) -> Result<ReflectorEvent, ReflectorError> {
        each!(self, reflector => reflector.step().await)
    }

    /// See [`Reflector::relist`].
    pub fn relist(&mut self, reason: RelistReason) {
        each!(self, reflector => reflector.relist(reason));
    }

    /// See [`Reflector::resume_from`].
    pub fn resume_from(&mut self, version: ResourceVersion) {
        each!(self, reflector => reflector.resume_from(version));
    }

    /// See [`Reflector::reread`]. A kubefan sends objects of a new schema by itself, so over gRPC a
    /// snapshot replaces the state.
    pub fn reread(&mut self, reason: RelistReason) {
        match self {
            Self::Http(reflector) => reflector.reread(reason),
            Self::Grpc(reflector) => reflector.relist(reason),
        }
    }

    /// See [`Reflector::advance_to`].
    pub fn advance_to(&mut self, reached: ResourceVersion) {
        each!(self, reflector => reflector.advance_to(reached));
    }

    /// See [`Reflector::next_step`].
    pub fn next_step(&self) -> NextStep {
        each!(self, reflector => reflector.next_step())
    }

    /// See [`Reflector::is_within_list`]. A snapshot has no pages.
    pub fn is_within_list(&self) -> bool {
        matches!(self, Self::Http(reflector) if reflector.is_within_list())
    }

    /// Discards the known state. The next step lists, for `reason`. Over gRPC the state must not be
    /// below `floor`, unless the cluster itself went back. A list over HTTP is a consistent read.
    pub(super) fn relist_above(&mut self, reason: RelistReason, floor: Option<ResourceVersion>) {
        match self {
            Self::Http(reflector) => reflector.relist(reason),
            Self::Grpc(reflector) => reflector.relist_above(reason, floor),
        }
    }

    /// See [`Reflector::reached`].
    pub(super) fn reached(&self) -> Option<ResourceVersion> {
        each!(self, reflector => reflector.reached())
    }

    /// See [`Reflector::relist_reason`].
    pub(super) fn relist_reason(&self) -> RelistReason {
        each!(self, reflector => reflector.relist_reason())
    }

    /// Upstream's warnings for readers of the resource. gRPC has none.
    pub fn warnings(&self) -> Warnings {
        match self {
            Self::Http(reflector) => reflector.warnings().clone(),
            Self::Grpc(_) => Warnings::default(),
        }
    }
}
