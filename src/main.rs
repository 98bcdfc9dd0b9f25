//! The kubefan binary.

fn main() {}
