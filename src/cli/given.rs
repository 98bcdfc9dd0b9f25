//! The origin of a wrong value. clap and the configuration name the flag, also for a value that an
//! environment variable set, and an operator who set `KUBEFAN_MEMORY_MAX` looks for that name.

use std::ffi::OsString;

use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

use kubefan_app::config::moved;

/// The arguments and variables of this process.
pub(super) struct Given<'a> {
    /// All commands.
    pub(super) command: &'a Command,
    /// The arguments; the first is the program.
    pub(super) args: &'a [OsString],
    /// Whether an environment variable is set.
    pub(super) is_set: fn(&str) -> bool,
}

impl Given<'_> {
    /// The environment variable that a flag (`--memory-max`) has its value from; `None` if the flag
    /// itself is on the command line, or the variable is not set.
    pub(super) fn variable_of(&self, flag: &str) -> Option<String> {
        let subcommand = self.command.find_subcommand(self.args.get(1)?)?;
        let long = flag.strip_prefix("--")?;
        let arg = subcommand.get_arguments().find(|arg| arg.get_long() == Some(long))?;
        let variable = arg.get_env()?.to_str()?;
        let mut names: Vec<_> = arg.get_all_aliases().into_iter().flatten().map(|name| format!("--{name}")).collect();
        names.push(flag.to_owned());
        let short = arg.get_short().map(|short| format!("-{short}"));
        let is_flag = |given: &OsString| {
            let given = given.to_string_lossy();
            names
                .iter()
                .any(|name| given.strip_prefix(&**name).is_some_and(|rest| rest.is_empty() || rest.starts_with('=')))
                || short.as_ref().is_some_and(|short| given.starts_with(&**short))
        };
        (!self.args.iter().any(is_flag) && (self.is_set)(variable)).then(|| variable.to_owned())
    }

    /// The new place of the flag of an earlier version that the parser does not know; `None` for
    /// every other error.
    pub(super) fn moved(&self, error: &clap::Error) -> Option<String> {
        let has_options = ["serve", "check"].iter().any(|name| self.args.get(1).is_some_and(|arg| arg == name));
        let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg) else { return None };
        if !has_options || error.kind() != ErrorKind::UnknownArgument {
            return None;
        }
        let flag = arg.split('=').next().unwrap_or_default();
        Some(format!("{flag} is now {}", moved::flag(flag)?))
    }

    /// The error, in which the variable that has a wrong value stands for its flag.
    pub(super) fn with_variable(&self, mut error: clap::Error) -> clap::Error {
        if let (ErrorKind::InvalidValue | ErrorKind::ValueValidation, Some(ContextValue::String(arg))) =
            (error.kind(), error.get(ContextKind::InvalidArg))
            && let Some(variable) = self.variable_of(arg.split(['=', ' ', '[']).next().unwrap_or_default())
        {
            error.insert(ContextKind::InvalidArg, ContextValue::String(variable));
        }
        error
    }
}

/// Whether an environment variable is set.
pub(super) fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some()
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    fn command() -> Command {
        let memory_max = Arg::new("memory_max").long("memory-max").env("KUBEFAN_TEST_MEMORY_MAX");
        let memory_max = memory_max.value_name("COUNT").value_parser(clap::value_parser!(u32));
        let namespace = Arg::new("namespaces").long("namespace").alias("namespaces").short('n').env("KUBEFAN_TEST_N");
        Command::new("kubefan").subcommand(Command::new("serve").args([memory_max, namespace, Arg::new("x").long("x")]))
    }

    fn args(words: &[&str]) -> Vec<OsString> {
        ["kubefan"].iter().chain(words).map(OsString::from).collect()
    }

    #[test]
    fn a_value_is_of_the_variable_unless_the_flag_is_given() {
        let command = command();
        let variable = |flag: &str, words: &[&str]| {
            Given { command: &command, args: &args(words), is_set: |_| true }.variable_of(flag)
        };
        assert_eq!(variable("--memory-max", &["serve", "--x=1"]).unwrap(), "KUBEFAN_TEST_MEMORY_MAX");
        assert_eq!(variable("--namespace", &["serve", "--namespaced"]).unwrap(), "KUBEFAN_TEST_N");
        for given in ["--memory-max", "--memory-max=7"] {
            assert_eq!(variable("--memory-max", &["serve", given, "7"]), None);
        }
        for given in ["--namespace", "--namespaces=a", "-n", "-na"] {
            assert_eq!(variable("--namespace", &["serve", given]), None, "{given}");
        }
        assert_eq!(variable("--x", &["serve"]), None, "it has no variable");
        assert_eq!(variable("--memory-max", &["get"]), None);
        let unset = Given { command: &command, args: &args(&["serve"]), is_set: |_| false };
        assert_eq!(unset.variable_of("--memory-max"), None);
    }

    #[test]
    fn a_flag_of_an_earlier_version_is_refused_with_its_new_place() {
        let command = command();
        let moved = |words: &[&str]| {
            let args = args(words);
            let error = command.clone().try_get_matches_from(&args).unwrap_err();
            Given { command: &command, args: &args, is_set: |_| false }.moved(&error)
        };
        let expected = "--page-size is now tuning.pageSize in the configuration file (--config)";
        for words in [&["serve", "--page-size=7"][..], &["serve", "--page-size", "7"]] {
            assert_eq!(moved(words).as_deref(), Some(expected));
        }
        assert_eq!(moved(&["serve", "--zebra"]), None);
        assert_eq!(moved(&["get", "--page-size=7"]), None, "it is no command here");
    }

    #[test]
    fn an_error_of_the_parser_names_the_variable() {
        let command = command();
        let words = args(&["serve", "--memory-max=many"]);
        let error = || command.clone().try_get_matches_from(&words).unwrap_err();
        let message =
            |args: &[OsString]| Given { command: &command, args, is_set: |_| true }.with_variable(error()).to_string();
        assert!(message(&words).starts_with("error: invalid value 'many' for '--memory-max <COUNT>'"));
        let by_variable = message(&args(&["serve"]));
        assert!(by_variable.starts_with("error: invalid value 'many' for 'KUBEFAN_TEST_MEMORY_MAX'"), "{by_variable}");
    }
}
