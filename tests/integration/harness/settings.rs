//! Settings that have no flags, as arguments of tests: `limits.readsMax=5`. They go to a
//! configuration file.

use std::{fs, path::Path};

use kubefan_app::config::settings;
use tempfile::NamedTempFile;

/// The arguments of kubefan, in which a file stands for the settings. Dropping it deletes the file.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) args: Vec<String>,
    _file: Option<NamedTempFile>,
}

impl Arguments {
    /// Writes the file, with the content of the one that `--config=FILE` names, if there is one.
    pub(crate) fn new(args: &[&str]) -> Arguments {
        let (given, flags): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| settings::is_setting(arg));
        if given.is_empty() {
            return Arguments { args: flags.into_iter().map(str::to_owned).collect(), _file: None };
        }
        let base = flags.iter().find_map(|flag| flag.strip_prefix("--config="));
        let text = match base {
            Some(path) => fs::read_to_string(path).expect("the file is there") + &settings::entries(&given),
            None => settings::text_of(&given),
        };
        let file = NamedTempFile::with_suffix_in(".yaml", Path::new(env!("CARGO_TARGET_TMPDIR")));
        let file = file.expect("a file is made");
        fs::write(file.path(), text).expect("the file is written");
        let mut args: Vec<_> =
            flags.iter().filter(|flag| !flag.starts_with("--config=")).map(ToString::to_string).collect();
        args.push(format!("--config={}", file.path().display()));
        Arguments { args, _file: Some(file) }
    }
}
