//! The reasons of a new list of a cache, and of a marked gap in its history.
//!
//! Every reason of this version is in one table: replicas and kubefans behind each other pass
//! reasons on as text, and a text that one of them does not know would lose its meaning. Those that
//! clients may receive are part of the contract (`reasons.yaml`).

use kubefan_common::reasons::GapReason;

macro_rules! relist_reasons {
    ($($(#[$doc:meta])+ $reason:ident = $text:expr;)+) => {
        /// The reason of a list, and of a gap in the history.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum RelistReason {
            $($(#[$doc])+ $reason,)+
        }

        impl RelistReason {
            /// Every reason.
            pub const ALL: &[Self] = &[$(Self::$reason),+];

            /// The label of `kubefan_relists_total`, and the text in the messages for subscribers
            /// and for other replicas.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$reason => $text,)+
                }
            }
        }
    };
}

relist_reasons! {
    /// The first list.
    Initial = "initial";
    /// The state of another replica, in place of the first list.
    WarmStart = "warm_start";
    /// A state at an older version, for a backfill.
    Backfill = "backfill";
    /// Upstream no longer has the events after the version.
    Expired = GapReason::Expired.as_str();
    /// Upstream no longer has the next page of a list.
    ContinueExpired = GapReason::ContinueExpired.as_str();
    /// Upstream does not serve the resource.
    NotFound = GapReason::NotFound.as_str();
    /// Upstream does not let kubefan read the resource.
    Forbidden = GapReason::Forbidden.as_str();
    /// An event was longer than the limit.
    LineTooLong = GapReason::LineTooLong.as_str();
    /// An object could not be parsed.
    BrokenObject = GapReason::BrokenObject.as_str();
    /// The events were not in order.
    OutOfOrder = GapReason::OutOfOrder.as_str();
    /// The schema or the server's version has changed, so the same objects may have other bytes.
    SchemaChanged = GapReason::SchemaChanged.as_str();
    /// A self-check found a difference.
    SelfCheck = GapReason::SelfCheck.as_str();
    /// The read in progress is lost, and no version is known to continue from.
    Interrupted = GapReason::Interrupted.as_str();
    /// The cluster continues another history, as after a restore from a backup.
    Rewritten = "rewritten";
    /// The other kubefan, which is upstream here, sent a catch-up.
    CatchUp = GapReason::CatchUp.as_str();
    /// A reason that this version does not know. A newer kubefan has sent it.
    Other = GapReason::Other.as_str();
}

impl RelistReason {
    /// The reason of a text that another kubefan has sent.
    pub fn parse(text: &str) -> Self {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == text).unwrap_or(Self::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_known_by_its_text_and_a_newer_one_is_another() {
        for reason in RelistReason::ALL {
            assert_eq!(RelistReason::parse(reason.as_str()), *reason);
        }
        assert_eq!(RelistReason::parse("of a newer version"), RelistReason::Other);
        for reason in GapReason::ALL {
            assert_eq!(RelistReason::parse(reason.as_str()).as_str(), reason.as_str());
        }
    }
}
