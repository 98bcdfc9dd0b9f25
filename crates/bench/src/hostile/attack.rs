//! An entry of the table of attacks.

use futures::future::BoxFuture;

use super::context::Context;

/// An attack.
pub struct Attack {
    /// Name of the attack on the command line and in reports.
    pub name: &'static str,
    /// Flags of kubefan that it needs.
    pub(crate) flags: &'static [&'static str],
    /// Whether kubefan serves over TLS.
    pub(crate) is_tls: bool,
    /// Whether the apiserver answers no review of a caller meanwhile.
    pub(crate) has_outage_of_reviews: bool,
    /// The bytes per second that are read of kubefan's log; `None` for all.
    pub(crate) log_read_per_second: Option<u32>,
    /// Runs until the end of the context.
    pub(crate) run: fn(Context) -> BoxFuture<'static, ()>,
}

impl std::fmt::Debug for Attack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Attack {
    /// An attack against kubefan with its defaults.
    pub(super) const fn new(name: &'static str, run: fn(Context) -> BoxFuture<'static, ()>) -> Self {
        Self { name, flags: &[], is_tls: false, has_outage_of_reviews: false, log_read_per_second: None, run }
    }
}
