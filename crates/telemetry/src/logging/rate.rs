//! The rate of lines of one kind. A kind is a place in the code; all lines of one level that
//! libraries write with the `log` crate are one kind.

use std::sync::Arc;

use dashmap::DashMap;
use tracing::{Event, Metadata, Subscriber, callsite};
use tracing_subscriber::{Layer, layer::Context};

/// The lines of one kind that may come at once. A start with a hundred resources logs each.
const BURST: u32 = 100;
/// The lines of one kind per second after that.
const PER_SECOND: u32 = 10;

/// Admits lines, and counts those that are left out. There are as many kinds as places in the code
/// that log. Clones share the counts.
#[derive(Clone, Default)]
pub(super) struct Rate {
    kinds: Arc<DashMap<callsite::Identifier, Kind>>,
}

struct Kind {
    /// The lines that may come now.
    tokens: u32,
    left_out: u64,
    /// The module and line.
    place: &'static Metadata<'static>,
}

impl Rate {
    fn admits(&self, metadata: &'static Metadata<'static>) -> bool {
        let new = || Kind { tokens: BURST, left_out: 0, place: metadata };
        let mut kind = self.kinds.entry(metadata.callsite()).or_insert_with(new);
        let is_admitted = kind.tokens > 0;
        kind.tokens = kind.tokens.saturating_sub(1);
        kind.left_out += u64::from(!is_admitted);
        is_admitted
    }

    /// Adds the lines of one second, and logs how many lines of each kind were left out in it.
    pub(super) fn tick(&self) {
        // Logging while the map is iterated would lock it twice.
        for (place, lines) in self.refill() {
            let module = place.target();
            let line = place.line();
            tracing::warn!(lines, module, line, "lines of one kind were left out of the log: there are too many");
        }
    }

    /// Adds the lines of one second. Returns the places that lines were left out of, and how many.
    fn refill(&self) -> Vec<(&'static Metadata<'static>, u64)> {
        let mut left_out = Vec::new();
        for mut kind in self.kinds.iter_mut() {
            kind.tokens = (kind.tokens + PER_SECOND).min(BURST);
            let lines = std::mem::take(&mut kind.left_out);
            if lines > 0 {
                left_out.push((kind.place, lines));
            }
        }
        left_out
    }
}

impl<S: Subscriber> Layer<S> for Rate {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        self.admits(event.metadata())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Counts the lines that pass the rate.
    struct Count(Arc<AtomicU32>);

    impl<S: Subscriber> Layer<S> for Count {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn many_lines_of_one_kind_leave_the_others_and_are_counted() {
        let rate = Rate::default();
        let count = Arc::<AtomicU32>::default();
        let subscriber = tracing_subscriber::registry().with(Count(count.clone())).with(rate.clone());
        let lines = || count.swap(0, Ordering::Relaxed);
        tracing::subscriber::with_default(subscriber, || {
            let flood = || {
                for number in 0..1000 {
                    tracing::warn!(number, "flood");
                }
            };
            flood();
            assert_eq!(lines(), BURST);
            tracing::warn!("another kind");
            assert_eq!(lines(), 1);
            rate.tick();
            assert_eq!(lines(), 1, "the count of those that were left out");
            flood();
            assert_eq!(lines(), PER_SECOND);
            assert_eq!(rate.refill()[0].1, 1000 - u64::from(PER_SECOND));
            for _ in 0..1000 {
                rate.refill();
            }
            flood();
            assert_eq!(lines(), BURST, "no more than that after a long silence");
        });
    }
}
