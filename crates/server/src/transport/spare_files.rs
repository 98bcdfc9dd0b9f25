//! File descriptors that a listener holds in reserve.
//!
//! A process that has used up its descriptors cannot even accept a connection to close it, so its
//! clients wait without an answer. A listener that holds some can give them up at that moment.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

/// Descriptors in reserve. They are copies of the listener's own.
pub(super) struct SpareFiles {
    files: Vec<OwnedFd>,
    files_max: usize,
}

impl SpareFiles {
    /// Takes this many copies of a descriptor, or as many as there are.
    pub(super) fn new(of: BorrowedFd<'_>, files_max: usize) -> Self {
        let mut spares = Self { files: Vec::with_capacity(files_max), files_max };
        spares.refill(of);
        spares
    }

    /// Whether all were given up.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether none is given up.
    pub(super) fn is_full(&self) -> bool {
        self.files.len() == self.files_max
    }

    /// Gives up one. Returns false if there is none.
    pub(super) fn release(&mut self) -> bool {
        self.files.pop().is_some()
    }

    /// Takes back the descriptors that were given up, as far as descriptors are free.
    pub(super) fn refill(&mut self, of: BorrowedFd<'_>) {
        while self.files.len() < self.files_max
            && let Ok(file) = of.try_clone_to_owned()
        {
            self.files.push(file);
        }
    }
}

/// Whether the process or the system has no descriptor left.
pub(super) fn is_out_of_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    error.raw_os_error().map(Errno::from_raw_os_error).is_some_and(|error| matches!(error, Errno::MFILE | Errno::NFILE))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn released_descriptors_are_taken_again() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut spares = SpareFiles::new(listener.as_fd(), 2);
        assert!(spares.release() && !spares.is_empty());
        assert!(spares.release() && spares.is_empty());
        assert!(!spares.release());
        spares.refill(listener.as_fd());
        assert!(spares.release() && spares.release());
    }

    #[test]
    fn only_a_lack_of_descriptors_is_answered_by_giving_some_up() {
        for (error, is) in [(24, true), (23, true), (98, false), (104, false)] {
            assert_eq!(is_out_of_files(&io::Error::from_raw_os_error(error)), is, "{error}");
        }
        assert!(!is_out_of_files(&io::Error::other("no number")));
    }
}
