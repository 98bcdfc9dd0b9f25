//! The table of reasons, and the forms of its names and texts that several languages need.

use std::{error::Error, fs, path::Path};

use serde::Deserialize;

/// The file, from the root of the repository.
pub(crate) const PATH: &str = "proto/kubefan/v1alpha1/reasons.yaml";

/// Columns of a line of code, as in the checks of all languages.
const LINE_MAX: usize = 100;

/// `reasons.yaml`, which explains the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    pub(crate) domain: String,
    pub(crate) errors: Vec<ErrorRow>,
    pub(crate) metadata: Vec<MetadataRow>,
    pub(crate) gaps: Vec<GapRow>,
}

/// A reason of an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ErrorRow {
    pub(crate) value: String,
    #[serde(default)]
    name: Option<String>,
    pub(crate) code: String,
    #[serde(default)]
    pub(crate) delay: Option<u64>,
    pub(crate) ends: Vec<Ends>,
    pub(crate) meaning: String,
    pub(crate) client: String,
    #[serde(default)]
    pub(crate) see: Option<String>,
}

/// The calls or streams that end with a reason.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ends {
    Calls,
    Streams,
}

/// A key of the metadata of an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MetadataRow {
    pub(crate) value: String,
    pub(crate) reasons: Vec<String>,
    pub(crate) meaning: String,
}

/// A reason of a gap.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GapRow {
    pub(crate) value: String,
    pub(crate) meaning: String,
}

/// A constant, the same in every language but for the form of its name.
pub(crate) struct Constant<'a> {
    /// In capitals, as in `TOO_OLD`.
    pub(crate) name: String,
    pub(crate) value: &'a str,
    pub(crate) doc: String,
}

impl Table {
    pub(crate) fn read() -> Result<Self, Box<dyn Error>> {
        let text = fs::read_to_string(Path::new(super::ROOT).join(PATH))?;
        Ok(serde_saphyr::from_str(&text)?)
    }

    pub(crate) fn error_constants(&self) -> Vec<Constant<'_>> {
        let constant = |row: &'_ ErrorRow| row.name.clone().unwrap_or_else(|| row.value.clone());
        let rows = self.errors.iter();
        rows.map(|row| Constant {
            name: constant(row),
            value: &row.value,
            doc: format!("{} {}", row.meaning, row.client),
        })
        .collect()
    }

    pub(crate) fn gap_constants(&self) -> Vec<Constant<'_>> {
        let rows = self.gaps.iter();
        rows.map(|row| Constant { name: row.value.to_uppercase(), value: &row.value, doc: row.meaning.clone() })
            .collect()
    }

    pub(crate) fn metadata_constants(&self) -> Vec<Constant<'_>> {
        let rows = self.metadata.iter();
        rows.map(|row| Constant {
            name: row.value.to_uppercase(),
            value: &row.value,
            doc: format!("{} With {}.", row.meaning, row.reasons.join(", ")),
        })
        .collect()
    }
}

/// A name in capitals, such as `TOO_OLD`, as `TooOld`.
pub(crate) fn camel_case(name: &str) -> String {
    let words = name.split('_').filter(|word| !word.is_empty());
    words.map(|word| format!("{}{}", &word[..1], word[1..].to_lowercase())).collect()
}

/// A comment of lines that begin with `before` and have at most 100 columns.
pub(crate) fn comment(before: &str, text: &str) -> String {
    let mut lines = String::new();
    let mut line = before.trim_end().to_owned();
    let empty = line.len();
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > LINE_MAX && line.len() > empty {
            lines.push_str(&line);
            lines.push('\n');
            line.truncate(empty);
        }
        line.push(' ');
        line.push_str(word);
    }
    lines + &line + "\n"
}

/// The texts between double quotes.
pub(crate) fn quoted(text: &str) -> Vec<&str> {
    text.split('"').skip(1).step_by(2).collect()
}
