//! Wiring.

use crate::config::ServeConfig;

/// Why the process could not serve.
#[derive(Debug, thiserror::Error)]
pub enum AppError {}

/// Serves until `shutdown`.
pub async fn run(config: ServeConfig, shutdown: impl Future<Output = ()> + Send) -> Result<(), AppError> {
    tracing::info!(listen = %config.listen, "not wired yet");
    shutdown.await;
    Ok(())
}
