//! Signals to a command that runs until it is stopped.

use std::{io, process::exit, thread, time::Duration};

use futures::{Stream, stream};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

/// Time that a command may take to end after a signal.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// A signal that ends a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopSignal {
    /// SIGINT, as of ctrl-C.
    Interrupt,
    /// SIGTERM, as of a kubelet.
    Terminate,
}

impl StopSignal {
    /// The shell's convention: 128 plus the number of the signal.
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Returns a future that resolves at the first SIGTERM or ctrl-C. Must be called in a Tokio
/// runtime.
pub(super) fn stop_signal() -> io::Result<impl Future<Output = StopSignal> + Send> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => StopSignal::Interrupt,
            _ = terminate.recv() => StopSignal::Terminate,
        }
    })
}

/// Ends the process soon after the first SIGTERM or ctrl-C, if it has not ended by itself: its
/// thread may wait for stdin, or for a reader of its output.
pub(super) fn exit_after_signal() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let entered = runtime.enter();
    let signal = stop_signal()?;
    drop(entered);
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let signal = runtime.block_on(async {
            let signal = signal.await;
            sleep(EXIT_TIMEOUT).await;
            signal
        });
        exit(signal.exit_code().into());
    })?;
    Ok(())
}

/// Returns a future that resolves at the first SIGTERM or ctrl-C, after it has passed the signal's
/// name to `announce`. A second ctrl-C ends the process at once with exit code 130. Must be called
/// in a Tokio runtime.
pub(super) fn shutdown(announce: impl FnOnce(&'static str) + Send) -> io::Result<impl Future<Output = ()> + Send> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        announce(tokio::select! {
            _ = interrupt.recv() => "ctrl-C",
            _ = terminate.recv() => "SIGTERM",
        });
        tokio::spawn(async move {
            interrupt.recv().await;
            exit(130);
        });
    })
}

/// Returns a stream with an item for each SIGHUP, which then no longer ends the process. Must be
/// called in a Tokio runtime.
pub(super) fn hangups() -> io::Result<impl Stream<Item = ()> + Send> {
    let hangup = signal(SignalKind::hangup())?;
    Ok(stream::unfold(hangup, async |mut hangup| hangup.recv().await.map(|()| ((), hangup))))
}
