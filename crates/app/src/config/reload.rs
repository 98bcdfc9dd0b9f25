//! The configuration file while kubefan runs: reads it again, and says which settings differ.
//!
//! A file is taken as a whole or not at all. So a change of a setting that only a restart can apply
//! refuses the whole file: what runs is always what one file says.

use std::path::{Path, PathBuf};

use super::{ConfigError, ServeConfig, ServeOptions, file};

/// The settings that a running kubefan takes over, by their keys in the file. All others need a
/// restart. `live_settings::apply` must take over each of them.
pub const LIVE: [&str; 7] = [
    "maxStaleness",
    "modes",
    "limits.readsMax",
    "limits.readsMaxPerIdentity",
    "resources",
    "limits.subscribersMax",
    "limits.subscribersMaxPerIdentity",
];

/// The configuration file, with the flags and variables that win over it.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    path: PathBuf,
    flags: ServeOptions,
}

/// A configuration, and what was given for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Configured {
    options: ServeOptions,
    /// The configuration.
    pub config: ServeConfig,
}

impl Configured {
    /// Checks what was given.
    ///
    /// # Errors
    /// A value cannot be used, or two contradict each other.
    pub fn new(mut options: ServeOptions) -> Result<Self, ConfigError> {
        let config = options.clone().validate()?;
        // A default that is written out is no change.
        options.callers.access = Some(config.access);
        options.callers.service_account_jwks.take_if(|checks_tokens| !*checks_tokens);
        options.callers.authorization_ignore_extra.take_if(|keys| keys.is_empty());
        Ok(Self { config, options })
    }

    /// The keys of the settings that differ from `other`.
    pub fn changed(&self, other: &Self) -> Vec<&'static str> {
        ServeOptions::changed((&self.options, &other.options), (&self.config, &other.config))
    }
}

impl ConfigFile {
    /// The file at a path, which `flags` win over.
    pub fn new(path: PathBuf, flags: ServeOptions) -> Self {
        Self { path, flags }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the content of the file. Blocks meanwhile.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn content(&self) -> Result<String, ConfigError> {
        file::content(&self.path)
    }

    /// The configuration that a content of the file, the flags and the variables make together.
    ///
    /// # Errors
    /// The fault, with the line if it is in the file.
    pub fn parse(&self, content: &str) -> Result<Configured, ConfigError> {
        Configured::new(self.flags.clone().overlay(file::parse_at(&self.path, content)?))
    }
}

/// Refusal of a change, which names the settings that need a restart. `None` if all are live.
pub fn needs_restart(changed: &[&'static str]) -> Option<String> {
    let fixed: Vec<&str> = changed.iter().copied().filter(|key| !LIVE.contains(key)).collect();
    (!fixed.is_empty()).then(|| {
        format!(
            "{} cannot be changed without a restart; nothing of the file is applied: restart kubefan, or undo this change",
            fixed.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nresources: [pods]\n";

    fn configured(rest: &str) -> Result<Configured, String> {
        let file = ConfigFile::new("kubefan.yaml".into(), ServeOptions::default());
        file.parse(&format!("{HEADER}{rest}")).map_err(|error| error.to_string())
    }

    #[test]
    fn every_live_setting_is_a_setting() {
        let mut keys = ServeOptions::keys();
        keys.extend(ServeOptions::file_keys().iter().map(|key| key.path));
        assert!(LIVE.iter().all(|key| keys.contains(key)), "{LIVE:?}");
    }

    #[test]
    fn settings_that_differ_are_named_and_a_default_that_is_written_out_does_not_differ() {
        let changed = |rest: &str| configured(rest).unwrap().changed(&configured("").unwrap());
        assert!(changed("tuning: {pageSize: 500, requireUpstream: false}\nmodes: []\n").is_empty());
        assert!(changed("tuning: {serviceAccountJwks: false, authorizationIgnoreExtra: []}\n").is_empty());
        assert_eq!(changed("tuning: {pageSize: 501}\n"), ["tuning.pageSize"]);
        assert_eq!(changed("modes: [{resources: [pods], mode: Deny}]\n"), ["modes"]);
        assert_eq!(
            changed("tlsCertFile: a\ntlsPrivateKeyFile: b\naccess: local\n"),
            ["tlsCertFile", "tlsPrivateKeyFile"]
        );
        let text = needs_restart(&["modes", "listen", "kubeconfig"]).unwrap();
        assert!(text.starts_with("listen, kubeconfig cannot be changed without a restart"), "{text}");
        assert_eq!(needs_restart(&LIVE), None);
    }

    #[test]
    fn a_wrong_rule_is_named_with_its_line_and_the_way_out() {
        let rule = |rest: &str| configured(&format!("modes:\n  - resources: [pods]\n    {rest}\n")).unwrap_err();
        for (rest, expected) in [
            ("mode: Off", "--config kubefan.yaml: line 6: modes: "),
            (
                "mode: Deny\n    user: [x]",
                "--config kubefan.yaml: line 7: unknown key \"user\"; did you mean \"users\"?",
            ),
            (
                "mode: Deny\n    users: [a*b]",
                "--config kubefan.yaml: line 7: modes: \"a*b\" is no name; write it exactly",
            ),
            ("users: [x]", "--config kubefan.yaml: line 6: modes: missing field `mode`"),
            ("mode: Deny\n    users: [x]", "a mode with users or groups would restrict nobody with --access=local"),
            (
                "mode: Passthrough\naccess: local-cache-only",
                "mode: Passthrough needs requests to be forwarded to the apiserver",
            ),
        ] {
            let error = rule(rest);
            assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
        }
        let none = configured("modes: [{resources: [], mode: Deny}]\n").unwrap_err();
        assert!(none.contains("a rule for no resource"), "{none}");
    }
}
