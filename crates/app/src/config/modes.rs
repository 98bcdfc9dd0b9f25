//! The key `modes` of the configuration file: who answers reads of which resources. It has no flag,
//! because it is for changes while kubefan runs.

use kubefan_access::modes::{Mode, ModeRule, Modes};
use serde::de::MapAccess;

use super::{
    ConfigError,
    access::{Access, Requirement},
    rules::unusable,
    section::{FileKey, SecondVariable, Section},
};

/// The switches of reads, as given.
#[derive(Debug, Clone, Default, PartialEq, clap::Args)]
pub struct ModeOptions {
    /// The rules, in their order.
    #[arg(skip)]
    pub modes: Option<Vec<ModeRule>>,
}

/// The switches of reads: which ones the apiserver answers, or nothing does.
#[derive(Debug, Clone, PartialEq)]
pub struct ModeConfig {
    /// The rules.
    pub modes: Modes,
}

impl Section for ModeOptions {
    const KEYS: &'static [&'static str] = &["modes"];
    const FILE_KEYS: &'static [FileKey] = &[];
    const SECOND_VARIABLES: &'static [SecondVariable] = &[];

    fn overlay(self, lower: Self) -> Self {
        Self { modes: self.modes.or(lower.modes) }
    }

    fn read<'de, M: MapAccess<'de>>(&mut self, map_name: &str, key: &str, map: &mut M) -> Result<bool, M::Error> {
        if !map_name.is_empty() || key != "modes" {
            return Ok(false);
        }
        self.modes = map.next_value()?;
        Ok(true)
    }

    fn default_texts() -> Vec<(&'static str, String)> {
        Vec::new()
    }

    #[cfg(test)]
    fn key_default_texts() -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

impl ModeOptions {
    pub(super) fn resolve(self) -> Result<ModeConfig, ConfigError> {
        Ok(ModeConfig { modes: Modes::new(self.modes.unwrap_or_default()) })
    }

    /// The keys of the settings that differ.
    pub(super) fn changed(_: (&Self, &Self), config: (&ModeConfig, &ModeConfig)) -> Vec<&'static str> {
        if config.0 == config.1 { Vec::new() } else { vec!["modes"] }
    }
}

impl ModeConfig {
    /// Refuses rules that could not be followed.
    pub(super) fn check(&self, access: Access) -> Result<(), ConfigError> {
        let any = |is_wrong: fn(&ModeRule) -> bool| self.modes.rules().iter().any(is_wrong);
        if any(|rule| rule.mode == Mode::Passthrough) {
            access.require("mode: Passthrough", &[Requirement::Forwarding])?;
        }
        if any(ModeRule::names_callers) {
            access.require("a mode with users or groups", &[Requirement::KnownCallers])?;
        }
        if any(|rule| rule.resources.is_empty()) {
            let problem = "a rule for no resource; name resources, like resources: [pods], or [\"*\"] for all";
            return Err(unusable("modes", "resources: []", problem));
        }
        Ok(())
    }
}
