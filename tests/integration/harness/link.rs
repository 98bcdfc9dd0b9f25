//! A connection that a test can cut, freeze or lead to another server: a forwarder on loopback
//! between a client and a server. While it is cut, it closes new connections at once, so the client
//! stays disconnected until the test restores it.

use std::net::SocketAddr;

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// A forwarder to one address. It stops when dropped.
pub(crate) struct Link {
    /// The address for the client.
    pub(crate) addr: SocketAddr,
    open: watch::Sender<bool>,
    server: watch::Sender<SocketAddr>,
    freezes: watch::Sender<u32>,
    accepts: JoinHandle<()>,
}

impl Link {
    /// Listens on its own port and forwards to `server`.
    pub(crate) async fn to(server: SocketAddr) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let (open, state) = watch::channel(true);
        let (server, current) = watch::channel(server);
        let (freezes, frozen) = watch::channel(0);
        let accepts = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = *current.borrow();
                // It notices the next freeze, not those before.
                let mut frozen = frozen.clone();
                frozen.mark_unchanged();
                tokio::spawn(forward(client, server, state.clone(), frozen));
            }
        });
        Link { addr, open, server, freezes, accepts }
    }

    /// Closes all current and new connections.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Forwards new connections again.
    pub(crate) fn mend(&self) {
        self.open.send_replace(true);
    }

    /// Forwards no more bytes on the current connections, and keeps them open, as after a failure
    /// of the network or of a machine. New connections are forwarded.
    pub(crate) fn freeze(&self) {
        self.freezes.send_modify(|count| *count += 1);
    }

    /// Forwards new connections to another server. The connections so far stay, as behind a load
    /// balancer.
    pub(crate) fn lead_to(&self, server: SocketAddr) {
        self.server.send_replace(server);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.cut();
        self.accepts.abort();
    }
}

async fn forward(
    mut client: TcpStream,
    server: SocketAddr,
    mut state: watch::Receiver<bool>,
    mut frozen: watch::Receiver<u32>,
) {
    if !*state.borrow() {
        return;
    }
    let Ok(mut upstream) = TcpStream::connect(server).await else { return };
    let forwarded = tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => true,
        _ = state.wait_for(|open| !open) => true,
        _ = frozen.changed() => false,
    };
    if !forwarded {
        // Both sockets stay open until the link is cut or dropped.
        let _ = state.wait_for(|open| !open).await;
    }
}
