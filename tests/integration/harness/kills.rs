//! Kills kubefan and the apiserver at random times, as a seed says, and starts them again.

use std::{
    env,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tokio::time::{Instant, sleep, sleep_until};

use super::{apiserver::ApiServer, kubefan::Kubefan};

/// Seconds between two kills.
const PAUSE_SECONDS: std::ops::Range<u64> = 4..16;
/// Longest absence of a killed process, in milliseconds.
const OUTAGE_MILLIS_MAX: u64 = 3_000;

/// The programs to kill, and the numbers of kills.
pub(crate) struct Kills {
    random: Pcg64Mcg,
    /// Number of kills of kubefan.
    pub(crate) kubefan: usize,
    /// Number of kills of the apiserver.
    pub(crate) apiserver: usize,
}

impl Kills {
    /// With the seed `KUBEFAN_SOAK_SEED`, or another one each time. Prints it.
    pub(crate) fn from_seed() -> Kills {
        let text = env::var("KUBEFAN_SOAK_SEED").ok();
        let seed = text.map_or_else(
            || RandomState::new().hash_one(()),
            |text| text.parse().expect("KUBEFAN_SOAK_SEED is a number"),
        );
        println!("KUBEFAN_SOAK_SEED={seed}");
        Kills { random: Pcg64Mcg::seed_from_u64(seed), kubefan: 0, apiserver: 0 }
    }

    /// Kills one of the two or both, again and again until `end`. Then both run.
    pub(crate) async fn until(
        &mut self,
        end: Instant,
        api: &ApiServer,
        kubefan: &mut Option<Kubefan>,
        serve: impl AsyncFn() -> Kubefan,
    ) {
        loop {
            let pause = Duration::from_secs(self.random.random_range(PAUSE_SECONDS));
            if Instant::now() + pause >= end {
                return sleep_until(end).await;
            }
            sleep(pause).await;
            let (has_kubefan, has_apiserver) =
                [(true, false), (false, true), (true, true)][self.random.random_range(0..3)];
            let outage = Duration::from_millis(self.random.random_range(0..OUTAGE_MILLIS_MAX));
            if has_kubefan {
                self.kubefan += 1;
                kubefan.take().expect("kubefan is running").process.kill9();
            }
            if has_apiserver {
                self.apiserver += 1;
                api.kill9();
            }
            sleep(outage).await;
            if has_apiserver {
                api.restart().await;
            }
            if kubefan.is_none() {
                *kubefan = Some(serve().await);
            }
        }
    }

    /// Fails if nothing was killed in a time that is long enough for it.
    pub(crate) fn assert_some(&self, duration: Duration) {
        let expected = duration.as_secs() >= PAUSE_SECONDS.end;
        assert!(!expected || self.kubefan + self.apiserver > 0, "nothing was killed");
    }
}
