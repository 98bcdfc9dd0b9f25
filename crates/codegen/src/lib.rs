//! Generates the code of `proto/`. All of it is in `tests/`, because only tests need a protobuf
//! compiler.
