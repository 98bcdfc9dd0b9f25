//! A connection that a test can cut: a forwarder on loopback between a client and a server. While it is cut, new connections
//! are closed at once, so that the client stays away until the test lets it come back.

use std::net::SocketAddr;

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// A forwarder to one address; it ends when dropped.
pub(crate) struct Link {
    /// Where the client connects.
    pub(crate) addr: SocketAddr,
    open: watch::Sender<bool>,
    accepts: JoinHandle<()>,
}

impl Link {
    /// Listens on a port of its own and forwards to `server`.
    pub(crate) async fn to(server: SocketAddr) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let (open, state) = watch::channel(true);
        let accepts = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, server, state.clone()));
            }
        });
        Link { addr, open, accepts }
    }

    /// Closes every connection, and every new one.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Forwards new connections again.
    pub(crate) fn mend(&self) {
        self.open.send_replace(true);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.cut();
        self.accepts.abort();
    }
}

async fn forward(mut client: TcpStream, server: SocketAddr, mut state: watch::Receiver<bool>) {
    if !*state.borrow() {
        return;
    }
    let Ok(mut upstream) = TcpStream::connect(server).await else { return };
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => {}
        _ = state.wait_for(|open| !open) => {}
    }
}
