//! The form of log lines: each field has a limit, and no character that controls a terminal. Texts
//! of clients and of libraries may be of any length.

use std::{
    fmt::{self, Write as _},
    io,
};

use kubefan_common::visible::{EscapedJson, is_hidden};
use serde_json::{Map, Value};
use tracing::{
    Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    field::{RecordFields, VisitOutput},
    fmt::{
        FormatFields,
        format::{DefaultVisitor, Writer},
    },
    registry::LookupSpan,
};

use super::log_format::LogFormat;

/// The longest text of a field, in characters. The end of a message or an error has the advice.
fn chars_max(field: &str) -> usize {
    if matches!(field, "message" | "error") { 1000 } else { 200 }
}

/// Writes lines in a format, each with one write.
pub(super) fn layer<S, W>(format: LogFormat, writer: W, is_coloured: bool) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: io::Write + Clone + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer();
    match format {
        LogFormat::Text => {
            lines.fmt_fields(CutFields).with_ansi(is_coloured).with_writer(move || writer.clone()).boxed()
        }
        LogFormat::Json => lines.json().flatten_event(true).with_writer(move || CutJson(writer.clone())).boxed(),
    }
}

/// Formats the fields of a line of text.
struct CutFields;

impl<'w> FormatFields<'w> for CutFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut visitor = CutVisitor(DefaultVisitor::new(writer, true));
        fields.record(&mut visitor);
        visitor.0.finish()
    }
}

struct CutVisitor<'w>(DefaultVisitor<'w>);

impl Visit for CutVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.record_debug(field, &format_args!("{value}"));
        } else {
            self.record_debug(field, &value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = CutText { text: String::new(), left: chars_max(field.name()) };
        // Fails where the text is cut.
        let _ = write!(text, "{value:?}");
        self.0.record_debug(field, &format_args!("{}", text.text));
    }
}

/// The start of the text that is written to it.
struct CutText {
    text: String,
    /// The characters that it has room for.
    left: usize,
}

impl fmt::Write for CutText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.left == 0 {
                self.text.push('…');
                return Err(fmt::Error);
            }
            self.left -= 1;
            self.text.push(match c {
                '\n' => ' ',
                c if is_hidden(c) => char::REPLACEMENT_CHARACTER,
                c => c,
            });
        }
        Ok(())
    }
}

/// Writes lines of JSON, and cuts their fields: the formatter of JSON has no place for that.
struct CutJson<W>(W);

impl<W: io::Write> io::Write for CutJson<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        EscapedJson(&mut self.0).write_all(cut_line(line).as_deref().unwrap_or(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A line with shorter texts; `None` if none is too long.
fn cut_line(line: &[u8]) -> Option<Vec<u8>> {
    // No field is longer than its line.
    if line.len() <= chars_max("any other field") {
        return None;
    }
    let mut fields: Map<String, Value> = serde_json::from_slice(line).ok()?;
    let mut is_cut = false;
    for (field, value) in &mut fields {
        if let Value::String(text) = value
            && let Some((end, _)) = text.char_indices().nth(chars_max(field))
        {
            text.truncate(end);
            text.push('…');
            is_cut = true;
        }
    }
    is_cut.then(|| format!("{}\n", Value::Object(fields)).into_bytes())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use io::Write;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// The line of an event with long fields before a short one.
    fn line(format: LogFormat) -> String {
        let written = Arc::<Mutex<Vec<u8>>>::default();
        let subscriber = tracing_subscriber::registry().with(layer(format, Shared(written.clone()), false));
        tracing::subscriber::with_default(subscriber, || {
            let long = "ä".repeat(2000);
            tracing::warn!(name = long, error = %long, list = ?[&long], line = 7, last = "end", "a message of {long}");
        });
        let written = written.lock().unwrap().clone();
        String::from_utf8(written).unwrap()
    }

    #[derive(Clone)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_field_is_cut_in_both_formats() {
        let text = line(LogFormat::Text);
        assert!(text.ends_with("last=\"end\"\n") && text.contains("line=7"), "{text}");
        assert_eq!(text.matches('…').count(), 4, "{text}");
        assert!(text.matches('ä').count() <= 2 * chars_max("message") + 2 * chars_max("name"), "{text}");
        let json: Value = serde_json::from_str(&line(LogFormat::Json)).unwrap();
        for field in ["name", "error", "list", "message"] {
            assert_eq!(json[field].as_str().unwrap().chars().count(), chars_max(field) + 1, "{json}");
        }
        assert_eq!((&json["level"], &json["line"], &json["last"]), (&"WARN".into(), &7.into(), &"end".into()));
    }
}
