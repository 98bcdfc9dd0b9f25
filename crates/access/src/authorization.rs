//! From a caller and a read to a verdict.

mod access_review;
pub mod attributes;
pub mod authorized;
pub mod authorizer;
pub mod explanation;
pub mod non_resource;
pub mod read;
pub mod target_names;

pub use authorized::Authorized;
pub use authorizer::{AuthorizationOptions, Authorizer};
