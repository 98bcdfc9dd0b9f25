//! Listeners: TCP and Unix sockets behind one type, so that the servers need not distinguish them.

use std::{
    fmt, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
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
use super::{
    limits::BACKLOG,
    listen_address::ListenAddress,
    spare_files::{SpareFiles, is_out_of_files},
    unix_socket::{self, SocketFile, SocketMode},
    unread::Reset,
};
use crate::client_info::ClientInfo;

/// A bound listener.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket, and its file, which is removed before the socket closes.
    Unix(SocketFile, UnixListener),
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
            "; another process uses it, perhaps another kubefan, or another port of this one: choose another address, or \
             port 0"
        }
        (io::ErrorKind::AddrInUse, Unix(_)) => {
            "; another process listens there, perhaps another kubefan, or another port of this one, or the file is no \
             socket: choose another path"
        }
        (io::ErrorKind::WouldBlock, Unix(_)) => "; another process holds the lock of its directory: try again",
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
    /// Binds an address. `flag` is the flag that named it, for the error text. A Unix socket gets
    /// these rights. A socket that a dead process left behind is replaced; one that is in use is
    /// not.
    pub async fn bind(address: &ListenAddress, flag: &'static str, mode: SocketMode) -> Result<Self, BindError> {
        let bound = match address {
            ListenAddress::Tcp(address) => listen_tcp(*address).map(Self::Tcp),
            ListenAddress::Unix(path) => {
                unix_socket::bind(path, mode).await.map(|(file, listener)| Self::Unix(file, listener))
            }
        };
        bound.map_err(|error| BindError { address: address.clone(), flag, error })
    }

    /// The address that it is bound to.
    pub fn bound(&self) -> io::Result<Bound> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Bound::Tcp),
            Self::Unix(file, _) => Ok(Bound::Unix(file.path().to_owned())),
        }
    }

    /// Moves it to the runtime that calls this. From then on it accepts connections even if the
    /// runtime that bound it does not run.
    ///
    /// # Errors
    /// The runtime cannot observe the socket.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn into_current_runtime(self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(listener) => Self::Tcp(TcpListener::from_std(listener.into_std()?)?),
            Self::Unix(file, listener) => Self::Unix(file, UnixListener::from_std(listener.into_std()?)?),
        })
    }

    async fn accept(&self) -> io::Result<Connection> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Events are small and must not wait for the acknowledgement of the previous one.
                stream.set_nodelay(true)?;
                // A client that vanished must free its place; HTTP/1.1 and tunnels have no PING to
                // detect that.
                SockRef::from(&stream).set_tcp_keepalive(&tcp_keepalive())?;
                // Other systems have no such option; there a slow reader fills the kernel's buffer.
                #[cfg(any(target_os = "linux", target_os = "android"))]
                SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
                // An IPv4 client of a listener for both is shown as such.
                Ok(Connection::Tcp(stream, SocketAddr::new(address.ip().to_canonical(), address.port())))
            }
            Self::Unix(_, listener) => listener.accept().await.map(|(stream, _)| Connection::Unix(stream)),
        }
    }

    /// The accepted connections. A failure to accept is logged and retried after 100 ms, because
    /// it must not end the server.
    ///
    /// If the process has no descriptor for a connection, it takes one of `reserved` descriptors
    /// that are held for this. If there are none left, the connection is closed at once, so that
    /// its client does not wait for an answer that never comes.
    pub fn incoming(self, reserved: usize) -> impl Stream<Item = io::Result<Connection>> {
        let spares = SpareFiles::new(self.as_fd(), reserved + 1);
        futures::stream::unfold((self, spares, false), |(listener, mut spares, mut was_short)| async move {
            loop {
                match listener.accept().await {
                    Ok(connection) => {
                        spares.refill(listener.as_fd());
                        was_short &= !spares.is_full();
                        if !spares.is_empty() {
                            return Some((Ok(connection), (listener, spares, was_short)));
                        }
                        drop(connection);
                        spares.refill(listener.as_fd());
                    }
                    Err(error) if is_out_of_files(&error) && spares.release() => {
                        if !std::mem::replace(&mut was_short, true) {
                            tracing::warn!(%error, "no file descriptor is free; new connections are closed at once");
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        spares.refill(listener.as_fd());
                    }
                }
            }
        })
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(_, listener) => listener.as_fd(),
        }
    }
}

/// Probes a silent connection, and closes it a minute after the last sign of its peer. By default
/// the kernel takes 11 minutes more.
fn tcp_keepalive() -> TcpKeepalive {
    let probes = TcpKeepalive::new().with_time(Duration::from_secs(30));
    probes.with_interval(Duration::from_secs(10)).with_retries(3)
}

/// Binds a TCP address, with a long accept queue. Like Rust's own listeners, it reuses an address
/// whose old connections linger. `[::]` takes IPv4 too, and is `0.0.0.0` on a system without IPv6.
pub fn listen_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    match listen_at(address) {
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && has_no_ipv6(&error) => {
            listen_at((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        bound => bound,
    }
}

/// Whether the system was built, or started, without IPv6.
fn has_no_ipv6(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable
        || error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    if address.ip() == Ipv6Addr::UNSPECIFIED {
        SockRef::from(&socket).set_only_v6(false)?;
    }
    socket.bind(address)?;
    socket.listen(BACKLOG.unsigned_abs())
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

impl Reset for Connection {
    fn reset_on_close(&self) {
        if let Self::Tcp(stream, _) = self {
            // Otherwise the kernel holds the unsent bytes for minutes after the close.
            let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
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

    #[tokio::test]
    async fn a_listener_on_all_addresses_takes_ipv4_and_shows_it_as_such() {
        let listener = listen_tcp((Ipv6Addr::UNSPECIFIED, 0).into()).unwrap();
        let port = listener.local_addr().unwrap().port();
        let listener = Listener::Tcp(listener);
        let connect = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        let (client, accepted) = tokio::join!(connect, listener.accept());
        let Ok(Connection::Tcp(_, shown)) = accepted else { panic!("it is TCP") };
        assert_eq!(shown, client.unwrap().local_addr().unwrap());
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
}
