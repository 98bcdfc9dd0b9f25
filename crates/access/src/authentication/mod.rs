//! From what a request presents to the caller behind it.

pub mod authenticator;
pub mod bearer_token;
pub mod caller;
pub mod certificate;
pub mod presented;
pub mod service_account;
mod token_review;

pub use authenticator::{AuthenticationOptions, Authenticator};
