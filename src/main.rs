//! The kubefan binary.

mod cli;

use std::process::ExitCode;

/// Many small objects live long and are freed on other threads; jemalloc keeps their memory denser than the system's allocator.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    cli::main(std::env::args_os())
}
