//! Cuts log lines that are too long. Texts of clients and of libraries may be of any length.

use std::io;

use serde_json::Value;
use tracing_appender::non_blocking::NonBlocking;
use tracing_subscriber::fmt::MakeWriter;

use super::LogFormat;

/// The longest line, in bytes. kubefan's own lines are shorter.
const LINE_BYTES_MAX: usize = 2048;
/// The longest text in a line that is too long, in characters.
const TEXT_CHARS_MAX: usize = 200;

/// Makes the writer of each line.
pub(super) struct CutLines {
    format: LogFormat,
    writer: NonBlocking,
}

/// Writes one line.
pub(super) struct CutLine<W> {
    format: LogFormat,
    writer: W,
}

impl CutLines {
    pub(super) fn new(format: LogFormat, writer: NonBlocking) -> Self {
        Self { format, writer }
    }
}

impl<'a> MakeWriter<'a> for CutLines {
    type Writer = CutLine<NonBlocking>;

    fn make_writer(&'a self) -> Self::Writer {
        CutLine { format: self.format, writer: self.writer.clone() }
    }
}

impl<W: io::Write> io::Write for CutLine<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if line.len() <= LINE_BYTES_MAX {
            self.writer.write_all(line)?;
        } else {
            self.writer.write_all(&cut(self.format, line))?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// A shorter form of a line. JSON stays JSON: each of its texts is cut.
fn cut(format: LogFormat, line: &[u8]) -> Vec<u8> {
    if format == LogFormat::Json
        && let Ok(Value::Object(fields)) = serde_json::from_slice(line)
    {
        let fields = fields.into_iter().map(|(name, value)| match value {
            Value::String(text) => (name, Value::String(cut_text(&text, TEXT_CHARS_MAX))),
            other => (name, other),
        });
        return format!("{}\n", Value::Object(fields.collect())).into_bytes();
    }
    let text = String::from_utf8_lossy(line);
    format!("{}\n", cut_text(text.trim_end(), LINE_BYTES_MAX)).into_bytes()
}

fn cut_text(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn written(format: LogFormat, line: &str) -> String {
        let mut line_writer = CutLine { format, writer: Vec::new() };
        line_writer.write_all(line.as_bytes()).unwrap();
        String::from_utf8(line_writer.writer).unwrap()
    }

    #[test]
    fn only_a_long_line_is_cut() {
        let long = "ä".repeat(60_000);
        for format in [LogFormat::Text, LogFormat::Json] {
            assert_eq!(written(format, "{\"a\":1}\n"), "{\"a\":1}\n");
        }
        let text = written(LogFormat::Text, &format!("WARN name={long}\n"));
        assert_eq!((text.chars().count(), text.ends_with("ä…\n")), (LINE_BYTES_MAX + 2, true));
        let json = written(LogFormat::Json, &format!("{{\"level\":\"WARN\",\"line\":7,\"name\":\"{long}\"}}\n"));
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["name"].as_str().unwrap().chars().count(), TEXT_CHARS_MAX + 1);
        assert_eq!((&json["level"], &json["line"]), (&Value::from("WARN"), &Value::from(7)));
    }
}
