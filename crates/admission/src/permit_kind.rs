//! The texts with which permits are refused to clients: one sentence for all limits, which names
//! the setting.

use std::fmt::Display;

use crate::fair_share::{FairPool, Holder};

/// A kind of permits, for the text of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PermitKind {
    /// Name of what the permits are for, in the plural, such as `streams`.
    pub name: &'static str,
    /// Setting of their number.
    pub setting: &'static str,
    /// Setting of the number that one identity may hold; empty if there is none.
    pub identity_setting: &'static str,
}

impl PermitKind {
    /// Returns the refusal if all permits that are left are for others.
    pub fn exhausted(self, limit: impl Display) -> String {
        let Self { name, setting, .. } = self;
        format!(
            "this kubefan takes at most {limit} {name} at a time ({setting}); the last ones are reserved for clients that hold few"
        )
    }

    /// Returns the refusal of a permit that `pool` does not give to `holder`.
    pub fn refusal(self, pool: &FairPool, holder: Holder) -> String {
        let Self { name, identity_setting, .. } = self;
        let Some(limit) = pool.identity_max(Some(holder)) else { return self.exhausted(pool.places_max()) };
        format!("this kubefan takes at most {limit} {name} of one identity at a time ({identity_setting})")
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::fair_share::PermitLimits;

    const STREAMS: PermitKind = PermitKind {
        name: "streams",
        setting: "limits.subscribersMax",
        identity_setting: "limits.subscribersMaxPerIdentity",
    };

    #[test]
    fn a_refusal_names_the_limit_that_is_reached() {
        let holder = Holder::new(1, Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let all = "this kubefan takes at most 3 streams at a time (limits.subscribersMax); the last ones are reserved for clients that hold few";
        assert_eq!(STREAMS.refusal(&FairPool::new(3), holder), all);

        let limited = FairPool::new(PermitLimits { all: 3, per_identity: Some(1) });
        let _held = limited.try_take(Some(holder)).unwrap();
        let own = "this kubefan takes at most 1 streams of one identity at a time (limits.subscribersMaxPerIdentity)";
        assert_eq!(STREAMS.refusal(&limited, holder), own);
    }
}
