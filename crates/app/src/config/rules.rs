//! The rules that a section applies to an option: each checks a given value and converts it to the
//! type that the configuration holds. Zeros and spans that cannot be meant are errors here, before
//! anything is started.

use std::{collections::HashSet, fmt, path::PathBuf, time};

use super::{ByteSize, Duration};

/// A configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("--config {}: {message}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The problem, with the line.
        message: String,
    },
    /// A value cannot be used.
    #[error("{flag} {value:?}: {problem}")]
    Value {
        /// The flag, or the path of a key that has none. The environment variable and the key of a
        /// flag are the same name, spelled their way.
        flag: &'static str,
        /// The value that was given.
        value: String,
        /// The reason why it cannot be used, and the remedy.
        problem: String,
    },
    /// Two options contradict each other, or one needs another.
    #[error("{0}")]
    Contradiction(String),
}

impl ConfigError {
    /// The result of a check that found two options in contradiction.
    pub(super) fn contradiction<T>(text: impl Into<String>) -> Result<T, Self> {
        Err(Self::Contradiction(text.into()))
    }
}

/// An option, by its flag or the path of its key, and whether it is given.
pub(super) type Given = (&'static str, bool);

/// Refuses an option that is given without another one that it needs.
pub(super) fn needs(option: Given, other: Given) -> Result<(), ConfigError> {
    if option.1 && !other.1 {
        return ConfigError::contradiction(format!("{} needs {}", option.0, other.0));
    }
    Ok(())
}

/// Refuses one of two options without the other one.
pub(super) fn together(first: Given, second: Given) -> Result<(), ConfigError> {
    needs(first, second)?;
    needs(second, first)
}

/// An option's flag or the path of its key, for error texts.
type Flag = &'static str;

/// Takes every value.
pub(super) fn any<T>(_: Flag, given: T) -> Result<T, ConfigError> {
    Ok(given)
}

/// An option that is off unless given.
pub(super) fn or_false(_: Flag, given: Option<bool>) -> Result<bool, ConfigError> {
    Ok(given.unwrap_or(false))
}

/// Applies `rule` if the option is given.
pub(super) fn optional<G, T>(
    rule: impl Fn(Flag, G) -> Result<T, ConfigError>,
) -> impl Fn(Flag, Option<G>) -> Result<Option<T>, ConfigError> {
    move |flag, given| given.map(|given| rule(flag, given)).transpose()
}

/// Takes `least` and more.
pub(super) fn at_least<T: PartialOrd + fmt::Display>(least: T) -> impl Fn(Flag, T) -> Result<T, ConfigError> {
    move |flag, given| {
        if given < least {
            return Err(unusable(flag, given, format!("must be at least {least}")));
        }
        Ok(given)
    }
}

/// Takes `least` bytes and more.
pub(super) fn size(least: u64) -> impl Fn(Flag, ByteSize) -> Result<u64, ConfigError> {
    move |flag, given| at_least(ByteSize(least))(flag, given).map(|size| size.0)
}

/// As [`size`], for a limit on memory: more than a machine can address is as much as it can.
pub(super) fn size_in_memory(least: u64) -> impl Fn(Flag, ByteSize) -> Result<usize, ConfigError> {
    move |flag, given| size(least)(flag, given).map(|size| usize::try_from(size).unwrap_or(usize::MAX))
}

/// Takes every duration, zero included.
pub(super) fn any_duration(_: Flag, given: Duration) -> Result<time::Duration, ConfigError> {
    Ok(given.0)
}

/// A duration of at most a day, zero included.
pub(super) fn up_to_a_day(flag: Flag, given: Duration) -> Result<time::Duration, ConfigError> {
    if given.0 > time::Duration::from_secs(24 * 3600) {
        return Err(unusable(flag, given, "must be at most 24h"));
    }
    Ok(given.0)
}

/// A duration that kubefan waits for. Less than a second would be a busy loop or would end every
/// response; more than a day could overflow a timer.
pub(super) fn wait(flag: Flag, given: Duration) -> Result<time::Duration, ConfigError> {
    let least = time::Duration::from_secs(1);
    let most = time::Duration::from_secs(24 * 3600);
    if given.0 < least || given.0 > most {
        return Err(unusable(flag, given, "must be from 1s to 24h"));
    }
    Ok(given.0)
}

/// As [`wait`]; zero turns the option off.
pub(super) fn wait_or_never(flag: Flag, given: Duration) -> Result<Option<time::Duration>, ConfigError> {
    if given.0.is_zero() { Ok(None) } else { wait(flag, given).map(Some) }
}

/// A list of distinct names, empty unless given. `otherwise` is the problem of a text that is not
/// a name. Two names that differ only in case are equal.
pub(super) fn names(
    is_name: fn(&str) -> bool,
    otherwise: &'static str,
) -> impl Fn(Flag, Option<Vec<String>>) -> Result<Vec<String>, ConfigError> {
    move |flag, given| {
        let given = given.unwrap_or_default();
        let mut seen = HashSet::new();
        for name in &given {
            if !is_name(name) {
                return Err(unusable(flag, name, otherwise));
            }
            if !seen.insert(name.to_lowercase()) {
                return Err(unusable(flag, name, "given twice; once is enough"));
            }
        }
        Ok(given)
    }
}

/// The error of a value that cannot be used.
pub(super) fn unusable(flag: Flag, value: impl fmt::Display, problem: impl Into<String>) -> ConfigError {
    ConfigError::Value { flag, value: value.to_string(), problem: problem.into() }
}
