//! The list of the bugs that can be planted.

macro_rules! bugs {
    (
        $($(#[doc = $doc:literal])+ $bug:ident = $name:literal breaks $breaks:literal,)+
        in patches:
        $($(#[doc = $patch_doc:literal])+ $patch_bug:ident = $patch_name:literal breaks $patch_breaks:literal,)+
        among threads:
        $($(#[doc = $thread_doc:literal])+ $thread_bug:ident = $thread_name:literal breaks $thread_breaks:literal,)+
    ) => {
        /// A bug that can be planted. The docs of a variant name the file, the mistake, and the
        /// conditions under which it does harm.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Bug {
            $($(#[doc = $doc])+ $bug,)+
            $($(#[doc = $patch_doc])+ $patch_bug,)+
            $($(#[doc = $thread_doc])+ $thread_bug,)+
        }

        #[cfg(planted_bugs)]
        impl Bug {
            /// The bugs that do harm in ordinary operation under faults, even on a single thread.
            pub const ALL: &[Self] = &[$(Self::$bug,)+ $(Self::$patch_bug,)+];

            /// Bugs that exist only if the patches of `tests/simulation/planted` have been
            /// applied.
            pub const IN_PATCHES: &[Self] = &[$(Self::$patch_bug,)+];

            /// The bugs that the tests of thread interleavings find. Most need two threads at an
            /// exact moment.
            pub const AMONG_THREADS: &[Self] = &[$(Self::$thread_bug,)+];

            /// The name in `KUBEFAN_PLANTED_BUG`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$bug => $name,)+
                    $(Self::$patch_bug => $patch_name,)+
                    $(Self::$thread_bug => $thread_name,)+
                }
            }

            /// The guarantees that it breaks, separated by commas. If the oracle reports another
            /// guarantee, it misjudges the bug.
            pub fn breaks(self) -> &'static str {
                match self {
                    $(Self::$bug => $breaks,)+
                    $(Self::$patch_bug => $patch_breaks,)+
                    $(Self::$thread_bug => $thread_breaks,)+
                }
            }
        }
    };
}

bugs! {
    /// `cache/writer.rs`: a second change at one version counts as a repeat of the first. Its
    /// object stays as it was. Needs: several changes at one version.
    SecondOfVersionDropped = "second-of-version-dropped" breaks "Reliable, Convergent, Filtered, Atomic",

    /// `upstream/reflector/state.rs`: a watch starts again from the last version, although more
    /// events of that version may come. Needs: several changes at one version, and a watch that
    /// breaks between them.
    ResumedWithinVersion = "resumed-within-version" breaks "Reliable, Convergent, Filtered, Atomic",

    /// `cache/conflated.rs`: conflated history records creates and deletes, but no label changes.
    /// After a catch-up an object stays in a selection that it has left. Needs: a small ring, a
    /// selector whose members leave, a start or a lag older than the ring.
    LeaveForgotten = "leave-forgotten" breaks "Filtered, Convergent, Reliable",

    /// `cache/conflated.rs`: conflated history does not record deletes. After a catch-up, deleted
    /// objects remain. Needs: a small ring, deletes, a start or a lag older than the ring.
    TombstoneForgotten = "tombstone-forgotten" breaks "Convergent, Filtered",

    /// `cache/conflated.rs`: the floor stays the same when changes are evicted, so a catch-up
    /// starts from a version whose history is incomplete. Needs: small conflated history, a start
    /// older than it.
    ConflatedFloorStays = "conflated-floor-stays" breaks "Resumable, Filtered, Reliable, Convergent",

    /// `cache/conflated.rs`: a gap that the ring evicts is not recorded. A start inside it (at a
    /// version of a replica that saw those events) is caught up although the state there is not
    /// known. Needs: a relist on one replica only, a small ring.
    GapForgotten = "gap-forgotten" breaks "Resumable, Filtered, Reliable, Convergent",

    /// `fanout/subscribe/catch_up.rs`: a catch-up uses the state before the newest change of an
    /// object and not before the oldest. Needs: a selector whose members leave and return (or the
    /// other way round) in history older than the ring.
    NewestChangeCounts = "newest-change-counts" breaks "Filtered, Reliable, Convergent",

    /// `cache/gap.rs`: a view sends the events of the gap that all views share, as changes, also if
    /// its selection does not see them. Needs: a relist with changes, a selector.
    GapNotFiltered = "gap-not-filtered" breaks "Filtered, Reliable, Convergent, Unique",

    /// `cache/ring.rs`: a start inside a gap gets the difference found by the relist, which is
    /// correct only from the start of the gap. Needs: a relist on one replica only, a start with
    /// another replica's version inside the gap.
    GapEnteredInside = "gap-entered-inside" breaks "Ordered, Resumable",

    /// `cache/writer.rs`: a relist does not detect deletes. Needs: a delete while the upstream
    /// watch is down, and a relist.
    RelistForgetsDeletes = "relist-forgets-deletes" breaks "Convergent, Reliable",

    /// `cache/writer.rs`: an upstream event at or below the current version is applied and sent.
    /// Needs: repeated or reordered upstream events.
    OutOfOrderPassedOn = "out-of-order-passed-on" breaks "Unique, Ordered, Reliable",

    /// `fanout/hub/core.rs`: when upstream's versions go back, a new history starts, but the
    /// streams of the old one continue in it. Needs: an apiserver restored to an older state.
    RewoundSilently = "rewound-silently" breaks "Ordered, Unique, Reliable, Atomic, Convergent",

    /// `fanout/subscribe/start_point.rs`: after a backfill, the log is read from the start of the
    /// cache's history and not from the end of the backfill. Events in both are sent twice. Needs:
    /// a restart, and changes at that moment.
    SpliceDoubles = "splice-doubles" breaks "Unique, Ordered",

    /// `fanout/subscribe/start_point.rs`: a lagging subscriber is caught up from the oldest cached
    /// version and not from the last one sent to it. Needs: a slow subscriber with `on_lag:
    /// CONFLATE`, a small ring.
    LaggingFromFloor = "lagging-from-floor" breaks "Reliable, Convergent",

    /// `fanout/views/view.rs`: a compressed snapshot is reused, but followed by the events after
    /// now and not after its own version. Needs: zstd, two subscribers that start within a second,
    /// a change in between.
    SnapshotSpliceDrops = "snapshot-splice-drops" breaks "Reliable, Bookmarkable, Convergent",

    /// `fanout/views/view.rs`: a view that was created by a late subscriber does not load the older
    /// history that a resuming subscriber needs. Needs: two equal subscriptions, the second
    /// resuming from before the first one's start.
    LateViewWithoutHistory = "late-view-without-history" breaks "Reliable, Bookmarkable, Resumable, Convergent",

    /// `fanout/views/view.rs`: a view loads all of the ring's history in front of its own log,
    /// including events that it already has. Needs: the same as `LateViewWithoutHistory`, and
    /// events in between.
    HistoryTwice = "history-twice" breaks "Unique, Ordered, Reliable",

    /// `fanout/views/index.rs`: views are looked up by the current object only and not by the
    /// previous one. A view that the object leaves gets no event. Needs: equality selectors whose
    /// members leave, live.
    IndexIgnoresPrevious = "index-ignores-previous" breaks "Filtered, Reliable, Bookmarkable, Convergent",

    /// `fanout/subscribe/catch_up.rs`: events inside a catch-up have a resume version, although
    /// they are not sorted by version. Needs: a connection cut inside a catch-up.
    ResumeInsideCatchUp = "resume-inside-catch-up" breaks "Atomic, Resumable, Bookmarkable",

    /// `fanout/subscribe/catch_up.rs`: an object that was deleted and created again under the same
    /// name is sent as added, without a delete. Needs: such objects, a start or a lag older than
    /// the ring.
    RemadeWithoutDelete = "remade-without-delete" breaks "Filtered, Reliable",

    /// `fanout/send/encoder.rs`: events inside a gap have a resume version. Needs: a relist. To do
    /// harm: a connection cut inside the gap, and a resume at another replica.
    ResumeInsideGap = "resume-inside-gap" breaks "Atomic, Resumable, Ordered",

    /// `fanout/send/encoder.rs`: views share the delta of an event although the object leaves one
    /// view (delta to its old state) and stays in another (delta to its new state). The bytes are
    /// wrong, and no checksum detects it. Needs: deltas, two views of one format, an object that
    /// leaves only one of them.
    LeaveDeltaShared = "leave-delta-shared" breaks "Reliable, Convergent",

    /// `fanout/subscribe/subscription.rs`: a client that resumes without its objects is sent deltas
    /// at once. It cannot decode them, and gets the same ones when it resumes again. Needs: deltas,
    /// a resume without `state_kept`.
    DeltasWithoutBases = "deltas-without-bases" breaks "Reliable, Resumable, Convergent",

    /// `fanout/subscribe/backlog.rs`: a backfill without the previous state makes a delta from the
    /// new object itself, a base that the client does not have. Needs: deltas, a selection of
    /// everything, a restart, a resume with `state_kept`.
    DeltaOnWrongBase = "delta-on-wrong-base" breaks "Reliable, Resumable, Convergent",

    /// `fanout/subscribe/backlog.rs`: the resume version at the end of a snapshot is the newest
    /// version and not the snapshot's. Needs: a snapshot sent in several parts (a slow subscriber),
    /// and changes meanwhile. To do harm: a cut right after it.
    SnapshotEndsAtHead = "snapshot-ends-at-head" breaks "Bookmarkable, Resumable",

    /// `fanout/subscribe/subscription.rs`: a lagging subscriber that has received part of a gap is
    /// caught up from the version before the gap, although it is no longer in that state. Needs: a
    /// large gap, a subscriber that stalls inside it until the ring has evicted it. Rare.
    LaggingInsideGap = "lagging-inside-gap" breaks "Convergent, Reliable",

    /// `fanout/views/shared_snapshot.rs`: a chunk of a compressed snapshot is reused if its first
    /// key, last key and length are unchanged, even if objects in it have changed. Needs: zstd,
    /// starts more than a second and less than a minute apart, a change in between.
    StaleChunk = "stale-chunk" breaks "Reliable, Filtered, Convergent, Bookmarkable",

    /// `server/reader.rs`: a backfill is requested without the previous state, even if the
    /// selector's members change. Leaves are then missing, and objects that enter are sent as
    /// modified. Needs: a restart, a selector whose members changed during the outage.
    BackfillWithoutMembership = "backfill-without-membership" breaks "Filtered, Reliable, Bookmarkable, Convergent",

    /// `informers/backfiller.rs`: the last event before the start of the cache ends the backfill,
    /// but is left out of it. Needs: a restart, and changes at that moment.
    SpliceDrops = "splice-drops" breaks "Bookmarkable, Reliable, Convergent",

    /// `model/selector/label.rs`: `a!=b` and `a notin (b)` require the label to exist. Needs: such
    /// a selector, objects without the label.
    NotInWantsLabel = "not-in-wants-label" breaks "Reliable, Filtered",

    /// `server/kube/route.rs`: a consistent read over HTTP is answered without a freshness
    /// proof. Needs: a write just before it, or a replica that is behind.
    ConsistentIsCached = "consistent-is-cached" breaks "Reliable",

    /// `server/kube/route.rs`: `NotOlderThan` is answered with any state. Needs: a program
    /// that turns to a replica which is behind.
    NotOlderThanIsAny = "not-older-than-is-any" breaks "Reliable, Ordered",

    /// `server/kube/route.rs`: a list at exactly one version is answered with the newest state.
    /// Needs: such a list, and a change since.
    ExactIsNewest = "exact-is-newest" breaks "Reliable",

    /// `server/kube/read_loop.rs`: later pages of a list are cut from the newest state and not from
    /// that of the first page. Needs: a list in pages, and a change in between.
    PagesOfTheNewestState = "pages-of-the-newest-state" breaks "Reliable, Filtered",

    /// `server/kube/list.rs`: the number of objects after a page includes the page. Needs: a list
    /// in pages, without selectors.
    RemainingCountsThePage = "remaining-counts-the-page" breaks "Reliable",

    /// `kubefan_model::selection`: the shard of a selection is ignored. Needs: a program that reads
    /// a shard.
    ShardIsIgnored = "shard-is-ignored" breaks "Filtered",

    /// `server/kube/watch.rs`: a watch over HTTP from a version that the cache has not reached
    /// starts at the cache's version, and sends events that the client has, or ends with 410.
    /// Needs: a replica that is behind, and a watch with the version of another one.
    AheadIsNow = "ahead-is-now" breaks "Unique, Ordered, Reliable, Resumable, Filtered",

    /// `fanout/views/view.rs`: a gap does not end the watches over HTTP, which have no marks for
    /// it. Needs: a relist that finds changes, and watches over HTTP.
    GapPassesInSilence = "gap-passes-in-silence" breaks "Reliable, Bookmarkable, Resumable, Convergent, Ordered",

    /// `fanout/subscribe/try_subscribe.rs`: a watch over HTTP resumes with a catch-up, which it
    /// cannot mark. Needs: a small ring, and a watch from a version that it has evicted.
    UnmarkedCatchUp = "unmarked-catch-up" breaks "Reliable, Ordered, Unique, Filtered, Atomic, Resumable, Bookmarkable",

    /// `fanout/send/encoder.rs`: an object that left a selector is sent at its own version and not
    /// at that of the event. Needs: a watch over HTTP with a selector whose members leave.
    LeaveAtOwnVersion = "leave-at-own-version" breaks "Reliable, Ordered, Unique, Atomic",

    /// `fanout/send/encoder.rs`: with `only_changes` an object that enters a selector is not sent
    /// if its projection did not change. Needs: that, and members that enter.
    EnterIsNoChange = "enter-is-no-change" breaks "Reliable, Bookmarkable, Resumable, Filtered, Convergent",

    /// `fanout/send/encoder.rs`: the projected bytes of a snapshot's object are reused after the
    /// object has changed. Needs: a projection, and two snapshots with a change in between.
    ProjectedByKey = "projected-by-key" breaks "Reliable, Convergent",

    /// `fanout/send/encoder.rs`: with `only_changes` a delta is made from a state that was not
    /// sent. Its bytes are those of the last state that was sent, but its version names another
    /// one. Harmless unless the base has changed before the start. Needs: deltas, a resume without
    /// state.
    DeltaOnUnsentBase = "delta-on-unsent-base" breaks "Reliable, Resumable, Convergent",

    /// `cache/history.rs`: records that the ring evicts while memory is short do not enter the
    /// conflated history. Needs: short memory, and a start or a lag older than the ring.
    ShedForgetsHistory = "shed-forgets-history" breaks "Convergent, Filtered, Reliable",

    /// `model/object/protobuf_metadata.rs`: a label with an empty value is not read. Needs:
    /// protobuf, and a selector that asks whether such a label exists.
    EmptyLabelIsNone = "empty-label-is-none" breaks "Filtered, Reliable",

    /// `model/projection.rs`: the last applied configuration is sent although it was to be dropped.
    /// Needs: such a projection.
    LastAppliedStays = "last-applied-stays" breaks "Reliable, Convergent",

    /// `fanout/subscribe/start_point.rs`: the initial events of a proved state have no end. Needs:
    /// a consistent watch over HTTP that starts with the state, and a quiet cache.
    ProvedStateNeverEnds = "proved-state-never-ends" breaks "Reliable, Convergent, Bookmarkable",

    /// `peer/decode.rs`: a restored ring claims the versions of the conflated history before it.
    /// Needs: a warm start, a small ring, a start older than it.
    RestoredRingTooDeep = "restored-ring-too-deep" breaks "Resumable, Reliable, Filtered, Convergent",

    /// `fanout/views/view_gap.rs`: where a gap is sent in parts, the first event of each further
    /// part is left out. Needs: a large gap.
    GapPartOmits = "gap-part-omits" breaks "Reliable, Filtered, Convergent",

    /// `informers/consistency.rs`: a short watch that returned events counts as empty from its
    /// start, so the cache advances over events that it does not have yet. Needs: a proof with a
    /// bookmark while events are on their way, a cache whose own watch lags.
    ProofForgetsEvents = "proof-forgets-events" breaks "Bookmarkable, Reliable, Resumable",

    /// `informers/consistency.rs`: after a proof that failed or needed a watch, the next one starts
    /// after 25 ms instead of a second. Needs: a crowd of readers while proofs fail.
    FailedProofsInARow = "failed-proofs-in-a-row" breaks "Bounded",

    /// `informers/state_comparison.rs`: a cache equals a list of metadata if one is the start of
    /// the other. Needs: a consistent read while the last objects by key are on their way, or
    /// deleted.
    EqualSoFar = "equal-so-far" breaks "Reliable",

    /// `informers/version_lookup.rs`: any earlier look-up of the cluster's version answers a
    /// reader. Needs: two readers that name versions ahead of the cache, with writes in between.
    OldLookUpCounts = "old-look-up-counts" breaks "Resumable, Ordered",

    /// `server/kube/pages.rs`: a page is cut from the snapshot of another cache at the version.
    /// Needs: two caches of a resource, at the same version and epoch.
    PagesOfAnotherCache = "pages-of-another-cache" breaks "Reliable, Atomic",

    /// `server/reader.rs`: a backfill with `only_changes` is requested without the previous state,
    /// so it sends changes of fields that the projection leaves out. Needs: `only_changes`, a
    /// selection of everything, a restart.
    BackfillSendsUnchanged = "backfill-sends-unchanged" breaks "Filtered",

    /// `cache/writer.rs`: the new schema counts as read before the cache has the new bytes. Needs:
    /// a schema change, a peer that starts warm before the next version.
    EncodingNotAwaited = "encoding-not-awaited" breaks "Convergent, Reliable",

    /// `informers/informer.rs`: a list for a new schema that failed is not repeated. Needs: that.
    RereadGivenUp = "reread-given-up" breaks "Convergent",

    /// `cache/writer.rs`: an object that changes at the version at which its new bytes are sent is
    /// sent twice. Needs: a schema change, and then a change of a listed object.
    ReencodedTwice = "reencoded-twice" breaks "Unique, Reliable, Convergent, Ordered",

    /// `cache/writer.rs`: a list does not discard the new bytes of an earlier list at the same
    /// version, which replace those of the list. Needs: a schema change, and a list before the next
    /// version.
    OldEncodingReturns = "old-encoding-returns" breaks "Convergent, Reliable",

    /// `fanout/views/view_gap.rs`: a gap ends a watch over HTTP only if the selection sees a
    /// difference, as if no event could be missing otherwise. Needs: a relist, a watch over HTTP.
    EmptyGapPasses = "empty-gap-passes" breaks "Reliable, Resumable, Bookmarkable",

    /// `cache/gap.rs`: a gap is indexed by its new objects only. Leaves of an equality selector are
    /// not sent. Needs: a relist that finds 64 changes, members that left.
    GapIndexIgnoresPrevious = "gap-index-ignores-previous" breaks "Filtered, Reliable, Convergent",

    /// `upstream/client/identity_check.rs`: the last check of the cluster's identity confirms any
    /// answer, however old it is. Needs: another cluster behind the address.
    OldCheckConfirms = "old-check-confirms" breaks "Reliable, Ordered, Unique, Convergent, Resumable, Bookmarkable",

    /// `upstream/reflector.rs`: a watch after a broken watch does not ask for the cluster's
    /// version. Needs: a restore from a backup that also breaks the watch.
    BrokenWatchTrusted = "broken-watch-trusted" breaks "Convergent, Reliable, Ordered, Bookmarkable",

    /// `admission/fair_share.rs`: a permit that is given back while the limit is lowered stays
    /// taken. Needs: short memory, snapshots under way.
    WithheldPermitsLost = "withheld-permits-lost" breaks "Convergent, Resumable",

    /// `informers/memory_pressure.rs`: the end of the pressure takes no effect. Needs: short
    /// memory.
    PressureStays = "pressure-stays" breaks "Convergent, Resumable",

    /// `informers/informer/informer_state.rs`: an informer keeps its permit of the scheduler of
    /// lists while it waits after a failure. Needs: as many failing caches as there are permits.
    BackoffKeepsThePermit = "backoff-keeps-the-permit" breaks "Convergent, Resumable",

    /// `informers/retry.rs`: the apiserver's `Retry-After` is ignored. Needs: an overloaded
    /// apiserver.
    RetryAfterIgnored = "retry-after-ignored" breaks "Bounded",

    /// `fanout/views/plain_position.rs`: the range of a gzip body's checksum goes on over a part of
    /// the log that was not taken, or into another run. Needs: readers of one form that share
    /// segments, and one that reads older ones in between.
    GzipRangeJumps = "gzip-range-jumps" breaks "Reliable",

    /// `fanout/subscribe/subscription.rs`: the checksum of a gzip body does not count the ERROR
    /// event at its end. Needs: a watch in gzip that ends with 410.
    GzipErrorNotCounted = "gzip-error-not-counted" breaks "Reliable",

    in patches:

    /// `fanout/subscribe/subscription.rs` (and the check before it in
    /// `server/transport/http2/watch_stream.rs`): a periodic bookmark has the newest version even
    /// if older events are still to be sent. Needs: a subscriber so slow that its stream waits for
    /// flow control when the bookmark is due.
    EarlyBookmark = "early-bookmark" breaks "Bookmarkable, Resumable",

    /// `client/grpc/watch.rs`: where the server sends no resume version, the client resumes from
    /// the version of an object. Needs: a connection cut inside a snapshot.
    ClientKeepsObjectVersion = "client-keeps-object-version" breaks "Atomic, Resumable, Convergent",

    /// `client/reflector/reflector_run.rs`: inside a batch the version moves to that of each
    /// object. Needs: a gap or a catch-up, and a reader inside it.
    BatchMovesVersion = "batch-moves-version" breaks "Bookmarkable, Atomic",

    /// `client/reflector/reflector_run.rs`: the events of a batch that breaks off are applied.
    /// Needs: a connection cut inside a gap or a catch-up.
    BrokenBatchApplied = "broken-batch-applied" breaks "Atomic, Reliable, Unique",

    /// `client/reflector/reflector_run.rs`: the objects of a snapshot are stored as they arrive,
    /// not at its end. Needs: a snapshot that takes time or breaks off.
    SnapshotShownEarly = "snapshot-shown-early" breaks "Atomic, Reliable, Unique",

    /// `client/reflector/reflector_run.rs`: an expired version stays the one to watch from. Needs:
    /// a version that is too old for the server, and no restart in the stream.
    ExpiredVersionStays = "expired-version-stays" breaks "Resumable, Convergent",

    /// `client/reflector/reflector_run.rs`: bookmarks do not move the version. Needs: a quiet
    /// selection.
    BookmarksIgnored = "bookmarks-ignored" breaks "Bookmarkable",

    /// `client/reflector/reflector_run.rs`: after a continue token has expired, the objects of the
    /// earlier pages stay in the list. Needs: a list in pages whose token expires.
    PagesOfTwoLists = "pages-of-two-lists" breaks "Unique, Ordered, Reliable, Atomic",

    /// `client/queue/real_fifo.rs`: a complete state does not imply the deletion of objects that
    /// the consumer has already processed. Needs: a delete while the informer is away, and a new
    /// list or snapshot.
    ReplaceForgetsDeletes = "replace-forgets-deletes" breaks "Reliable, Convergent",

    /// `client/informer/process.rs`: a late handler does not get the objects that exist. Needs: a
    /// handler that is added after the first list.
    LateHandlerStartsEmpty = "late-handler-starts-empty" breaks "Reliable, Convergent",

    /// `client/informer/process.rs`: an object that was deleted without a final state stays in the
    /// store. Needs: a delete inside a gap, a catch-up, or before a new list or snapshot.
    UnknownDeletionIgnored = "unknown-deletion-ignored" breaks "Reliable, Convergent",

    /// `client/informer/process.rs`: the deletions of a batch are applied after its additions.
    /// Needs: an object that was deleted and created again inside a gap or a catch-up.
    DeletionsLast = "deletions-last" breaks "Unique, Reliable, Convergent",

    /// `client/informer/backlog.rs`: two merged updates keep the newer of the two old states.
    /// Needs: a slow handler.
    NewestOldStateStays = "newest-old-state-stays" breaks "Reliable",

    /// `client/informer/backlog.rs`: a deletion and an addition of the same key cancel each other.
    /// Needs: a slow handler, and objects that return under their names.
    ReturnCancelsDeletion = "return-cancels-deletion" breaks "Reliable, Convergent",

    /// `client/store/indexer.rs`: a changed object stays under the values that it no longer has.
    /// Needs: an index whose values change.
    IndexKeepsOldValues = "index-keeps-old-values" breaks "Reliable",

    /// `client/http/watch_events.rs`: the bookmark that ends the initial events is taken for an
    /// ordinary one. Needs: a watch over HTTP that starts with the state.
    InitialEventsNeverEnd = "initial-events-never-end" breaks "Reliable, Convergent",

    /// `fanout/send/encoder.rs`: the bytes made of an event are used for another one of the same
    /// version. Needs: a projection, and a schema change or a delete inside a gap.
    RecalledByVersion = "recalled-by-version" breaks "Convergent, Reliable, Unique",

    /// `fanout/views/segments.rs`: the first event for which a view has enough readers to compress
    /// is replaced by the next one. Needs: a view whose readers become so many, and several events
    /// at once.
    CrowdStartRepeats = "crowd-start-repeats" breaks "Reliable, Unique, Ordered, Convergent",

    /// `client/fallback/follow.rs`: events of the apiserver do not move the version, so kubefan
    /// sends them again. Needs: a fallback with events, and a return.
    FallbackVersionStays = "fallback-version-stays" breaks "Unique, Ordered",

    /// `client/fallback/follow.rs`: on return the watch of kubefan goes on that was started before
    /// the last events of the apiserver. Needs: events while kubefan is asked again.
    ReturnFromOldVersion = "return-from-old-version" breaks "Unique, Ordered, Reliable",

    /// `client/fallback/follow.rs`: the event that shows that kubefan is back is dropped, also if
    /// its watch goes on. Needs: an outage that ends before the apiserver has sent anything.
    ReturnLosesEvent = "return-loses-event" breaks "Reliable, Convergent, Atomic, Unique",

    /// `client/fallback/follow.rs`: the fallback watches from any version, and not from the last
    /// one. Needs: a fallback with a state.
    FallbackFromAnyVersion = "fallback-from-any-version" breaks "Unique, Ordered, Reliable, Bookmarkable, Convergent",

    among threads:

    /// `fanout/hub/core.rs`: the newest version is published before the views' logs contain the
    /// event.
    HeadBeforeAppend = "head-before-append" breaks "Bookmarkable",

    /// `fanout/subscribe/try_subscribe.rs`: a subscription gets its position in one critical
    /// section, and its view is registered in another.
    SubscribedInTwoSections = "subscribed-in-two-sections" breaks "Reliable",

    /// `fanout/views/view_gap.rs`: a watch over HTTP continues after objects that it selects got
    /// other bytes without an event. Needs: a schema change while the upstream watch is whole, a
    /// watch over HTTP.
    ReencodedPasses = "reencoded-passes" breaks "Reliable, Convergent",

    /// `fanout/views/view_set.rs`: watches over HTTP are not woken for a gap, which ends them.
    EndNotAnnounced = "end-not-announced" breaks "a wake-up is lost",

    /// `fanout/hub/core.rs`: waiting streams are woken before the end of the stream is set.
    WokenBeforeTheEnd = "woken-before-the-end" breaks "a wake-up is lost",

    /// `fanout/views/view.rs`: the stream's waker is armed after the log was read, outside of the
    /// log's lock.
    ArmedAfterTheRead = "armed-after-the-read" breaks "a wake-up is lost",

    /// `fanout/wake/waker.rs`: a stream's waker is disarmed once more after it woke the stream. It
    /// may have been armed again in between.
    DisarmedAfterTheWakeUp = "disarmed-after-the-wake-up" breaks "a wake-up is lost",

    /// `fanout/wake/waker.rs`: a connection is woken before its list of ready streams contains the
    /// stream.
    WokenBeforeReady = "woken-before-ready" breaks "a wake-up is lost",

    /// `fanout/wake/waker.rs`: a stream's waker is tested and disarmed in two steps, so two threads
    /// may wake the stream for one event.
    WokenTwice = "woken-twice" breaks "a wake-up is spurious",
}
