//! Reads the configuration file. It is strict YAML: a misspelt key that is silently ignored is a
//! setting that the operator believes in.
//!
//! All sections share one flat list of the keys that have flags, and the maps `limits` and `tuning`
//! of those that have none. serde cannot flatten structs and refuse unknown keys at the same time,
//! and it would lose the line of an error, so `File` hands each key to the section that has it.

use std::{fmt, fs, path::Path, sync::LazyLock};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor},
};

use super::{
    ConfigError, ServeOptions, moved,
    names::nearest,
    settings::{self, API_VERSION, KIND},
};

/// A longer file is not a configuration of kubefan.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    api_version: Option<String>,
    kind: Option<String>,
}

/// A map of the file with the keys that it may have.
struct FileMap {
    /// The key of the map. Empty for the file as a whole.
    name: &'static str,
    keys: Vec<&'static str>,
}

/// The file as a whole: the header, the keys that have flags, and the names of the maps.
static TOP_LEVEL: LazyLock<FileMap> = LazyLock::new(|| {
    let maps = MAPS.iter().map(|map| map.name);
    let keys = ["apiVersion", "kind"].into_iter().chain(ServeOptions::keys()).chain(maps).collect();
    FileMap { name: "", keys }
});

/// The maps of the keys that have no flags.
static MAPS: LazyLock<[FileMap; 2]> = LazyLock::new(|| {
    settings::MAPS.map(|name| {
        let keys = ServeOptions::file_keys().into_iter().filter(|key| key.map == name);
        FileMap { name, keys: keys.map(|key| key.name).collect() }
    })
});

/// The whole file.
struct File(ServeOptions);

impl<'de> Deserialize<'de> for File {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut options = ServeOptions::default();
        deserializer.deserialize_map(MapVisitor { file_map: &TOP_LEVEL, options: &mut options })?;
        Ok(File(options))
    }
}

/// Reads the entries of a map.
struct MapVisitor<'a> {
    file_map: &'static FileMap,
    options: &'a mut ServeOptions,
}

