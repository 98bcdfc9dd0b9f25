//! The selectors of the subscribers. Like in real clusters, a few watch every pod, and many watch a
//! part.

use super::options::DemoOptions;

/// The mix repeats after this many subscribers. The first of each round watches every pod, as
/// schedulers and controllers do.
const ROUND: usize = 20;
/// Number of subscribers per round that select by label, as one application's clients do.
const BY_LABEL: usize = 5;
/// The remaining subscribers of a round watch the pods of one node each, as node agents do.
const BY_NODE: usize = ROUND - 1 - BY_LABEL;
/// Values of the label `app`.
pub(super) const APPS: usize = 20;

/// The two selectors of a list or watch; empty selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Selectors {
    pub(super) labels: String,
    pub(super) fields: String,
}

/// The selectors of subscriber `index`.
pub(super) fn of(index: usize, options: &DemoOptions) -> Selectors {
    let round = index / ROUND;
    let place = index % ROUND;
    match place {
        0 => Selectors::default(),
        1..=BY_LABEL => {
            let app = (round * BY_LABEL + place) % APPS;
            Selectors { labels: format!("app=web-{app}"), ..Selectors::default() }
        }
        _ => {
            let node = (round * BY_NODE + place) % options.nodes();
            Selectors { fields: format!("spec.nodeName=node-{node}"), ..Selectors::default() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_subscribers_watch_everything_some_one_label_and_most_one_node() {
        let options = DemoOptions::default();
        let all: Vec<_> = (0..300).map(|index| of(index, &options)).collect();
        let count = |is: fn(&Selectors) -> bool| all.iter().filter(|selectors| is(selectors)).count();
        assert_eq!(count(|s| s.labels.starts_with("app=web-")), 75);
        assert_eq!(count(|s| s.fields.starts_with("spec.nodeName=node-")), 210);
        assert_eq!(count(|s| *s == Selectors::default()), 15);
        let different: std::collections::HashSet<_> = all.iter().map(|s| (&s.labels, &s.fields)).collect();
        assert_eq!(different.len(), 1 + APPS + options.nodes());
    }
}
