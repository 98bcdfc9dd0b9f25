//! Listeners: TCP and Unix sockets behind one type, so that the servers need not distinguish them.

use std::{
    fmt, io,
    net::SocketAddr,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures::Stream;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream},
};
use tonic::transport::server::Connected;

#[cfg(any(target_os = "linux", target_os = "android"))]
use super::limits::UNSENT_BYTES_MAX;
use super::listen_address::ListenAddress;
use crate::server::client_info::ClientInfo;

/// A bound listener.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket; its file is removed when the listener is dropped.
    Unix(UnixListener, PathBuf),
}

/// An address could not be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} ({flag}): {error}{}", hint(.address, .error))]
pub struct BindError {
    address: ListenAddress,
    flag: &'static str,
    error: io::Error,
}

fn hint(address: &ListenAddress, error: &io::Error) -> &'static str {
    use ListenAddress::{Tcp, Unix};
    match (error.kind(), address) {
        (io::ErrorKind::AddrInUse, Tcp(_)) => {
            "; another process uses it, perhaps another kubefan: choose another address, or port 0"
        }
        (io::ErrorKind::AddrInUse, Unix(_)) => {
            "; another process listens there, perhaps another kubefan, or the file is no socket: choose another path"
        }
        (io::ErrorKind::NotFound, Unix(_)) => "; create its directory first",
        (io::ErrorKind::PermissionDenied, Tcp(_)) => "; choose a port above 1023",
        (io::ErrorKind::PermissionDenied, Unix(_)) => "; choose a path in a directory that kubefan may write to",
        _ => "",
    }
}

/// The address that a listener is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bound {
    /// TCP, with the port that the system chose if it was 0.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl Bound {
    /// The port of a TCP address.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(address) => Some(address.port()),
            Self::Unix(_) => None,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Listener {
    /// Binds an address. `flag` is the flag that named it, for the error text. A Unix socket that a
    /// dead process left behind is replaced; one that is in use is not.
    pub async fn bind(address: &ListenAddress, flag: &'static str) -> Result<Self, BindError> {
        let bound = match address {
            ListenAddress::Tcp(address) => listen_tcp(*address).map(Self::Tcp),
            ListenAddress::Unix(path) => bind_unix(path).await.map(|listener| Self::Unix(listener, path.clone())),
        };
        bound.map_err(|error| BindError { address: address.clone(), flag, error })
    }

    /// The address that it is bound to.
    pub fn bound(&self) -> io::Result<Bound> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Bound::Tcp),
            Self::Unix(_, path) => Ok(Bound::Unix(path.clone())),
        }
    }

    async fn accept(&self) -> io::Result<Connection> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Events are small and must not wait for the acknowledgement of the previous one.
                stream.set_nodelay(true)?;
                // A client that vanished must free its place; HTTP/1.1 and tunnels have no PING to
                // detect that.
                SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(TCP_KEEPALIVE))?;
                // Other systems have no such option; there a slow reader fills the kernel's buffer.
                #[cfg(any(target_os = "linux", target_os = "android"))]
                SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
                Ok(Connection::Tcp(stream, address))
            }
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Connection::Unix(stream)),
        }
    }

    /// The accepted connections. A failure to accept, such as too many open files, is logged and
    /// retried after 100 ms, because it must not end the server.
    pub fn incoming(self) -> impl Stream<Item = io::Result<Connection>> {
        futures::stream::unfold(self, |listener| async {
            loop {
                match listener.accept().await {
                    Ok(connection) => return Some((Ok(connection), listener)),
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        })
    }
}

/// TCP probes a connection after this silence.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// The length of the accept queue; Linux uses `net.core.somaxconn` if that is less. After a restart
/// every subscriber reconnects at once. A connection that finds the queue full (usually 128) is
/// dropped, or reset when it first sends something.
const BACKLOG: u32 = 4096;

/// Binds a TCP address, with a long accept queue. Like Rust's own listeners, it reuses an address
/// whose old connections linger.
pub fn listen_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            // A regular file refuses connections too, and must not be removed.
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
            match UnixStream::connect(path).await {
                Err(connect) if is_socket && connect.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path)?;
                    UnixListener::bind(path)
                }
                _ => Err(error),
            }
        }
        other => other,
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A connection of either kind.
pub enum Connection {
    /// TCP, and the address of the client.
    Tcp(TcpStream, SocketAddr),
    /// A Unix socket.
    Unix(UnixStream),
}

impl Connected for Connection {
    type ConnectInfo = ClientInfo;

    fn connect_info(&self) -> ClientInfo {
        match self {
            Self::Tcp(_, address) => ClientInfo { address: Some(*address), ..ClientInfo::default() },
            Self::Unix(_) => ClientInfo::default(),
        }
    }
}

macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Self::Tcp($stream, _) => {
                let $stream = Pin::new($stream);
                $call
            }
            Self::Unix($stream) => {
                let $stream = Pin::new($stream);
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// More than the 128 that listeners get by default.
    const CROWD: usize = 300;

    #[tokio::test]
    async fn many_connections_at_once_wait_in_the_accept_queue() {
        let system = fs::read_to_string("/proc/sys/net/core/somaxconn").ok().and_then(|text| text.trim().parse().ok());
        let crowd = CROWD.min(system.unwrap_or(0));
        let listener = listen_tcp(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        // Nothing is accepted. A connection that finds the queue full gets no answer.
        let connect = |_| std::net::TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap();
        let connected: Vec<_> = (0..crowd).map(connect).collect();
        assert_eq!(connected.len(), crowd);
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[tokio::test]
    async fn the_kernel_buffers_little_unsent_data() {
        let listener = listen_tcp(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let listener = Listener::Tcp(listener);
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let Ok(Connection::Tcp(stream, _)) = accepted else { panic!("it is TCP") };
        assert_eq!(SockRef::from(&stream).tcp_notsent_lowat().unwrap(), UNSENT_BYTES_MAX);
    }

    #[tokio::test]
    async fn only_an_abandoned_unix_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let bind = async |path: &PathBuf| Listener::bind(&ListenAddress::Unix(path.clone()), "--listen").await;

        let file = directory.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        let error = bind(&file).await.err().expect("a regular file").to_string();
        assert!(error.ends_with("or the file is no socket: choose another path"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(bind(&link).await.is_err(), "a link to one");
        assert!(link.is_symlink() && file.exists());

        let stale = directory.path().join("stale");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        assert!(stale.exists(), "left behind");
        let listener = bind(&stale).await.unwrap();

        assert!(bind(&stale).await.is_err(), "a live one");
        assert!(UnixStream::connect(&stale).await.is_ok(), "which still accepts connections");
        drop(listener);
        assert!(!stale.exists());
    }
}
