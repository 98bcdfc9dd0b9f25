//! State that a reflector keeps from one round to the next.

/// The version, and the requests that the server is known to refuse.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// The store is complete up to this version. Empty before the first list.
    pub(super) version: String,
    /// A watch cannot resume from `version`.
    pub(super) expired: bool,
    /// A list cannot be as new as `version`, either.
    pub(super) unavailable: bool,
    /// The last snapshot ended before it was complete.
    pub(super) broke_off: bool,
    /// The server refused `sendInitialEvents`.
    pub(super) lists: bool,
    /// The server answered a list at version "0" with pages, so it has no watch cache, and a list
    /// of everything is expensive.
    pub(super) pages: bool,
}

impl Session {
    /// Whether a watch may start from `version`.
    pub(super) fn is_known(&self) -> bool {
        !self.version.is_empty() && !self.expired
    }

    /// Returns the version that a new state must have at least: the last version, or `first` if
    /// there is none. It is empty, for a consistent read, if a list cannot be as new as the last
    /// version.
    pub(super) fn minimum(&self, first: &str) -> String {
        match self.version.as_str() {
            _ if self.unavailable => String::new(),
            "" => first.to_owned(),
            version => version.to_owned(),
        }
    }

    /// The store has a new state.
    pub(super) fn set_replaced(&mut self) {
        self.expired = false;
        self.unavailable = false;
        self.broke_off = false;
    }
}
