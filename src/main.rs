//! The kubefan binary.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut config = kubefan::config::ServeConfig::default();
    config.resources = std::env::args().skip(1).collect();
    tokio::runtime::Runtime::new()?.block_on(kubefan::app::run(config, async {
        let _ = tokio::signal::ctrl_c().await;
    }))?;
    Ok(())
}
