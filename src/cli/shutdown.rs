//! What ends a command that runs until it is told to.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// Resolves at the first SIGTERM or ctrl-C, whose name it tells; a second ctrl-C ends the process where it stands. Must be called in a
/// tokio runtime.
pub(super) fn shutdown(tell: impl FnOnce(&'static str) + Send) -> io::Result<impl Future<Output = ()> + Send> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tell(tokio::select! {
            _ = interrupt.recv() => "ctrl-C",
            _ = terminate.recv() => "SIGTERM",
        });
        tokio::spawn(async move {
            interrupt.recv().await;
            std::process::exit(130);
        });
    })
}
