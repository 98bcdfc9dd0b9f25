//! Names of resources in `modes` that match nothing. Such a rule changes nothing, and its author
//! must not find that out in an emergency: the name is a short name such as `po`, or a typing
//! error.

use std::fmt;

use kubefan_upstream::discovery::{Discovery, DiscoveryError};
use tracing::warn;

use kubefan_access::modes::Modes;

/// A name that no resource of the apiserver has.
#[derive(Debug, PartialEq, Eq)]
pub struct Unmatched {
    /// The name in the rule.
    pub name: String,
    /// A resource that the author may have meant.
    pub instead: Option<String>,
}

impl fmt::Display for Unmatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no resource is called {:?}, so its rule matches nothing", self.name)?;
        self.instead.as_ref().map_or(Ok(()), |instead| write!(f, "; did you mean {instead:?}?"))
    }
}

/// Returns the names of resources in the rules that match nothing. A name in a group that is not
/// available now, or that cannot be looked up, may match later.
pub async fn unmatched(modes: &Modes, discovery: &Discovery) -> Vec<Unmatched> {
    let mut found = Vec::new();
    for pattern in modes.rules().iter().flat_map(|rule| &rule.resources) {
        if !pattern.names_resource() {
            continue;
        }
        let name = pattern.to_string();
        let instead = match discovery.resolve(&name).await {
            Ok(info) if pattern.matches(&info.gvr.group, &info.gvr.resource) => continue,
            Ok(info) => Some(info.gvr.to_string()),
            Err(DiscoveryError::UnknownResource { suggestion, .. }) => suggestion,
            Err(_) => continue,
        };
        found.push(Unmatched { name, instead });
    }
    found
}

/// Logs each of [`unmatched`].
pub(super) async fn warn_of_unmatched(modes: &Modes, discovery: &Discovery) {
    for unmatched in unmatched(modes, discovery).await {
        warn!("modes: {unmatched}");
    }
}
