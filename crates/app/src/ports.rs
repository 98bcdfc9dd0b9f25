//! The listeners of all ports, by the configuration.

use kubefan_server::transport::listen::{BindError, Listener};

use crate::config::ServeConfig;

/// The listeners.
pub(super) struct Ports {
    pub(super) data: Listener,
    pub(super) admin: Listener,
    /// `None` without a port for peers.
    pub(super) peer: Option<Listener>,
}

impl Ports {
    /// Binds all ports.
    ///
    /// # Errors
    /// The first address that cannot be bound.
    pub(super) async fn build(config: &ServeConfig) -> Result<Self, BindError> {
        let mode = config.serving.listen_mode;
        let data = Listener::bind(&config.serving.listen, "--listen", mode).await?;
        let admin = Listener::bind(&config.serving.admin_listen, "--admin-listen", mode).await?;
        let peer = match &config.peer.listen {
            Some(address) => Some(Listener::bind(address, "--peer-listen", mode).await?),
            None => None,
        };
        Ok(Self { data, admin, peer })
    }
}
