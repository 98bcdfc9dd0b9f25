//! Authentication and authorization of callers. The apiserver decides both: by a TokenReview for a
//! token, or by the CAs whose client certificates it accepts, and by a SubjectAccessReview for the
//! read.
//!
//! The hazard: kubefan reads as itself and answers others. So the right to a read is a type.
//! [`Authorized`] can be made by the [`authorization::Authorizer`] alone, and the servers read,
//! start, prove and backfill nothing without one.
//!
//! - [`user`]: callers, as the apiserver names users.
//! - [`bound_object`]: the objects that a service account's token is bound to.
//! - [`authentication`]: from the credentials of a request to a caller.
//! - [`authorization`]: from a caller and a read to a verdict.
//! - [`review`]: the common part of both kinds of reviews: a queue, a cache, one review for all who
//!   ask the same, and the grace in an outage.
//! - [`denial`]: every reason for a refusal.
//! - [`lease`]: the right to a stream, which is reviewed while the stream lasts.
//! - [`modes`]: the reads that an operator has taken out of the caches; [`switches`]: the modes in
//!   force, and the open watches that a change of them ends.
//! - [`access_control`]: both steps behind one type, for the servers.

pub mod access_control;
pub mod authentication;
pub mod authorization;
pub mod bound_object;
pub mod denial;
pub mod lease;
pub mod modes;
pub mod review;
pub mod switches;
pub mod user;

pub use access_control::{AccessControl, AccessOptions, StreamOptions};
pub use authentication::{
    caller::Caller,
    certificate::{ClientCertificate, TrustedCas},
    presented::Presented,
    service_account::{Exists, ServiceAccounts},
};
pub use authorization::{
    Authorized, attributes::ReadVerb, explanation::Explanation, non_resource::NonResource, read::Read,
};
pub use bound_object::BoundObject;
pub use denial::Denial;
pub use lease::Lease;
pub use modes::Mode;
pub use switches::{Answerer, Switches};
pub use user::Identity;
