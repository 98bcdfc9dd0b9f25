//! Authentication: from the credentials of a request to its caller.

pub mod authenticator;
pub mod bearer_token;
pub mod caller;
pub mod certificate;
pub mod presented;
pub mod service_account;
mod token_review;
pub mod websocket_protocols;

pub use authenticator::{AuthenticationOptions, Authenticator};
