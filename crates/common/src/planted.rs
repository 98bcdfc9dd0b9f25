//! Deliberate bugs that tests switch on, to prove that their oracle detects each of them. An oracle
//! that has never failed proves nothing.
//!
//! Each is a bug that a reviewer could overlook, is in the code at `Bug::<name>`, and breaks one of
//! the guarantees in `docs/architecture.md`. They do not crash or hang the process. They are
//! compiled in only if the environment variable `KUBEFAN_PLANTED_BUGS` is set for the build
//! (`cfg(planted_bugs)`). Otherwise [`is`] is constantly false and the compiler removes them. At
//! most one bug is active per thread, chosen with `plant` or with the environment variable
//! `KUBEFAN_PLANTED_BUG`: a simulated world runs on one thread, and each core has another one.
//!
//! A bug is one expression at its site. A bug that needs more, and every bug of the client library,
//! is in a patch of `tests/simulation/planted`, so that it does not burden the code.

mod bugs;

pub use bugs::Bug;

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

/// Whether this bug is planted.
#[cfg(not(planted_bugs))]
#[inline(always)]
pub const fn is(_: Bug) -> bool {
    false
}

#[cfg(planted_bugs)]
pub use chosen::{is, plant};

#[cfg(planted_bugs)]
mod chosen {
    use std::{cell::Cell, env};

    use super::Bug;

    /// The planted bug of a thread.
    #[derive(Clone, Copy)]
    enum Chosen {
        /// Not chosen yet: the environment variable decides.
        FromEnvironment,
        /// This bug, or none.
        Bug(Option<Bug>),
    }

    thread_local! {
        static CHOSEN: Cell<Chosen> = const { Cell::new(Chosen::FromEnvironment) };
    }

    /// Whether this bug is planted on this thread.
    pub fn is(bug: Bug) -> bool {
        match CHOSEN.get() {
            Chosen::FromEnvironment => {
                plant(from_environment());
                is(bug)
            }
            Chosen::Bug(chosen) => chosen == Some(bug),
        }
    }

    /// Plants a bug on this thread, in place of the current one. `None` removes it.
    pub fn plant(bug: Option<Bug>) {
        CHOSEN.set(Chosen::Bug(bug));
    }

    /// # Panics
    ///
    /// If there is no bug of that name: a test must not pass because its bug was not planted.
    fn from_environment() -> Option<Bug> {
        let name = env::var("KUBEFAN_PLANTED_BUG").ok().filter(|name| !name.is_empty() && name != "none")?;
        let found = Bug::ALL.iter().chain(Bug::AMONG_THREADS).copied().find(|bug| bug.name() == name);
        assert!(found.is_some(), "KUBEFAN_PLANTED_BUG={name} is not a bug in crate::planted::Bug");
        found
    }
}
