//! Which pods each subscriber watches: a mix as clusters have it, of few that watch everything and many that watch a part.

use super::DemoOptions;

/// One in so many subscribers watches every pod, as schedulers and controllers do.
const EVERYTHING_ONE_IN: usize = 10;
/// Out of [`EVERYTHING_ONE_IN`], so many select by label, as what serves one application does.
const BY_LABEL: usize = 3;
/// Values of the label `app`.
pub(super) const APPS: usize = 20;

/// The two selectors of a list or watch; empty selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Selectors {
    pub(super) labels: String,
    pub(super) fields: String,
}

/// What subscriber `index` watches. The rest watch the pods of one node each, as the agents of nodes do.
pub(super) fn of(index: usize, options: &DemoOptions) -> Selectors {
    match index % EVERYTHING_ONE_IN {
        0 => Selectors::default(),
        place if place <= BY_LABEL => {
            Selectors { labels: format!("app=web-{}", index / EVERYTHING_ONE_IN % APPS), ..Selectors::default() }
        }
        _ => Selectors { fields: format!("spec.nodeName=node-{}", index % options.nodes()), ..Selectors::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_watch_everything_some_a_label_and_most_a_node() {
        let options = DemoOptions::default();
        let all: Vec<_> = (0..300).map(|index| of(index, &options)).collect();
        let count = |is: fn(&Selectors) -> bool| all.iter().filter(|selectors| is(selectors)).count();
        assert_eq!(count(|s| s.labels.starts_with("app=web-")), 90);
        assert_eq!(count(|s| s.fields.starts_with("spec.nodeName=node-")), 180);
        assert_eq!(count(|s| *s == Selectors::default()), 30);
    }
}
