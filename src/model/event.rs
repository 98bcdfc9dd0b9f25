//! What happened to an object.
