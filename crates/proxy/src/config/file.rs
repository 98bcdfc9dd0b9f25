//! Reads the configuration file. It is strict YAML: a misspelt key that is silently ignored is a
//! setting that the operator believes in.
//!
//! All sections share one flat list of keys. serde cannot flatten structs and refuse unknown keys
//! at the same time, and it would lose the line of an error, so `File` hands each key to the
//! section that has it.

use std::{fmt, fs, path::Path, sync::LazyLock};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, Visitor},
};

use super::{ConfigError, ServeOptions};

/// `apiVersion` of the file.
pub const API_VERSION: &str = "kubefan.dev/v1alpha1";
/// `kind` of the file.
pub const KIND: &str = "ServeConfiguration";
/// A longer file is not a configuration of kubefan.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    api_version: Option<String>,
    kind: Option<String>,
}

/// All keys: those of the header and those of the options.
static KEYS: LazyLock<Vec<&'static str>> = LazyLock::new(|| [&["apiVersion", "kind"], &*ServeOptions::keys()].concat());

/// The whole file.
struct File(ServeOptions);

impl<'de> Deserialize<'de> for File {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FileVisitor)
    }
}

struct FileVisitor;

impl<'de> Visitor<'de> for FileVisitor {
    type Value = File;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of options")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<File, M::Error> {
        let mut options = ServeOptions::default();
        while let Some(Key(key)) = map.next_key()? {
            if !options.read(key, &mut map)? {
                // The header was checked before.
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(File(options))
    }
}

/// A known key.
struct Key(&'static str);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_identifier(KeyVisitor)
    }
}

struct KeyVisitor;

impl Visitor<'_> for KeyVisitor {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Key, E> {
        let known = KEYS.iter().find(|known| **known == key);
        // Here and not after the whole entry, so that the error has the key's line.
        known.copied().map(Key).ok_or_else(|| E::unknown_field(key, &KEYS))
    }
}

/// Reads a file. Blocks meanwhile.
pub fn read(path: &Path) -> Result<ServeOptions, ConfigError> {
    let broken = |message: String| ConfigError::File { file: path.to_owned(), message };
    let metadata = fs::metadata(path).map_err(|error| broken(error.to_string()))?;
    if metadata.len() > FILE_BYTES_MAX {
        return Err(broken(format!("longer than {FILE_BYTES_MAX} bytes")));
    }
    let text = fs::read_to_string(path).map_err(|error| broken(error.to_string()))?;
    parse(&text).map_err(broken)
}

fn parse(text: &str) -> Result<ServeOptions, String> {
    let header: Header = serde_saphyr::from_str(text).map_err(one_line)?;
    let expect = |key: &str, value: Option<String>, expected: &str| match value.as_deref() {
        Some(value) if value == expected => Ok(()),
        Some(value) => Err(format!("{key} is {value:?}; this kubefan reads {expected:?}")),
        None => {
            Err(format!("{key} is missing; begin the file with \"apiVersion: {API_VERSION}\" and \"kind: {KIND}\""))
        }
    };
    expect("apiVersion", header.api_version, API_VERSION)?;
    expect("kind", header.kind, KIND)?;
    let File(options) = serde_saphyr::from_str(text).map_err(one_line)?;
    Ok(options)
}

fn one_line(error: serde_saphyr::Error) -> String {
    let place = error.location().map(|at| format!("line {}: ", at.line())).unwrap_or_default();
    let message = match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField { field, expected, .. } => match nearest(field, expected) {
            Some(known) => format!("unknown key {field:?}; did you mean {known:?}?"),
            None => format!("unknown key {field:?}; the keys are those of `kubefan serve --help`, in camelCase"),
        },
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => format!("the key {key:?} is given twice"),
        other => other.to_string().lines().next().unwrap_or("no YAML").to_owned(),
    };
    format!("{place}{message}")
}

fn nearest<'a>(field: &str, known: &[&'a str]) -> Option<&'a str> {
    let distances = known.iter().map(|known| (strsim::damerau_levenshtein(field, known), *known));
    distances.filter(|(distance, _)| *distance <= 3).min().map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n";

    fn error(rest: &str) -> String {
        parse(&format!("{HEADER}{rest}")).unwrap_err()
    }

    #[test]
    fn a_file_sets_the_same_options_as_the_flags() {
        let text = format!(
            "{HEADER}listen: unix:/run/k.sock\nresources: [pods, deployments.apps]\nringBytesMax: 64Mi\nringAgeMax: 1m30s\n\
             onDemandBytesMax: 1000\nwatchList: never\npageSize: 250\nonDemand: false\n"
        );
        let options = parse(&text).unwrap();
        assert_eq!(options.cache.resources.unwrap(), ["pods", "deployments.apps"]);
        assert_eq!(options.cache.ring_bytes_max.unwrap().0, 64 << 20);
        assert_eq!(options.on_demand.on_demand_bytes_max.unwrap().0, 1000);
        assert_eq!((options.upstream.page_size, options.on_demand.on_demand), (Some(250), Some(false)));
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        assert_eq!(
            error("pageSize: 1\nresource: [pods]\n"),
            "line 4: unknown key \"resource\"; did you mean \"resources\"?"
        );
        assert!(error("zzzzzzzzz: 1\n").starts_with("line 3: unknown key \"zzzzzzzzz\"; the keys are"));
    }

    #[test]
    fn a_bad_value_or_document_is_one_line_with_its_place() {
        let bad = error("ringAgeMax: soon\n");
        assert!(bad.starts_with("line 3: ") && bad.contains("\"soon\" is no duration; write it like 30s"), "{bad}");
        let twice = error("pageSize: 1\npageSize: 2\n");
        assert!(twice.contains("line 4") && twice.contains("pageSize"), "{twice}");
        for text in ["[", "a: b: c", "- x", "pageSize: [1]"] {
            let message = error(text);
            assert!(message.starts_with("line ") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn another_kind_of_file_is_refused() {
        assert!(
            parse("apiVersion: v1\nkind: Config\n")
                .unwrap_err()
                .starts_with("apiVersion is \"v1\"; this kubefan reads")
        );
        assert!(parse("resources: [pods]\n").unwrap_err().starts_with("apiVersion is missing"));
        assert!(parse("").unwrap_err().len() < 200);
    }
}
