//! `kubefan disconnect`: ends the streams of clients that watch through a running kubefan.

use std::io::{Write, stdout};

use clap::Args;

use super::{admin::AdminArgs, error::CliError, visible::print_notice};

/// End the stream of a client that watches through a running kubefan
///
/// The client learns that an operator has ended its stream: over gRPC by the status UNAVAILABLE
/// with the reason DISCONNECTED, over HTTP by an ERROR event with the code 429. Clients wait a
/// moment and resume, and miss nothing. To keep one out, take its right to the resource away.
#[derive(Debug, Args)]
pub(super) struct DisconnectArgs {
    /// The ids, as `kubefan subscribers` shows them
    #[arg(required = true, value_name = "ID", value_parser = id)]
    ids: Vec<String>,

    #[command(flatten)]
    admin: AdminArgs,
}

/// An id is a segment of a path.
fn id(text: &str) -> Result<String, String> {
    let is_id = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then(|| text.to_ascii_lowercase()).ok_or_else(|| "an id is like 1a2b3c4d (kubefan subscribers)".to_owned())
}

pub(super) async fn run(args: DisconnectArgs) -> Result<(), CliError> {
    let admin = args.admin.connect().await.map_err(CliError::Plain)?;
    let mut has_failed = false;
    for id in &args.ids {
        match admin.delete(&format!("/subscribers/{id}")).await {
            Ok(_) => writeln!(stdout(), "subscriber/{id} disconnected")?,
            Err(problem) => {
                print_notice(&format!("error: {problem}"));
                has_failed = true;
            }
        }
    }
    if has_failed { Err(CliError::Printed) } else { Ok(()) }
}
