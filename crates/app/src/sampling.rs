//! Samples the metrics, for the status page and for kubefan's own alarms, and acts on these.

use std::sync::Arc;

use kubefan_access::{Switches, switches::ENDS_PER_SECOND};
use kubefan_informers::Registry;
use kubefan_telemetry::{
    alarms::{Alarm, Alarms},
    last_hour::{History, SAMPLE_INTERVAL},
};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::component::Shared;

/// Samples until kubefan stops. With `tuning.passthroughOnAlarm` the apiserver answers reads while
/// an alarm of this kubefan fires.
pub(super) fn sample(shared: Shared<'_>, registry: &Arc<Registry>, switches: &Arc<Switches>) -> Arc<History> {
    let history = Arc::new(History::new(Instant::now()));
    let sampled = history.clone();
    let registry = registry.clone();
    let metrics = shared.metrics.clone();
    let mut alarms = Alarms::default();
    let bypass = Bypass {
        switches: switches.clone(),
        // Their clients all turn to the apiserver, as if kubefan were away.
        ends_per_second: shared.config.serving.fallback_starts_per_second,
        ending: None,
    };
    let mut bypass = shared.config.serving.passthrough_on_alarm.then_some(bypass);
    shared.spawn(async move {
        let mut fired = Vec::new();
        let mut ticks = interval(SAMPLE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            registry.refresh_gauges();
            let families = metrics.registry().gather();
            let now = Instant::now();
            sampled.sample(&families, now);
            let firing = alarms.sample(&families, now);
            if firing == fired {
                continue;
            }
            metrics.set_alarms(&firing);
            let names: Vec<&str> = firing.iter().map(|alarm| alarm.as_str()).collect();
            warn!(alarms = names.join(","), "the alarms that fire have changed");
            if let Some(bypass) = &mut bypass {
                bypass.follow(&fired, &firing);
            }
            fired = firing;
        }
    });
    history
}

/// Sends reads past the caches while an alarm of this kubefan fires.
struct Bypass {
    switches: Arc<Switches>,
    /// Open watches that end per second when an alarm begins.
    ends_per_second: u32,
    /// The end of the watches that the last change concerns.
    ending: Option<AbortOnDropHandle<()>>,
}

impl Bypass {
    fn follow(&mut self, before: &[Alarm], now: &[Alarm]) {
        let bypassed = before.iter().any(|alarm| alarm.is_of_this_kubefan());
        let bypasses = now.iter().any(|alarm| alarm.is_of_this_kubefan());
        if bypassed == bypasses {
            return;
        }
        self.switches.bypass_caches(bypasses);
        if bypasses {
            warn!("reads are passed on to the apiserver while an alarm fires");
        } else {
            info!("the caches answer reads again: no alarm of this kubefan fires");
        }
        let per_second = if bypasses { self.ends_per_second } else { ENDS_PER_SECOND };
        let switches = self.switches.clone();
        self.ending = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let ended = switches.end_concerned(per_second).await;
            info!(ended, "the open watches that the change concerns have ended");
        })));
    }
}

#[cfg(test)]
mod tests {
    use kubefan_access::{Mode, modes::Modes};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reads_pass_the_caches_while_the_answers_of_this_kubefan_suffer() {
        let switches = Switches::new(Modes::default());
        let mut bypass = Bypass { switches: switches.clone(), ends_per_second: 50, ending: None };
        let mode = || switches.mode("", "pods", None);
        let steps = [
            (vec![], vec![Alarm::ReviewsFailing], Mode::Cache),
            (vec![Alarm::ReviewsFailing], vec![Alarm::Memory, Alarm::ReviewsFailing], Mode::Passthrough),
            (vec![Alarm::Memory, Alarm::ReviewsFailing], vec![Alarm::Difference, Alarm::Memory], Mode::Passthrough),
            (vec![Alarm::Difference, Alarm::Memory], vec![Alarm::Difference], Mode::Passthrough),
            (vec![Alarm::Difference], vec![Alarm::SlowDispatch], Mode::Cache),
        ];
        for (before, now, expected) in steps {
            bypass.follow(&before, &now);
            assert_eq!(mode(), Some(expected), "{before:?}, then {now:?}");
        }
    }
}
