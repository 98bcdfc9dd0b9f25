//! Mistakes that tests plant, to show that their oracle finds each: a check that was never seen to fail proves nothing.
//!
//! Each is one that a reviewer could overlook, in one place (found by its name), and breaks one of the guarantees that
//! `docs/ARCHITECTURE.md` names. None crashes or hangs the process. They exist only where the environment variable
//! `KUBEFAN_PLANTED_BUGS` was set for the build (`cfg(planted_bugs)`); else [`is`] is constantly false and the compiler removes every
//! trace. One at a time is chosen for the whole process, by `plant` or by the variable `KUBEFAN_PLANTED_BUG`.

macro_rules! bugs {
    (
        $($(#[doc = $doc:literal])+ $bug:ident = $name:literal breaks $breaks:literal,)+
        among threads:
        $($(#[doc = $thread_doc:literal])+ $thread_bug:ident = $thread_name:literal breaks $thread_breaks:literal,)+
    ) => {
        /// What can be planted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Bug {
            $($(#[doc = $doc])+ $bug,)+
            $($(#[doc = $thread_doc])+ $thread_bug,)+
        }

        #[cfg(planted_bugs)]
        impl Bug {
            /// All that can do harm in ordinary operation under faults, on one thread too.
            pub const ALL: &[Self] = &[$(Self::$bug,)+];

            /// Those that need two threads at once, at a moment that is hard to hit.
            pub const AMONG_THREADS: &[Self] = &[$(Self::$thread_bug,)+];

            /// The name by which it is chosen.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$bug => $name,)+
                    $(Self::$thread_bug => $thread_name,)+
                }
            }

            /// The guarantees that it breaks, separated by commas; one that is found under another name is not understood.
            pub fn breaks(self) -> &'static str {
                match self {
                    $(Self::$bug => $breaks,)+
                    $(Self::$thread_bug => $thread_breaks,)+
                }
            }
        }
    };
}

bugs! {
    /// `cache/residue.rs`: only makes and deletes are remembered of what the ring forgot, not that labels changed. After a catch-up a
    /// selector keeps what has left it. Needs: a small ring, a selector whose members leave, a start or a lag below the ring.
    LeaveForgotten = "leave-forgotten" breaks "Filtered, Convergent, Reliable",

    /// `cache/residue.rs`: deletes are not remembered of what the ring forgot. After a catch-up what was deleted meanwhile stays. Needs: a
    /// small ring, deletes, a start or a lag below the ring.
    TombstoneForgotten = "tombstone-forgotten" breaks "Convergent, Filtered",

    /// `cache/residue.rs`: the floor stays when changes fall out, so a catch-up is served from a version of which too little is known.
    /// Needs: a small residue, a start from before what it holds.
    ResidueFloorStays = "residue-floor-stays" breaks "Resumable, Filtered, Reliable, Convergent",

    /// `cache/residue.rs`: of a gap that the ring forgot it is not remembered that nothing is exact inside. A start in there (from a replica
    /// that saw those events) is caught up as if it had seen nothing of the gap. Needs: a relist on one replica only, a small ring.
    GapForgotten = "gap-forgotten" breaks "Resumable, Filtered, Reliable, Convergent",

    /// `cache/residue.rs`: the catch-up is told what was there before the newest change, not before the oldest. Needs: a selector whose
    /// members leave and come back (or the other way round) below the ring.
    NewestChangeCounts = "newest-change-counts" breaks "Filtered, Reliable, Convergent",

    /// `cache/ring.rs`: a start inside a gap is served with the relist's difference, which leads on from the gap's beginning only. Needs: a
    /// relist on one replica only, a start there with a version that another replica gave.
    GapEnteredInside = "gap-entered-inside" breaks "Ordered, Resumable",

    /// `cache/writer.rs`: a relist's difference tells no deletes. Needs: a delete while the watch was down, and a relist.
    RelistForgetsDeletes = "relist-forgets-deletes" breaks "Convergent, Reliable",

    /// `cache/writer.rs`: an upstream event at or below the version reached is applied and passed on. Needs: upstream events repeated or out
    /// of order.
    OutOfOrderPassedOn = "out-of-order-passed-on" breaks "Unique, Ordered, Reliable",

    /// `fanout/hub.rs`: versions that went back upstream start a new history, but the streams of the old one go on in it. Needs: an
    /// apiserver set back to an older state.
    RewoundSilently = "rewound-silently" breaks "Ordered, Unique, Reliable, Atomic, Convergent",

    /// `fanout/hub.rs`: after a backfill the log is read from where the cache began, not from where the backfill ended: an event that is in
    /// both comes twice. Needs: a restart, and changes just then.
    SpliceDoubles = "splice-doubles" breaks "Unique, Ordered",

    /// `fanout/hub.rs`: a laggard is caught up from the oldest version that is held, not from the last that it was sent. Needs: a slow
    /// subscriber with `on_lag: CONFLATE`, a small ring.
    LaggardFromFloor = "laggard-from-floor" breaks "Reliable, Convergent",

    /// `fanout/view.rs`: a compressed snapshot of a moment ago is followed by what comes after now. Needs: zstd, two who start within a
    /// second, and a change between.
    SnapshotSpliceDrops = "snapshot-splice-drops" breaks "Reliable, Bookmarkable, Convergent",

    /// `fanout/view.rs`: a view made by someone who started late does not take in the older history when another comes back from before.
    /// Needs: two equal subscriptions, the second a resume below the first one's start.
    LateViewWithoutHistory = "late-view-without-history" breaks "Reliable, Bookmarkable, Resumable, Convergent",

    /// `fanout/view.rs`: a view takes in all of the ring's history in front of its own, also the part that it has. Needs: the same as
    /// `LateViewWithoutHistory`, and events in between.
    HistoryTwice = "history-twice" breaks "Unique, Ordered, Reliable",

    /// `fanout/index.rs`: only what an object is finds views, not what it was: a view found by a term that the object loses is not told that
    /// it leaves. Needs: equality selectors whose members leave, live.
    IndexForgetsWhatWas = "index-forgets-what-was" breaks "Filtered, Reliable, Bookmarkable, Convergent",

    /// `fanout/catch_up.rs`: events inside a catch-up carry their object's version to come back with, although they do not come in the order
    /// of versions. Needs: a connection cut inside a catch-up.
    ResumeInsideCatchUp = "resume-inside-catch-up" breaks "Atomic, Resumable, Bookmarkable",

    /// `fanout/catch_up.rs`: an object deleted and made again under its name is not told as deleted; what was selected before has changed.
    /// Needs: objects made again, a start or a lag below the ring.
    RemadeIsModified = "remade-is-modified" breaks "Filtered, Reliable",

    /// `fanout/encoder.rs`: events inside a gap carry their object's version to come back with. Needs: a relist; a connection cut inside the
    /// gap and a resume elsewhere for the harm itself.
    ResumeInsideGap = "resume-inside-gap" breaks "Atomic, Resumable, Ordered",

    /// `fanout/encoder.rs`: the delta of an object that leaves one view (to its old state) is given to views that it stays in, and the other
    /// way round: wrong bytes that no checksum finds. Needs: deltas, two views of one format, an object that leaves one and stays in the
    /// other.
    LeaveDeltaShared = "leave-delta-shared" breaks "Reliable, Convergent",

    /// `fanout/subscription.rs`: who comes back without having kept anything is sent deltas from the start. The client cannot read them, and
    /// gets the same again when it comes back. Needs: deltas, a resume that says that nothing was kept.
    HoldsAllAfterResume = "holds-all-after-resume" breaks "Reliable, Resumable, Convergent",

    /// `fanout/prelude.rs`: a backfill without the state before it makes deltas from the object itself, a base that nobody holds. Needs:
    /// deltas, a selection of everything, a restart, a client that kept its state.
    DeltaOnWrongBase = "delta-on-wrong-base" breaks "Reliable, Resumable, Convergent",

    /// `fanout/prelude.rs`: the end of a snapshot gives the newest version to come back with, not the snapshot's. Needs: a snapshot that is
    /// sent in more than one turn (a slow subscriber), and changes meanwhile; a cut right after it for the harm itself.
    SnapshotEndsAtHead = "snapshot-ends-at-head" breaks "Bookmarkable, Resumable",

    /// `fanout/subscription.rs` (and the guard before it in `server/stream.rs`): a bookmark at the newest version is sent by the clock,
    /// whatever is still to be sent. Needs: a subscriber so slow that its stream waits for a window at a bookmark's time.
    EarlyBookmark = "early-bookmark" breaks "Bookmarkable, Resumable",

    /// `fanout/subscription.rs`: a laggard that was sent a part of a gap is caught up from the version before the gap, although it is no
    /// longer in that state. Needs: a large gap, a subscriber that stalls inside it until the ring has forgotten it. Rare.
    LaggardInsideGap = "laggard-inside-gap" breaks "Convergent, Reliable",

    /// `fanout/generation.rs`: a chunk of a compressed snapshot is taken over from the one before where its first and last key and its length
    /// are the same, whatever has changed inside. Needs: zstd, starts more than a second and less than a minute apart, a change between.
    StaleChunk = "stale-chunk" breaks "Reliable, Filtered, Convergent",

    /// `server/grpc.rs`: a backfill is asked for without the state before it, also where a selector's members come and go: then leaves are
    /// missing, and enters are changes. Needs: a restart, a selector whose members came and went during the outage.
    BackfillWithoutMembership = "backfill-without-membership" breaks "Filtered, Reliable, Bookmarkable, Convergent",

    /// `app/backfill.rs`: the event that leads up to the cache's beginning ends a backfill and is not put in it. Needs: a restart, and changes
    /// just then.
    SpliceDrops = "splice-drops" breaks "Bookmarkable, Reliable, Convergent",

    /// `client/watch.rs`: the client keeps the version of each object as the one to come back with, where the server gives none. Needs: a
    /// connection cut inside a snapshot.
    ClientKeepsObjectVersion = "client-keeps-object-version" breaks "Atomic, Resumable, Convergent",

    /// `model/selector/label.rs`: `a!=b` and `a notin (b)` want the label to be there. Needs: such a selector, objects without the label.
    NotInWantsLabel = "not-in-wants-label" breaks "Reliable, Filtered",

    among threads:

    /// `fanout/hub.rs`: the head version is published before the views' logs have the event.
    HeadBeforeAppend = "head-before-append" breaks "Bookmarkable",

    /// `fanout/hub.rs`: a subscription's place is found in one critical section and its view registered in another.
    SubscribedInTwoSections = "subscribed-in-two-sections" breaks "Reliable",

    /// `fanout/hub.rs`: who waits is woken before the end is there to be found.
    WokenBeforeTheEnd = "woken-before-the-end" breaks "a wake-up is lost",

    /// `fanout/view.rs`: the bell is armed after the look at the log, outside of its lock.
    ArmedAfterTheLook = "armed-after-the-look" breaks "a wake-up is lost",

    /// `fanout/bell.rs`: a bell is disarmed after it rang, not with it: it may have been armed again by then.
    DisarmedAfterTheRing = "disarmed-after-the-ring" breaks "a wake-up is lost",

    /// `fanout/bell.rs`: a connection is woken before it can see which of its streams rang.
    WokenBeforeTheRing = "woken-before-the-ring" breaks "a wake-up is lost",

    /// `fanout/bell.rs`: whether a bell is armed is looked at in one step and taken back in another, so two may ring it for one time.
    RingsTwice = "rings-twice" breaks "a wake-up is for nothing",
}

/// Runs a statement only if this bug is planted.
#[macro_export]
macro_rules! when_planted {
    ($bug:ident => $statement:expr) => {
        if $crate::planted::is($crate::planted::Bug::$bug) {
            $statement;
        }
    };
}

/// Runs a statement unless this bug, which forgets it, is planted.
#[macro_export]
macro_rules! unless_planted {
    ($bug:ident => $statement:expr) => {
        if !$crate::planted::is($crate::planted::Bug::$bug) {
            $statement;
        }
    };
}

/// Whether this one is planted.
#[cfg(not(planted_bugs))]
#[inline(always)]
pub const fn is(_: Bug) -> bool {
    false
}

#[cfg(planted_bugs)]
pub use chosen::{is, plant};

#[cfg(planted_bugs)]
mod chosen {
    use std::{
        env,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::Bug;

    const NONE: usize = usize::MAX;
    const UNDECIDED: usize = usize::MAX - 1;

    static CHOSEN: AtomicUsize = AtomicUsize::new(UNDECIDED);

    /// Whether this one is planted.
    pub fn is(bug: Bug) -> bool {
        match CHOSEN.load(Ordering::SeqCst) {
            UNDECIDED => {
                plant(by_environment());
                is(bug)
            }
            chosen => chosen == bug as usize,
        }
    }

    /// Plants one in the place of what was planted before.
    pub fn plant(bug: Option<Bug>) {
        CHOSEN.store(bug.map_or(NONE, |bug| bug as usize), Ordering::SeqCst);
    }

    /// # Panics
    /// Where there is none of that name: a test must not run without the bug that it was told to find.
    fn by_environment() -> Option<Bug> {
        let name = env::var("KUBEFAN_PLANTED_BUG").ok().filter(|name| !name.is_empty())?;
        let found = Bug::ALL.iter().chain(Bug::AMONG_THREADS).copied().find(|bug| bug.name() == name);
        assert!(found.is_some(), "KUBEFAN_PLANTED_BUG={name} is none of crate::planted::Bug");
        found
    }
}
