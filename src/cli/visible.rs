//! Text for the terminal: all that is not kubefan's own goes through here.

use std::io::{self, Write};

use serde::Serialize;

pub(super) use kubefan_common::visible::{EscapedJson, visible, visible_line, visible_lines};

/// Prints one line to stderr.
#[expect(clippy::print_stderr, reason = "the only place")]
pub(super) fn print_notice(text: &str) {
    eprintln!("{}", visible_line(text));
}

/// Prints JSON over several lines.
pub(super) fn print_json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(EscapedJson(&mut *out), value)?;
    writeln!(out)
}
