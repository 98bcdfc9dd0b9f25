//! Who a caller is, and what it may read. The apiserver decides both: by a TokenReview for a token,
//! or by the CAs whose client certificates it accepts, and by a SubjectAccessReview for the read.
//!
//! The hazard: kubefan reads as itself and answers others. So what a caller may read is a type.
//! [`Authorized`] can be made by the [`authorization::Authorizer`] alone, and the servers read,
//! start, prove and backfill nothing without one.
//!
//! - [`user`]: who a caller is, as the apiserver names users.
//! - [`bound_object`]: what a token of a service account is bound to.
//! - [`authentication`]: from what a request presents to a caller.
//! - [`authorization`]: from a caller and a read to a verdict.
//! - [`review`]: what both kinds of reviews share: a queue, a cache, one review for all who ask the
//!   same, and the grace in an outage.
//! - [`denial`]: every reason for a refusal.
//! - [`lease`]: the right to a stream, which is reviewed while the stream lasts.
//! - [`modes`]: which reads an operator has taken out of the caches; [`switches`]: the modes in
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
