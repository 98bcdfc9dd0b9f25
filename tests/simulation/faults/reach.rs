//! Faults between one subscriber, which may also read from the apiserver, and its servers.

use rand::RngExt;

use super::{Faults, Heal};

const REFUSED: &str = "replicas out of reach";
const HUNG: &str = "replicas hang";
const BOTH_REFUSED: &str = "replicas and apiservers out of reach";
const BOTH_HUNG: &str = "replicas and apiservers hang";
const ALL_KILLED: &str = "all replicas killed";

/// The kinds of faults of the seeds with such subscribers, by their names in the counts.
pub(crate) const APISERVER_USE_KINDS: [&str; 5] = [REFUSED, HUNG, BOTH_REFUSED, BOTH_HUNG, ALL_KILLED];

impl Faults {
    /// Takes servers away from one subscriber. Each kind of server is back at its own time.
    pub(crate) fn take_servers_away(&mut self, subscriber_number: usize) {
        let world = self.world.clone();
        let kind = APISERVER_USE_KINDS[self.random.random_range(0..APISERVER_USE_KINDS.len())];
        let time = self.seconds(2, 60);
        let apiservers_time = self.seconds(1, 60);
        let control = &world.controls[subscriber_number];
        world.note(format!("{kind}: subscriber {subscriber_number}, for {time:?}, apiservers for {apiservers_time:?}"));
        match kind {
            REFUSED => control.route.take_away(),
            HUNG => control.route.hang(),
            BOTH_REFUSED => {
                control.route.take_away();
                control.direct.take_away();
            }
            BOTH_HUNG => {
                control.route.hang();
                control.direct.hang();
            }
            _ => {
                for number in 0..world.nodes.len() {
                    world.nodes[number].kill();
                    let down = self.seconds(2, 60);
                    self.later(down, Heal::Start(number));
                }
            }
        }
        if kind != ALL_KILLED {
            self.later(time, Heal::ReplicasReach(subscriber_number));
        }
        if matches!(kind, BOTH_REFUSED | BOTH_HUNG) {
            self.later(apiservers_time, Heal::ApiserversReach(subscriber_number));
        }
        *self.counts.entry(kind).or_default() += 1;
    }
}
