//! The watch cache: state, history, and the one writer of both.
