//! The process of the attackers. It runs one attack, prints the results as one line, and ends.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use tokio::{
    process::Command,
    time::{Instant, timeout},
};

use super::{attack::Attack, context::Context, tally::Tally};
use crate::{BenchError, child, tls};

/// The hidden command that runs an attack.
pub const ATTACK: &str = "bench-attacker";
/// Niceness of the process.
const NICE: i32 = 10;
/// Time that the process may take in addition to the attack.
const EXTRA_TIME: Duration = Duration::from_secs(20);

/// The target of an attack, and its duration.
#[derive(Debug, Clone)]
pub struct Order {
    /// The data port.
    pub target: SocketAddr,
    /// The admin port.
    pub admin: SocketAddr,
    /// Duration of the attack.
    pub duration: Duration,
    /// A version that the server can resume from.
    pub version: u64,
    /// The certificate of the data port; `None` without TLS.
    pub cert_file: Option<PathBuf>,
}

/// Runs an attack in this process. Returns the answers that it received, as text.
///
/// # Errors
/// If the certificate cannot be read.
pub async fn run(attack: &Attack, order: Order) -> io::Result<String> {
    // Fails only with a smaller number.
    let _ = rustix::process::nice(NICE);
    let Order { target, admin, duration, version, cert_file } = order;
    let tls = cert_file.as_deref().map(tls::client_of).transpose()?;
    let tally = Arc::new(Tally::default());
    let context = Context { target, admin, version, end: Instant::now() + duration, tls, tally: tally.clone() };
    (attack.run)(context).await;
    Ok(tally.text())
}

/// Runs an attack in a process of its own. Returns the answers that it received, as text.
pub(crate) async fn run_process(program: &Path, attack: &Attack, order: Order) -> Result<String, BenchError> {
    let failed = |message: String| BenchError::Start { name: format!("the attacker {}", attack.name), message };
    let Order { target, admin, duration, version, cert_file } = order;
    let mut command = Command::new(program);
    command.arg(child::LAUNCH).arg(program).args([ATTACK, attack.name]);
    command.args([target.to_string(), admin.to_string(), duration.as_millis().to_string(), version.to_string()]);
    command.args(cert_file);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = timeout(duration + EXTRA_TIME, command.output()).await;
    let output = output.map_err(|_| failed("it did not end".to_owned()))??;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    } else {
        Err(failed(output.status.to_string()))
    }
}
