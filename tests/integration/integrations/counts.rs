//! The requests that an apiserver received, by sender.

use std::collections::BTreeSet;

use super::Server;
use crate::{
    harness::audit::{Request, is_consistent},
    quiet::{Table, upstream_requests::KUBEFAN},
};

pub(super) const COLUMNS: [&str; 10] =
    ["when", "copies, each way", "lines, equal", "from", "lists", "watches", "gets", "writes", "reviews", "all"];

/// The requests so far.
pub(super) struct Counts {
    /// Requests of the copies that read from the apiserver.
    pub(super) direct: Requests,
    /// Requests of the copies that read through kubefan, passed on by it.
    pub(super) passed_on: Requests,
    /// Requests of kubefan itself.
    pub(super) own: Requests,
    /// Resources whose proof of freshness was missing at some time, because the apiserver was late.
    /// Consistent reads of these may be passed on.
    pub(super) unproved: BTreeSet<String>,
    /// Number of kubefan's watches that have ended and started again. Each of these costs a
    /// look-up, which is a list.
    pub(super) restarts: usize,
}

/// Requests by verb.
#[derive(Default)]
pub(super) struct Requests {
    pub(super) lists: usize,
    pub(super) watches: usize,
    pub(super) gets: usize,
    pub(super) writes: usize,
    /// Reviews of callers: their tokens and rights.
    pub(super) reviews: usize,
    /// Watches that began with a whole state.
    states: usize,
    /// The URIs of lists and watches.
    reads: Vec<String>,
}

impl Counts {
    pub(super) fn of(requests: &[Request], direct: &Server, through: &Server) -> Counts {
        let sent_by = |user: String| Requests::of(requests.iter().filter(move |request| request.user == user));
        let own = requests.iter().filter(|request| request.agent.starts_with(KUBEFAN));
        let direct = sent_by(direct.user());
        let passed_on = sent_by(through.user());
        Counts { direct, passed_on, own: Requests::of(own), unproved: BTreeSet::new(), restarts: 0 }
    }

    pub(super) fn rows(&self, table: &mut Table, when: &str, copies: usize, lines: usize) {
        let rows = [("direct", &self.direct), ("through kubefan", &self.passed_on), ("kubefan itself", &self.own)];
        for (from, Requests { lists, watches, gets, writes, reviews, .. }) in rows {
            let all = lists + watches + gets + writes + reviews;
            table.row(&[&when, &copies, &lines, &from, lists, watches, gets, writes, reviews, &all]);
        }
    }

    /// Asserts that no list or watch of a copy through kubefan reached the apiserver but those of
    /// `passed_on` and of unproved resources, and the cost of the copies that joined since
    /// `before`. Through kubefan they cost no state, and about one proof of freshness, a short
    /// list, for each watch that begins with a consistent state.
    #[track_caller]
    pub(super) fn assert_only_direct_copies_cost(&self, before: &Counts, passed_on: &[&str]) {
        let is_unproved = |uri: &str| is_consistent(uri) && self.unproved.contains(resource_of(uri));
        let is_expected = |uri: &str| passed_on.contains(&uri) || is_unproved(uri);
        let others: Vec<_> = self.passed_on.reads.iter().filter(|uri| !is_expected(uri)).collect();
        assert!(others.is_empty(), "kubefan passed on {others:#?}");
        assert_eq!(self.own.states, before.own.states, "states that kubefan asked for, for more copies");
        let one = before.direct.reads.len();
        let all = self.direct.reads.len();
        assert!(all >= 2 * one, "the direct copies: {one} lists and watches of one, {all} of all");
        let lists = self.own.lists - before.own.lists;
        let restarts = self.restarts - before.restarts;
        // A proof may need a second try.
        let is_cheap = lists <= 2 * (all - one) + restarts;
        assert!(is_cheap, "{lists} lists of kubefan for {} of direct copies, {restarts} watches ended", all - one);
    }

    /// Asserts that the copies that joined since `before` cost no list of kubefan, because their
    /// own lists may be of any version.
    #[track_caller]
    pub(super) fn assert_nothing_was_proved(&self, before: &Counts) {
        let lists = self.own.lists - before.own.lists;
        let restarts = self.restarts - before.restarts;
        assert!(lists <= restarts, "{lists} lists of kubefan for more copies, {restarts} watches ended");
    }
}

/// The resource of a list or watch.
fn resource_of(uri: &str) -> &str {
    let path = uri.split('?').next().unwrap_or_default();
    path.rsplit('/').next().unwrap_or_default()
}

impl Requests {
    fn of<'a>(requests: impl Iterator<Item = &'a Request>) -> Requests {
        let mut counts = Requests::default();
        for request in requests {
            if ["list", "watch"].contains(&request.verb.as_str()) {
                counts.reads.push(request.uri.clone());
            }
            match request.verb.as_str() {
                "list" => counts.lists += 1,
                "watch" => {
                    counts.watches += 1;
                    counts.states += usize::from(request.requests_full_state());
                }
                "get" => counts.gets += 1,
                _ if request.uri.contains("reviews") => counts.reviews += 1,
                _ => counts.writes += 1,
            }
        }
        counts
    }
}
