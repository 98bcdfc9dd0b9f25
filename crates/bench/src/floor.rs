//! The floor: a process that sends as many bytes as the server over raw TCP with tokio, with one
//! task per connection and one write per wake-up. With a certificate it sends them over TLS with
//! rustls, without HTTP/2. No server on this machine can cost less without giving up its async
//! runtime, its TLS library or the kernel's sockets.
//!
//! The first connection to the process carries orders, without TLS. Each order is a number of
//! additional bytes to send on every other connection, including connections that are accepted
//! later. The process ends when the first connection ends.

use std::{ffi::OsString, io, net::SocketAddr, path::Path, sync::Arc};

use tokio::{
    io::{AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::TlsAcceptor;

use super::{
    BenchError,
    child::ServerProcess,
    tls::{Certificate, acceptor},
};

/// Larger writes are split at this size.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// Text that the process prints before its address.
const MARKER: &str = "kubefan: serving bytes on ";

/// Runs the floor process. With the files of a certificate and its key, every connection but the
/// first uses TLS.
///
/// # Errors
/// If it cannot listen on loopback, or cannot use the files.
pub async fn serve(certificate: Option<(&Path, &Path)>) -> io::Result<()> {
    let tls = certificate.map(|(cert, key)| acceptor(cert, key)).transpose()?;
    let listener = kubefan_server::transport::listen::listen_tcp(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    eprintln!("{MARKER}{}", listener.local_addr()?);
    let (orders, _) = listener.accept().await?;
    let due = watch::Sender::new(0_u64);
    let accepted = due.clone();
    tokio::select! {
        result = accept(listener, accepted, tls) => result,
        () = read_orders(orders, due) => Ok(()),
    }
}

async fn read_orders(mut orders: TcpStream, due: watch::Sender<u64>) {
    while let Ok(more) = orders.read_u64().await {
        due.send_modify(|due| *due += more);
    }
}

async fn accept(listener: TcpListener, due: watch::Sender<u64>, tls: Option<TlsAcceptor>) -> io::Result<()> {
    let bytes: Arc<[u8]> = vec![b'x'; WRITE_BYTES_MAX].into();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let due = due.subscribe();
        let bytes = bytes.clone();
        let tls = tls.clone();
        // A connection that fails is seen by its receiver, which then counts nothing.
        tokio::spawn(async move {
            match tls {
                None => send(stream, due, bytes).await,
                Some(tls) => send(tls.accept(stream).await?, due, bytes).await,
            }
        });
    }
}

async fn send(mut stream: impl AsyncWrite + Unpin, mut due: watch::Receiver<u64>, bytes: Arc<[u8]>) -> io::Result<()> {
    let mut sent = 0;
    loop {
        let now = *due.borrow_and_update();
        while sent < now {
            let count = usize::try_from(now - sent).unwrap_or(WRITE_BYTES_MAX).min(WRITE_BYTES_MAX);
            stream.write_all(&bytes[..count]).await?;
            sent += count as u64;
        }
        stream.flush().await?;
        if due.changed().await.is_err() {
            return Ok(());
        }
    }
}

/// A running floor process, and the connection for orders.
pub(super) struct Floor {
    pub(super) process: ServerProcess,
    orders: TcpStream,
}

impl Floor {
    pub(super) async fn start(program: &Path, certificate: Option<&Certificate>) -> Result<Self, BenchError> {
        let mut args = vec![OsString::from("bench-floor")];
        args.extend(certificate.into_iter().flat_map(Certificate::server_args));
        let process = ServerProcess::start("the floor", program, program, args, MARKER).await?;
        let orders = TcpStream::connect(process.address).await?;
        orders.set_nodelay(true)?;
        Ok(Self { process, orders })
    }

    /// Orders this many additional bytes on every connection.
    pub(super) async fn send(&mut self, bytes: u64) -> io::Result<()> {
        self.orders.write_u64(bytes).await
    }
}
