//! The `kubefan` program: the proxy, and the commands that use it. With the feature `sim` also the
//! benchmark and the demo.

mod cli;

use std::process::ExitCode;

/// Caches hold many small, long-lived objects, which other threads free. jemalloc fragments less
/// under this load than the system's allocator.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    cli::main(std::env::args_os())
}
