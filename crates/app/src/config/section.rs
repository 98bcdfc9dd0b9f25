//! `section!` declares each option once, in the section that it belongs to.
//!
//! An option is a flag or a key of the configuration file alone. The declaration of a flag gives
//! the flag with its help, heading and value name, the environment variable, the key in the file,
//! the default, the overlay (default < file < environment < flag) and the checked field of the
//! configuration. Were these written separately, an option could be added to the flags and
//! forgotten in the file. The declaration of a key gives the same without flag and variable, and
//! its documentation (docs/configuration.md).
//!
//! An option whose flag has a name of its own (`--resource`, key `resources`) takes both names in
//! all three places. Otherwise the name that is right in one place is ignored in another.

use serde::de::MapAccess;

/// The options under one heading of `--help`. All are optional.
pub(super) trait Section: Sized {
    /// The keys in the configuration file that have flags.
    const KEYS: &'static [&'static str];

    /// The keys without flags.
    const FILE_KEYS: &'static [FileKey];

    /// The environment variables with a second name.
    const SECOND_VARIABLES: &'static [SecondVariable];

    /// Completes the options that are not set from `lower`. A list replaces a list.
    fn overlay(self, lower: Self) -> Self;

    /// Reads the value of a key in the map `map_name`, which is empty for a key that has a flag.
    /// Returns false if the key does not belong to this section.
    fn read<'de, M: MapAccess<'de>>(&mut self, map_name: &str, key: &str, map: &mut M) -> Result<bool, M::Error>;

    /// The defaults of flags as `--help` shows them, by field name.
    fn default_texts() -> Vec<(&'static str, String)>;

    /// The defaults of keys without flags, by path.
    #[cfg(test)]
    fn key_default_texts() -> Vec<(&'static str, String)>;
}

/// A key of the configuration file that has no flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileKey {
    /// The map that it is in: `limits` or `tuning`.
    pub map: &'static str,
    /// Name of the key in that map.
    pub name: &'static str,
    /// Map and name, such as `limits.readsMax`.
    pub path: &'static str,
    /// The kind of its value, such as `COUNT`.
    pub value: &'static str,
    /// The type of its value in Rust.
    pub given: &'static str,
    /// Documentation of the key.
    pub help: &'static str,
}

/// An environment variable with a second name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecondVariable {
    /// The field of the option, which is its name on the command line's parser.
    pub field: &'static str,
    /// The name that help shows.
    pub first: &'static str,
    /// The second name of the variable.
    pub second: &'static str,
    /// Whether other programs read it under that name. Then kubefan's own name comes first, and
    /// nothing is refused because of the other.
    pub is_foreign: bool,
}

