//! Options of the paced fallback, and the client's place in the spread that they give. The place
//! must be the same in every process, so that a restart does not send a client to the apiserver
//! early.

use std::time::Duration;

use kubefan_common::backoff::BackoffOptions;

/// The shortest time over which the clients of a fleet enter. On average 0.5 % do each minute, so
/// that no minute has more than 1 % by chance.
const SPREAD_MIN: Duration = Duration::from_secs(200 * 60);

/// A longer spread is a mistake, and would leave the range of the clock.
const SPREAD_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// Options of [`Fallback::Paced`](super::Fallback::Paced).
#[derive(Debug, Clone)]
pub struct PacedOptions {
    /// Names this client in its fleet, such as the name of its node or pod. Its hash decides the
    /// client's moment, so clients with the same id enter together.
    pub client_id: String,
    /// Minimum time for which kubefan must be unreachable. Default: 60 s.
    pub after: Duration,
    /// The time over which all clients of a fleet enter, each at its own moment, evenly spread.
    /// Default and minimum: 200 minutes, which is 0.5 % of the fleet each minute on average. At
    /// most 30 days.
    pub spread: Duration,
    /// The delays between attempts to reach kubefan.
    pub backoff: BackoffOptions,
}

impl PacedOptions {
    /// Returns the default options of this client.
    pub fn new(client_id: &str) -> Self {
        Self {
            client_id: client_id.to_owned(),
            after: Duration::from_secs(60),
            spread: SPREAD_MIN,
            backoff: BackoffOptions::default(),
        }
    }

    /// The client's place in the spread. Hashes of ids are evenly distributed.
    pub(super) fn phase(&self) -> Duration {
        let nanos = (u128::from(hash(&self.client_id)) * self.spread().as_nanos()) >> 64;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    pub(super) fn spread(&self) -> Duration {
        self.spread.clamp(SPREAD_MIN, SPREAD_MAX)
    }
}

/// A hash that is the same in every process and version: FNV-1a, and the final mix of SplitMix64,
/// because FNV leaves the high bits of similar short texts similar.
pub(super) fn hash(text: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_an_id_never_changes() {
        assert_eq!((hash(""), hash("node-17")), (17_665_956_581_633_026_203, 2_143_955_359_988_206_193));
    }

    #[test]
    fn a_spread_cannot_be_shorter_than_200_minutes() {
        let phase = |spread| PacedOptions { spread, ..PacedOptions::new("node-17") }.phase();
        assert_eq!(phase(Duration::ZERO), phase(SPREAD_MIN));
        assert_eq!(phase(2 * SPREAD_MIN).as_secs(), (phase(SPREAD_MIN) * 2).as_secs());
        let _ = phase(Duration::MAX);
    }
}
