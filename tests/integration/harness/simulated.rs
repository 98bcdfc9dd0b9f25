//! A simulated apiserver on a loopback port, for tests that need the real kubefan binary but not
//! the real kube-apiserver.

use std::{io::Write, net::SocketAddr, path::PathBuf};

use kubefan_sim::apiserver::{SimApiserver, SimOptions};
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpSocket},
    task::JoinHandle,
};

use super::{
    kubefan::Kubefan,
    process::free_port,
    rig::{pod, pods},
    wait,
};

/// A running simulated apiserver. It stops when dropped.
pub(crate) struct Simulated {
    pub(crate) sim: SimApiserver,
    /// The address it listens on.
    pub(crate) addr: SocketAddr,
    /// A directory for the test's files.
    pub(crate) dir: TempDir,
    serving: Option<JoinHandle<std::io::Result<()>>>,
    /// While the server is off the network: it does not listen, so connections are refused, and
    /// no one else gets its port.
    reserved: Option<TcpSocket>,
}

impl Simulated {
    /// Starts a server with the default options and three pods in the namespace `default`.
    pub(crate) async fn start() -> Simulated {
        let simulated = Simulated::with(SimOptions::default()).await;
        for name in ["a", "b", "c"] {
            simulated.create(name);
        }
        simulated
    }

    /// Starts an empty server.
    pub(crate) async fn with(options: SimOptions) -> Simulated {
        // Not an ephemeral port: while the server is off the network, it could be taken.
        let listener = TcpListener::bind(("127.0.0.1", free_port())).await.expect("the port is free");
        let addr = listener.local_addr().expect("a listener has an address");
        let sim = SimApiserver::new(options);
        let serving = Some(tokio::spawn(sim.clone().serve(listener, std::future::pending())));
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory is created");
        Simulated { sim, addr, dir, serving, reserved: None }
    }

    /// Takes the server off the network: connections break, and new ones are refused.
    pub(crate) async fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            let _ = serving.await;
            self.sim.drop_connections();
            // A process that is being started inherits the listener until it runs its program.
            let bind = async || {
                let socket = TcpSocket::new_v4().expect("a socket is made");
                socket.set_reuseaddr(true).expect("connections of the past may remain");
                socket.bind(self.addr).ok().map(|()| socket)
            };
            self.reserved = Some(wait::until("the end of all copies of the listener", wait::SOON, bind).await);
        }
    }

    /// Returns the server to the network, at the same address.
    pub(crate) async fn resume(&mut self) {
        let socket = self.reserved.take().expect("the server is off the network");
        let listener = socket.listen(1024).expect("the port is reserved");
        self.serving = Some(tokio::spawn(self.sim.clone().serve(listener, std::future::pending())));
    }

    /// Creates a pod in the namespace `default` with the label `stage=new`. Returns its version.
    pub(crate) fn create(&self, name: &str) -> u64 {
        self.sim.create(&pods(), pod(name, "new")).expect("the pod is valid and new")
    }

    /// Overwrites a pod with another `stage` label. Returns its version.
    pub(crate) fn stage(&self, name: &str, stage: &str) -> u64 {
        self.sim.update(&pods(), pod(name, stage)).expect("the pod exists")
    }

    /// A kubeconfig for this server with this user entry, such as `{ token: abc }`.
    pub(crate) fn kubeconfig_for(&self, user: &str) -> PathBuf {
        kubeconfig(&self.dir, &format!("http://{}", self.addr), user)
    }

    /// A kubeconfig for this server.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig_for("{}")
    }

    /// Starts kubefan in front of this server and waits until it is ready.
    pub(crate) async fn kubefan(&self, args: &[&str]) -> Kubefan {
        let kubefan = Kubefan::spawn(&self.kubeconfig(), args).await;
        kubefan.ready().await;
        kubefan
    }

    /// Like [`Self::kubefan`], on a Unix socket such as `unix:/tmp/x`.
    pub(crate) async fn kubefan_at(&self, socket: &str) -> Kubefan {
        let kubefan = Kubefan::spawn_at(&self.kubeconfig(), socket, &["--resource=pods"]).await;
        kubefan.ready().await;
        kubefan
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

/// Writes a kubeconfig with one cluster and one user.
pub(crate) fn kubeconfig(dir: &TempDir, server: &str, user: &str) -> PathBuf {
    let path = dir.path().join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: sim\nclusters: [{{ name: sim, cluster: {{ server: '{server}' }} }}]\n\
         contexts: [{{ name: sim, context: {{ cluster: sim, user: someone }} }}]\nusers: [{{ name: someone, user: {user} }}]\n"
    );
    // Replaced as a whole: a kubefan that starts at the same time reads it.
    let mut file = tempfile::NamedTempFile::new_in(dir).expect("a file is made");
    file.write_all(text.as_bytes()).expect("the kubeconfig is written");
    file.persist(&path).expect("the kubeconfig is replaced");
    path
}

/// Parses a command's output as JSON.
pub(crate) fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}