impl<'de> Visitor<'de> for MapVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of options")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        let Self { file_map, options } = self;
        while let Some(key) = map.next_key_seed(Key(file_map))? {
            if let Some(inner) = MAPS.iter().find(|inner| file_map.name.is_empty() && inner.name == key) {
                map.next_value_seed(MapVisitor { file_map: inner, options: &mut *options })?;
            } else if !options.read(file_map.name, key, &mut map)? {
                // The header was checked before.
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    /// A map without entries, such as one whose entries are comments.
    fn visit_none<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> DeserializeSeed<'de> for MapVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

/// A known key of a map.
struct Key(&'static FileMap);

impl<'de> DeserializeSeed<'de> for Key {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<&'static str, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key {
    type Value = &'static str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<&'static str, E> {
        let Self(FileMap { keys, .. }) = self;
        let known = keys.iter().find(|known| **known == key);
        // Here and not after the whole entry, so that the error has the key's line.
        known.copied().ok_or_else(|| E::unknown_field(key, keys))
    }
}

/// Reads the content of a file. Blocks meanwhile.
pub(super) fn content(path: &Path) -> Result<String, ConfigError> {
    let broken = |message: String| ConfigError::File { file: path.to_owned(), message };
    let metadata = fs::metadata(path).map_err(|error| broken(error.to_string()))?;
    if metadata.len() > FILE_BYTES_MAX {
        return Err(broken(format!("longer than {FILE_BYTES_MAX} bytes")));
    }
    fs::read_to_string(path).map_err(|error| broken(error.to_string()))
}

/// Reads the options in the content of the file at `path`.
pub(super) fn parse_at(path: &Path, content: &str) -> Result<ServeOptions, ConfigError> {
    parse(content).map_err(|message| ConfigError::File { file: path.to_owned(), message })
}

fn parse(text: &str) -> Result<ServeOptions, String> {
    let header: Header = serde_saphyr::from_str(text).map_err(|error| one_line(text, &error))?;
    let expect = |key: &str, value: Option<String>, expected: &str| match value.as_deref() {
        Some(value) if value == expected => Ok(()),
        Some(value) => Err(format!("{key} is {value:?}; this kubefan reads {expected:?}")),
        None => {
            Err(format!("{key} is missing; begin the file with \"apiVersion: {API_VERSION}\" and \"kind: {KIND}\""))
        }
    };
    expect("apiVersion", header.api_version, API_VERSION)?;
    expect("kind", header.kind, KIND)?;
    let File(options) = serde_saphyr::from_str(text).map_err(|error| one_line(text, &error))?;
    Ok(options)
}

fn one_line(text: &str, error: &serde_saphyr::Error) -> String {
    let error = error.without_snippet();
    let line = error.location().map(|at| at.line());
    let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
    let message = match error {
        serde_saphyr::Error::SerdeUnknownField { field, expected, .. } => unknown(field, expected),
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => format!("the key {key:?} is given twice"),
        other => match line.and_then(|line| entry_at(text, usize::try_from(line).ok()?)) {
            Some((path, value)) => format!("{path}: {}", problem_of(&path, value, other)),
            None => text_of(other),
        },
    };
    format!("{place}{message}")
}

/// Describes a key that is not among the `expected` ones: where it is now, or which one is meant.
fn unknown(field: &str, expected: &[&str]) -> String {
    let is_top = expected.contains(&"apiVersion");
    if let Some(now) = moved::key(field).filter(|_| is_top) {
        return format!("{field} is now {now}");
    }
    if let Some(known) = nearest(field, expected.iter().copied()) {
        return format!("unknown key {field:?}; did you mean {known:?}?");
    }
    let is_map = MAPS.iter().any(|map| expected == map.keys);
    let elsewhere = MAPS.iter().chain([&*TOP_LEVEL]).find(|map| map.keys.contains(&field));
    match elsewhere.filter(|_| is_top || is_map) {
        Some(FileMap { name: "", .. }) => format!("{field} is no limit and no tuning; write it at the top of the file"),
        Some(FileMap { name, .. }) => format!("{field} belongs under {name}"),
        None => format!(
            "unknown key {field:?}; the keys are those of `kubefan serve --help`, in camelCase, and those of limits and \
             tuning in docs/configuration.md"
        ),
    }
}

/// The path of the key whose value is at a line (from 1), and the value as far as it is on one
/// line.
fn entry_at(text: &str, line: usize) -> Option<(String, &str)> {
    let lines: Vec<_> = text.lines().take(line).collect();
    let top_key =
        |line: &str| TOP_LEVEL.keys.iter().find(|known| Some(**known) == line.split_once(':').map(|(key, _)| key));
    let (top_at, top) = lines.iter().enumerate().rev().find_map(|(at, line)| Some((at, *top_key(line)?)))?;
    let map = MAPS.iter().find(|map| map.name == top);
    let inner = lines.iter().enumerate().skip(top_at + 1).rev().find_map(|(at, line)| {
        let (key, _) = line.split_once(':')?;
        Some((at, *map?.keys.iter().find(|known| **known == key.trim_start())?))
    });
    let (at, path) = match inner {
        Some((at, key)) => (at, format!("{top}.{key}")),
        None => (top_at, top.to_owned()),
    };
    let last = *lines.last()?;
    let value = if at + 1 == lines.len() { last.split_once(':')?.1 } else { last };
    let value = value.split(" #").next().unwrap_or_default().trim();
    Some((path, value))
}

/// The fault of a value, in words of the file and not of its parser.
fn problem_of(path: &str, value: &str, error: &serde_saphyr::Error) -> String {
    // All keys of a map are on one line, so the value is not that of one key.
    if MAPS.iter().any(|map| map.name == path) {
        return text_of(error);
    }
    let key = path.rsplit('.').next().unwrap_or(path);
    match error {
        serde_saphyr::Error::Unexpected { expected, .. } if expected.contains("sequence") => {
            format!("{value:?} is no list; write it like {key}: [{value}]")
        }
        serde_saphyr::Error::InvalidScalar { ty: "boolean", .. } => format!("{value:?} is neither true nor false"),
        serde_saphyr::Error::InvalidScalar { .. } => format!("{value:?} is no whole number; write it like {key}: 500"),
        other => text_of(other),
    }
}

/// The first line of an error's own text, without the place.
fn text_of(error: &serde_saphyr::Error) -> String {
    if let serde_saphyr::Error::Message { msg, .. } = error {
        return msg.clone();
    }
    let text = error.to_string();
    let text = text.lines().next().unwrap_or_default();
    text.split_once(" at line ").map_or(text, |(text, _)| text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n";

    fn error(rest: &str) -> String {
        parse(&format!("{HEADER}{rest}")).unwrap_err()
    }

    #[test]
    fn a_file_sets_the_options_of_flags_and_its_own() {
        let text = format!(
            "{HEADER}listen: unix:/run/k.sock\nresources: [pods, deployments.apps]\nonDemand: false\nlistenMode: 0660\n\
             allowedHosts: [a.example]\nlimits:\n  ringBytesMax: 64Mi\n  ringAgeMax: 1m30s\n  onDemandBytesMax: 1000\n\
             tuning:\n  watchList: never\n  pageSize: 250\n"
        );
        let options = parse(&text).unwrap();
        assert_eq!(options.cache.resources.unwrap(), ["pods", "deployments.apps"]);
        assert_eq!(options.cache.ring_bytes_max.unwrap().0, 64 << 20);
        assert_eq!(options.on_demand.on_demand_bytes_max.unwrap().0, 1000);
        assert_eq!(options.serving.listen_mode.unwrap().to_string(), "0660");
        assert_eq!(options.serving.allowed_hosts.unwrap(), ["a.example"]);
        assert_eq!((options.upstream.page_size, options.on_demand.on_demand), (Some(250), Some(false)));
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        assert_eq!(
            error("listenMode: 0600\nresorces: [pods]\n"),
            "line 4: unknown key \"resorces\"; did you mean \"resources\"?"
        );
        for key in ["ringMaxAge", "ring-age-max"] {
            let expected = format!("line 4: unknown key {key:?}; did you mean \"ringAgeMax\"?");
            assert_eq!(error(&format!("limits:\n  {key}: 1m\n")), expected);
        }
        assert!(error("zzzzzzzzz: 1\n").starts_with("line 3: unknown key \"zzzzzzzzz\"; the keys are"));
        assert!(error("limits: {zzzzzzzzz: 1}\n").starts_with("line 3: unknown key \"zzzzzzzzz\"; the keys are"));
    }

    #[test]
    fn a_key_in_another_place_is_named_with_its_own() {
        for (text, expected) in [
            ("readsMax: 5\n", "line 3: readsMax is now limits.readsMax"),
            ("pageSize: 5\n", "line 3: pageSize is now tuning.pageSize"),
            ("limits:\n  pageSize: 5\n", "line 4: pageSize belongs under tuning"),
            ("tuning:\n  ringAgeMax: 5m\n", "line 4: ringAgeMax belongs under limits"),
            (
                "limits:\n  memoryMax: 1Gi\n",
                "line 4: memoryMax is no limit and no tuning; write it at the top of the file",
            ),
        ] {
            assert_eq!(error(text), expected);
        }
    }

    #[test]
    fn a_place_may_have_no_keys() {
        for text in ["limits:\ntuning:\n  # pageSize: 250\n", "limits: {}\n"] {
            assert_eq!(parse(&format!("{HEADER}{text}")), Ok(ServeOptions::default()), "{text}");
        }
        assert!(error("limits: [1]\n").starts_with("line 3: limits: "));
    }

    #[test]
    fn a_bad_value_or_document_is_one_line_with_its_place() {
        let bad = error("limits:\n  ringAgeMax: soon\n");
        assert!(bad.starts_with("line 4: ") && bad.contains("\"soon\" is no duration; write it like 30s"), "{bad}");
        let twice = error("tuning:\n  pageSize: 1\n  pageSize: 2\n");
        assert!(twice.contains("line 5") && twice.contains("pageSize"), "{twice}");
        for text in ["[", "a: b: c", "- x", "tuning: {pageSize: [1]}"] {
            let message = error(text);
            assert!(message.starts_with("line ") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn a_value_of_another_kind_is_named_with_its_key_and_an_example() {
        for (text, expected) in [
            ("resources: pods\n", "line 3: resources: \"pods\" is no list; write it like resources: [pods]"),
            (
                "onDemand: true\nnamespaces: a,b # both\n",
                "line 4: namespaces: \"a,b\" is no list; write it like namespaces: [a,b]",
            ),
            (
                "limits:\n  ringAgeMax: 15 minutes\n",
                "line 4: limits.ringAgeMax: \"15 minutes\" is no duration; write it like 30s, 1m30s or 500ms",
            ),
            (
                "limits:\n  ringEventsMax: 1\n  ringAgeMax: 900\n",
                "line 5: limits.ringAgeMax: \"900\" is no duration; write it like 30s, 1m30s or 500ms",
            ),
            (
                "limits:\n  ringBytesMax: 1MB\n",
                "line 4: limits.ringBytesMax: \"1MB\" is no size; write it like 64Mi, 1Gi or 65536",
            ),
            (
                "tuning:\n  pageSize: many\n",
                "line 4: tuning.pageSize: \"many\" is no whole number; write it like pageSize: 500",
            ),
            ("onDemand: perhaps\n", "line 3: onDemand: \"perhaps\" is neither true nor false"),
        ] {
            assert_eq!(error(text), expected);
        }
    }

    #[test]
    fn an_option_takes_the_name_of_its_flag_too_but_only_one_of_both() {
        let options = parse(&format!("{HEADER}resource: [pods]\nnamespace: [a]\n")).unwrap();
        assert_eq!(options.cache.resources.unwrap(), ["pods"]);
        assert_eq!(options.cache.namespaces.unwrap(), ["a"]);
        assert!(error("resource: [pods]\nresources: [nodes]\n").contains("resources is given twice, under two names"));
    }

    #[test]
    fn a_file_with_a_secret_is_not_quoted() {
        let key = format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", "TOPSECRET".repeat(7));
        let kubeconfig = "apiVersion: v1\nkind: [TOPSECRET, TOPSECRET]\nusers: {user: {token: TOPSECRET}\n";
        for text in [&*key, &key.replace('\n', " "), &key.replace('\n', "\\n"), "TOPSECRET", kubeconfig] {
            let message = parse(text).unwrap_err();
            assert!(!message.contains("TOPSECRET"), "{message}");
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
