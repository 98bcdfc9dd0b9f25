use std::time::Duration;

use super::*;
use InformerState::{CheckDue, Delivering, ListDue, Rereading, WatchDue, Watching};
use NextStep::{OpenWatch, ReadList, ReadWatch, RequestList, ReturnUpdate};

/// A transition: the state, the event, the reflector's next step, and the state then.
struct Row {
    from: InformerState,
    event: Event,
    next: NextStep,
    to: InformerState,
}

fn row(from: InformerState, event: Event, next: NextStep, to: InformerState) -> Row {
    Row { from, event, next, to }
}

/// The values that the rows consist of.
struct Values {
    start: Instant,
    confirmed: Answers,
    unconfirmed: Answers,
    denied: Answers,
    /// Waits for its permit.
    without_permit: List,
}

impl Values {
    fn new() -> Self {
        let start = Instant::now();
        let unconfirmed = Answers::default();
        Self {
            start,
            confirmed: Answers { is_confirmed: true, denied_since: None },
            unconfirmed,
            denied: Answers { denied_since: Some(start), ..unconfirmed },
            without_permit: List::default(),
        }
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    /// Returns a list that was given its permit, or received something, at this second.
    fn with_permit(&self, seconds: u64) -> List {
        List { begin: None, progress: Some(self.at(seconds)) }
    }

    fn begin(&self, reason: RelistReason) -> ListBegin {
        ListBegin { reason, requested_at: self.start }
    }

    /// Returns a list that has begun, and received something at this second.
    fn begun(&self, reason: RelistReason, seconds: u64) -> List {
        List { begin: Some(self.begin(reason)), ..self.with_permit(seconds) }
    }

    /// Returns the same list without a permit.
    fn stalled(&self, reason: RelistReason) -> List {
        List { begin: Some(self.begin(reason)), progress: None }
    }

    fn check(&self, rows: impl IntoIterator<Item = Row>) {
        for Row { from, event, next, to } in rows {
            assert_eq!(from.after(event, next), to, "{event:?} in {from:?}, before {next:?}");
        }
    }
}

const FIRST: RelistReason = RelistReason::Initial;
const EXPIRED: RelistReason = RelistReason::Expired;
const SCHEMA: RelistReason = RelistReason::SchemaChanged;

#[test]
fn a_cold_start_lists_and_a_warm_one_watches() {
    let of = Values::new();
    let warm = InformerState::Starting { asks_peers: true };
    let cold = InformerState::Starting { asks_peers: false };
    of.check([
        row(cold, Event::Started, RequestList, ListDue(of.without_permit, of.unconfirmed)),
        row(warm, Event::Started, RequestList, ListDue(of.without_permit, of.unconfirmed)),
        row(warm, Event::Started, OpenWatch, WatchDue(of.unconfirmed)),
    ]);
}

#[test]
fn a_list_in_pages_leads_to_a_watch() {
    let of = Values::new();
    let begun = Event::ListBegun { begin: of.begin(FIRST), at: of.at(2) };
    of.check([
        row(ListDue(of.without_permit, of.unconfirmed), Event::PermitAcquired(of.at(1)), RequestList, {
            ListDue(of.with_permit(1), of.unconfirmed)
        }),
        row(ListDue(of.with_permit(1), of.confirmed), begun, RequestList, ListDue(of.begun(FIRST, 2), of.confirmed)),
        row(ListDue(of.begun(FIRST, 2), of.confirmed), Event::ItemReceived(of.at(3)), ReturnUpdate, {
            Delivering(of.begun(FIRST, 3), of.confirmed)
        }),
        row(Delivering(of.begun(FIRST, 3), of.confirmed), Event::ItemReceived(of.at(4)), RequestList, {
            ListDue(of.begun(FIRST, 4), of.confirmed)
        }),
        row(Delivering(of.begun(FIRST, 4), of.confirmed), Event::ListEnded, OpenWatch, WatchDue(of.confirmed)),
        row(WatchDue(of.confirmed), Event::WatchOpened, ReadWatch, Watching(of.unconfirmed)),
        row(Watching(of.unconfirmed), Event::Confirmed, ReadWatch, Watching(of.confirmed)),
        row(Watching(of.confirmed), Event::Updated, ReadWatch, Watching(of.confirmed)),
        row(Watching(of.confirmed), Event::WatchEnded, OpenWatch, WatchDue(of.unconfirmed)),
    ]);
}

#[test]
fn a_watch_list_is_one_request_whose_end_is_confirmed() {
    let of = Values::new();
    let begun = Event::ListBegun { begin: of.begin(FIRST), at: of.at(2) };
    let complete = Delivering(of.begun(FIRST, 3), of.confirmed);
    of.check([
        row(ListDue(of.with_permit(1), of.confirmed), begun, ReadList, Delivering(of.begun(FIRST, 2), of.confirmed)),
        row(complete, Event::WatchOpened, ReturnUpdate, complete),
        row(complete, Event::Confirmed, ReadWatch, complete),
        row(complete, Event::ListEnded, ReadWatch, Watching(of.confirmed)),
    ]);
}

#[test]
fn a_list_that_receives_nothing_returns_its_permit_and_waits_for_one_before_the_next_page() {
    let of = Values::new();
    let stalled = of.stalled(FIRST);
    of.check([
        row(ListDue(of.begun(FIRST, 3), of.confirmed), Event::Stalled, RequestList, ListDue(stalled, of.confirmed)),
        row(Delivering(of.begun(FIRST, 3), of.confirmed), Event::Stalled, ReadList, Delivering(stalled, of.confirmed)),
        // Objects that come late do not bring the permit back.
        row(Delivering(stalled, of.confirmed), Event::ItemReceived(of.at(40)), ReadList, {
            Delivering(stalled, of.confirmed)
        }),
        row(ListDue(stalled, of.confirmed), Event::PermitAcquired(of.at(50)), RequestList, {
            ListDue(of.begun(FIRST, 50), of.confirmed)
        }),
    ]);
    assert!(ListDue(stalled, of.confirmed).needs_permit() && !Delivering(stalled, of.confirmed).needs_permit());
    assert!(!ListDue(of.with_permit(1), of.confirmed).needs_permit() && !Watching(of.confirmed).needs_permit());
}

#[test]
fn a_planned_relist_has_its_permit_already() {
    let of = Values::new();
    let due = Event::PermitAcquired(of.at(9));
    let begun = Event::ListBegun { begin: of.begin(SCHEMA), at: of.at(10) };
    of.check([
        row(Watching(of.confirmed), due, RequestList, ListDue(of.with_permit(9), of.confirmed)),
        // A list for the schema is read beside the watch.
        row(Watching(of.confirmed), due, ReturnUpdate, Delivering(of.with_permit(9), of.confirmed)),
        row(
            Delivering(of.with_permit(9), of.confirmed),
            begun,
            ReadWatch,
            Rereading(of.begun(SCHEMA, 10), of.confirmed),
        ),
        row(Rereading(of.begun(SCHEMA, 10), of.confirmed), Event::Updated, ReadWatch, {
            Rereading(of.begun(SCHEMA, 10), of.confirmed)
        }),
        row(Rereading(of.begun(SCHEMA, 10), of.confirmed), Event::ItemReceived(of.at(11)), ReturnUpdate, {
            Delivering(of.begun(SCHEMA, 11), of.confirmed)
        }),
        row(Delivering(of.begun(SCHEMA, 11), of.confirmed), Event::ListEnded, ReadWatch, Watching(of.confirmed)),
        row(Rereading(of.begun(SCHEMA, 11), of.confirmed), Event::Stalled, ReadWatch, {
            Rereading(of.stalled(SCHEMA), of.confirmed)
        }),
        // Another one is due meanwhile.
        row(Rereading(of.begun(SCHEMA, 11), of.confirmed), due, RequestList, {
            ListDue(of.begun(SCHEMA, 9), of.confirmed)
        }),
    ]);
}

#[test]
fn a_list_for_the_schema_that_ends_early_is_planned_again_unless_an_ordinary_list_follows() {
    let of = Values::new();
    let rereading = Rereading(of.begun(SCHEMA, 1), of.confirmed);
    let failed = Event::Failed { denied_at: None };
    of.check([
        row(rereading, Event::WatchEnded, OpenWatch, WatchDue(of.unconfirmed)),
        row(rereading, failed, ReadWatch, Watching(of.unconfirmed)),
        row(rereading, failed, RequestList, ListDue(of.stalled(SCHEMA), of.unconfirmed)),
    ]);
    assert!(rereading.gives_up_reread(OpenWatch) && rereading.gives_up_reread(ReadWatch));
    assert!(!rereading.gives_up_reread(RequestList));
    assert!(!Watching(of.confirmed).gives_up_reread(OpenWatch));
    assert!(!ListDue(of.begun(EXPIRED, 1), of.confirmed).gives_up_reread(OpenWatch), "another list");
}

#[test]
fn the_permit_of_a_list_is_free_during_the_wait_after_a_failure() {
    let of = Values::new();
    let failed = Event::Failed { denied_at: None };
    of.check([
        row(ListDue(of.begun(FIRST, 1), of.confirmed), failed, RequestList, {
            ListDue(of.stalled(FIRST), of.unconfirmed)
        }),
        row(Delivering(of.begun(FIRST, 1), of.confirmed), failed, RequestList, {
            ListDue(of.stalled(FIRST), of.unconfirmed)
        }),
        row(WatchDue(of.confirmed), failed, RequestList, ListDue(of.without_permit, of.unconfirmed)),
        row(WatchDue(of.confirmed), failed, OpenWatch, WatchDue(of.unconfirmed)),
        row(Watching(of.confirmed), failed, OpenWatch, WatchDue(of.unconfirmed)),
        // The state is useless: the applied updates are out of order, or one was never received.
        row(Delivering(of.begun(FIRST, 1), of.confirmed), Event::Relisted, RequestList, {
            ListDue(of.without_permit, of.confirmed)
        }),
        row(Watching(of.confirmed), Event::Relisted, RequestList, ListDue(of.without_permit, of.confirmed)),
        // The cluster is below a version that it had sent.
        row(WatchDue(of.confirmed), Event::Updated, RequestList, ListDue(of.without_permit, of.confirmed)),
    ]);
}

#[test]
fn a_denial_lasts_until_another_failure_or_a_watch() {
    let of = Values::new();
    let denied_again = Event::Failed { denied_at: Some(of.at(7)) };
    let failed = Event::Failed { denied_at: None };
    let since_start = Event::Failed { denied_at: Some(of.start) };
    let denied_and_confirmed = Answers { is_confirmed: true, ..of.denied };
    of.check([
        row(ListDue(of.with_permit(1), of.confirmed), since_start, RequestList, ListDue(of.without_permit, of.denied)),
        row(ListDue(of.with_permit(1), of.denied), denied_again, RequestList, ListDue(of.without_permit, of.denied)),
        // A list that succeeds does not end it: the watch may be denied again.
        row(Delivering(of.begun(FIRST, 1), denied_and_confirmed), Event::ListEnded, OpenWatch, {
            WatchDue(denied_and_confirmed)
        }),
        row(WatchDue(denied_and_confirmed), denied_again, RequestList, ListDue(of.without_permit, of.denied)),
        row(WatchDue(denied_and_confirmed), Event::WatchOpened, ReadWatch, Watching(of.unconfirmed)),
        row(ListDue(of.with_permit(1), of.denied), failed, RequestList, ListDue(of.without_permit, of.unconfirmed)),
        row(ListDue(of.without_permit, of.denied), Event::Relisted, RequestList, ListDue(of.without_permit, of.denied)),
    ]);
    assert_eq!(WatchDue(of.denied).denied_since(), Some(of.start));
}

#[test]
fn after_a_failed_check_the_next_one_comes_before_any_request() {
    let of = Values::new();
    let check_due = CheckDue { denied_since: None };
    let denied = CheckDue { denied_since: Some(of.start) };
    let unconfirmed = Event::Unconfirmed { checks_first: true };
    let waits = Event::Unconfirmed { checks_first: false };
    of.check([
        row(ListDue(of.begun(FIRST, 1), of.unconfirmed), unconfirmed, RequestList, check_due),
        row(Delivering(of.begun(FIRST, 1), of.confirmed), unconfirmed, OpenWatch, check_due),
        row(Watching(of.unconfirmed), unconfirmed, OpenWatch, check_due),
        row(WatchDue(of.denied), unconfirmed, OpenWatch, denied),
        row(check_due, unconfirmed, OpenWatch, check_due),
        row(check_due, Event::Confirmed, OpenWatch, WatchDue(of.confirmed)),
        row(check_due, Event::Confirmed, RequestList, ListDue(of.without_permit, of.confirmed)),
        // Over gRPC only an answer to a request names the cluster.
        row(Watching(of.unconfirmed), waits, OpenWatch, WatchDue(of.unconfirmed)),
        row(
            Delivering(of.begun(FIRST, 1), of.confirmed),
            waits,
            RequestList,
            ListDue(of.without_permit, of.unconfirmed),
        ),
    ]);
    assert!(check_due.checks_first(false));
    for state in
        [ListDue(of.without_permit, of.confirmed), Delivering(of.with_permit(1), of.confirmed), WatchDue(of.confirmed)]
    {
        assert!(state.checks_first(true) && !state.checks_first(false), "{state:?}");
    }
    for state in [Watching(of.unconfirmed), Rereading(of.begun(SCHEMA, 1), of.unconfirmed)] {
        assert!(!state.checks_first(true), "a watch is read on: {state:?}");
    }
}

#[test]
fn a_confirmation_moves_nothing_because_its_update_is_still_to_be_applied() {
    let of = Values::new();
    let list = of.begun(EXPIRED, 1);
    of.check([
        row(Delivering(list, of.unconfirmed), Event::Confirmed, OpenWatch, Delivering(list, of.confirmed)),
        row(ListDue(list, of.unconfirmed), Event::Confirmed, ReturnUpdate, ListDue(list, of.confirmed)),
        row(WatchDue(of.unconfirmed), Event::Confirmed, RequestList, WatchDue(of.confirmed)),
        row(Rereading(list, of.unconfirmed), Event::Confirmed, ReadWatch, Rereading(list, of.confirmed)),
    ]);
}

#[test]
fn the_end_of_a_list_is_always_confirmed_and_its_objects_with_it() {
    let of = Values::new();
    let version = ResourceVersion::new(5).unwrap();
    let end = Update::ListEnd(version);
    let bookmark = Update::Bookmark(version);
    let begin = Update::ListBegin { reason: FIRST };
    let object = br#"{"metadata":{"name":"a","namespace":"b","uid":"u","resourceVersion":"5"}}"#;
    let gvr = kubefan_model::GroupVersionResource::new("", "v1", "pods");
    let table = kubefan_model::fields::FieldTable::new(&gvr, true, &[]);
    let item = Update::ListItem(kubefan_model::object::ObjectParser::new(&table).parse(object).unwrap());
    let sure = ListDue(of.with_permit(1), of.confirmed);
    let unsure = ListDue(of.with_permit(1), of.unconfirmed);
    assert!(sure.must_confirm(&end) && unsure.must_confirm(&end));
    assert!(!sure.must_confirm(&item) && !unsure.must_confirm(&item));
    assert!(!sure.must_confirm(&begin) && unsure.must_confirm(&begin));
    assert!(!sure.must_confirm(&bookmark) && unsure.must_confirm(&bookmark));
}

#[test]
fn a_failed_check_discards_all_updates_since_the_last_commit() {
    let of = Values::new();
    let version = ResourceVersion::new(5).unwrap();
    let listing = ListDue(of.begun(EXPIRED, 1), of.confirmed);
    let rereading = Rereading(of.begun(SCHEMA, 1), of.confirmed);
    for (state, begins, known, expected) in [
        (Watching(of.confirmed), None, Some(version), Discard::Resume(version)),
        (WatchDue(of.confirmed), None, None, Discard::Relist(FIRST)),
        (listing, None, Some(version), Discard::Relist(EXPIRED)),
        (listing, None, None, Discard::Relist(EXPIRED)),
        (ListDue(of.with_permit(1), of.confirmed), Some(EXPIRED), Some(version), Discard::Relist(EXPIRED)),
        (listing, Some(SCHEMA), Some(version), Discard::ResumeAndReread(version)),
        (rereading, None, Some(version), Discard::ResumeAndReread(version)),
        (rereading, None, None, Discard::Relist(SCHEMA)),
    ] {
        assert_eq!(state.discard(begins, known), expected, "{state:?}, {begins:?}, {known:?}");
    }
}
