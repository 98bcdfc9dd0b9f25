//! Generates the Rust code of `proto/`. All of it is in `tests/generated.rs`, because only a test
//! needs a protobuf compiler.