/// Declares a section: its options and the configuration that they become.
///
/// ```text
/// section! {
///     heading: "Serving";
///     /// Documents the options.
///     options: ServingOptions;
///     /// Documents the configuration.
///     config: ServingConfig {
///         /// A field made from several options, by a function of all of them.
///         tls: Option<TlsFiles>, tls_files;
///     }
///
///     /// The help. `COUNT` is the value's name. 500 is the default, and is shown in the help.
///     /// `at_least(1)` checks what is given and converts it to the field's type.
///     page_size("COUNT"): u32 = 500 => page_size: u32, at_least(1);
///     /// An option without a default: the rule gets an `Option`.
///     memory_max("SIZE"): ByteSize => memory_bytes_max: Option<u64>, optional(size(1));
///     /// An option that only the functions above read.
///     tls_cert_file("FILE"): PathBuf;
///     /// The flag is --resource, the key in the file is `resources`. Both places take both.
///     namespaces as namespace("NAME"): Vec<String> => namespaces: Vec<String>, names(...);
///
///     [keys]
///     /// The documentation of `limits.readsMax`, which has no flag.
///     limits.reads_max("COUNT"): usize = 5_000 => reads_max: usize, at_least(1);
///     /// The functions above read it and set the default, which is shown.
///     tuning.tls_managed_lifetime("DURATION"): Duration, default: Duration(LIFETIMES.certificate);
/// }
/// ```
macro_rules! section {
    (
        heading: $heading:literal;
        $(#[$options_attr:meta])*
        options: $options:ident;
        $(#[$config_attr:meta])*
        config: $config:ident {
            $($(#[$derived_attr:meta])* $derived:ident: $derived_type:ty, $derive:path;)*
        }
        $(
            $(#[$attr:meta])*
            $name:ident $(as $flag:ident)? ($value_name:literal): $given:ty
            $(= $default:expr => $field:ident: $type:ty, $rule:expr)?
            $(=> $bare_field:ident: $bare_type:ty, $bare_rule:expr)?
            $(, default: $shown:expr)?;
        )*
        $(
            [keys]
            $(
                $(#[doc = $key_doc:literal])*
                $map:ident.$key:ident ($key_value:literal): $key_given:ty
                $(= $key_default:expr => $key_field:ident: $key_type:ty, $key_rule:expr)?
                $(=> $bare_key_field:ident: $bare_key_type:ty, $bare_key_rule:expr)?
                $(, default: $key_shown:expr)?;
            )*
        )?
    ) => {
        $(#[$options_attr])*
        #[derive(Debug, Clone, Default, PartialEq, clap::Args)]
        pub struct $options {
            $(
                #[arg(
                    long = $crate::config::section::flag_name!("", Kebab, $name $(, $flag)?),
                    env = $crate::config::section::flag_name!("KUBEFAN_", Upper, $name $(, $flag)?),
                    help_heading = $heading,
                    value_name = $value_name
                )]
                $(#[arg(alias = $crate::config::section::second_name!("", Kebab, $name, $flag))])?
                $(#[$attr])*
                pub $name: Option<$given>,
            )*
            $($(
                $(#[doc = $key_doc])*
                #[arg(skip)]
                pub $key: Option<$key_given>,
            )*)?
        }

        $(#[$config_attr])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $config {
            $($(#[$derived_attr])* pub $derived: $derived_type,)*
            $($(
                #[doc = concat!("From [`", stringify!($options), "::", stringify!($name), "`].")]
                pub $field: $type,
            )?)*
            $($(
                #[doc = concat!("From [`", stringify!($options), "::", stringify!($name), "`].")]
                pub $bare_field: $bare_type,
            )?)*
            $($($(
                #[doc = concat!("From [`", stringify!($options), "::", stringify!($key), "`].")]
                pub $key_field: $key_type,
            )?)*)?
            $($($(
                #[doc = concat!("From [`", stringify!($options), "::", stringify!($key), "`].")]
                pub $bare_key_field: $bare_key_type,
            )?)*)?
        }

        impl $options {
            /// Completes the options by the defaults and checks each value.
            #[allow(unused_variables, reason = "an option without a field of its own needs no name here")]
            pub(super) fn resolve(self) -> Result<$config, $crate::config::ConfigError> {
                $(let $name = $crate::config::section::flag_name!("--", Kebab, $name $(, $flag)?);)*
                $($(let $key = $crate::config::section::key_path!($map, $key);)*)?
                Ok($config {
                    $($derived: $derive(&self)?,)*
                    $($($field: ($rule)($name, self.$name.unwrap_or_else(|| $default))?,)?)*
                    $($($bare_field: ($bare_rule)($name, self.$name)?,)?)*
                    $($($($key_field: ($key_rule)($key, self.$key.unwrap_or_else(|| $key_default))?,)?)*)?
                    $($($($bare_key_field: ($bare_key_rule)($key, self.$key)?,)?)*)?
                })
            }
        }

        impl $options {
            /// The keys of the settings that differ.
            #[allow(unused_variables, reason = "an option with a field of its own is compared as such")]
            pub(super) fn changed(options: (&Self, &Self), config: (&$config, &$config)) -> Vec<&'static str> {
                let mut changed = Vec::new();
                $(
                    let same = $crate::config::section::is_same!(
                        options, config, $name $(, $field)? $(, $bare_field)?
                    );
                    if !same {
                        changed.push($crate::config::names::spelled!("", Camel, $name));
                    }
                )*
                $($(
                    let same = $crate::config::section::is_same!(
                        options, config, $key $(, $key_field)? $(, $bare_key_field)?
                    );
                    if !same {
                        changed.push($crate::config::section::key_path!($map, $key));
                    }
                )*)?
                changed
            }
        }

        impl $crate::config::section::Section for $options {
            const KEYS: &'static [&'static str] = &[$(
                $crate::config::names::spelled!("", Camel, $name),
                $($crate::config::names::spelled!("", Camel, $flag),)?
            )*];

            const FILE_KEYS: &'static [$crate::config::section::FileKey] = &[$($($crate::config::section::FileKey {
                map: stringify!($map),
                name: $crate::config::names::spelled!("", Camel, $key),
                path: $crate::config::section::key_path!($map, $key),
                value: $key_value,
                given: stringify!($key_given),
                help: concat!($($key_doc),*),
            },)*)?];

            const SECOND_VARIABLES: &'static [$crate::config::section::SecondVariable] =
                &[$($($crate::config::section::SecondVariable {
                    field: stringify!($name),
                    first: $crate::config::names::spelled!("KUBEFAN_", Upper, $flag),
                    second: $crate::config::section::second_name!("KUBEFAN_", Upper, $name, $flag),
                    is_foreign: false,
                },)?)*];

            fn overlay(self, lower: Self) -> Self {
                Self {
                    $($name: self.$name.or(lower.$name),)*
                    $($($key: self.$key.or(lower.$key),)*)?
                }
            }

            fn read<'de, M: serde::de::MapAccess<'de>>(
                &mut self,
                map_name: &str,
                key: &str,
                map: &mut M,
            ) -> Result<bool, M::Error> {
                $(if map_name.is_empty() && (key == $crate::config::names::spelled!("", Camel, $name)
                    $(|| key == $crate::config::names::spelled!("", Camel, $flag))?)
                {
                    if self.$name.is_some() {
                        let name = $crate::config::names::spelled!("", Camel, $name);
                        return Err(serde::de::Error::custom(format_args!("{name} is given twice, under two names")));
                    }
                    self.$name = map.next_value()?;
                    return Ok(true);
                })*
                $($(if map_name == stringify!($map) && key == $crate::config::names::spelled!("", Camel, $key) {
                    self.$key = map.next_value()?;
                    return Ok(true);
                })*)?
                Ok(false)
            }

            fn default_texts() -> Vec<(&'static str, String)> {
                vec![
                    $($({
                        let default: $given = $default;
                        (stringify!($name), default.to_string())
                    },)?)*
                    $($({
                        let default: $given = $shown;
                        (stringify!($name), default.to_string())
                    },)?)*
                ]
            }

            #[cfg(test)]
            fn key_default_texts() -> Vec<(&'static str, String)> {
                vec![
                    $($($({
                        let default: $key_given = $key_default;
                        ($crate::config::section::key_path!($map, $key), default.to_string())
                    },)?)*)?
                    $($($({
                        let default: $key_given = $key_shown;
                        ($crate::config::section::key_path!($map, $key), default.to_string())
                    },)?)*)?
                ]
            }
        }
    };
}
pub(super) use section;

/// Whether an option is the same: as its field of the configuration, or as it was given.
macro_rules! is_same {
    ($options:ident, $config:ident, $name:ident) => {
        $options.0.$name == $options.1.$name
    };
    ($options:ident, $config:ident, $name:ident, $field:ident) => {
        $config.0.$field == $config.1.$field
    };
}
pub(super) use is_same;

/// The name of an option's flag: that of its field, unless the declaration names another.
macro_rules! flag_name {
    ($prefix:literal, $spelling:ident, $field:ident) => {
        $crate::config::names::spelled!($prefix, $spelling, $field)
    };
    ($prefix:literal, $spelling:ident, $field:ident, $flag:ident) => {
        $crate::config::names::spelled!($prefix, $spelling, $flag)
    };
}
pub(super) use flag_name;

/// The second name of an option whose flag has a name of its own: that of its field.
macro_rules! second_name {
    ($prefix:literal, $spelling:ident, $field:ident, $flag:ident) => {
        $crate::config::names::spelled!($prefix, $spelling, $field)
    };
}
pub(super) use second_name;

/// The path of a key that has no flag: `key_path!(limits, reads_max)` is `"limits.readsMax"`.
macro_rules! key_path {
    ($map:ident, $key:ident) => {
        $crate::config::names::spelled!(concat!(stringify!($map), "."), Camel, $key)
    };
}
pub(super) use key_path;
