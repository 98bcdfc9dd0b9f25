//! The seeds in `seeds.txt`: for each bug one that finds it. The file is read and written in the
//! root of the repository, where the program is started, because the program is compiled from a
//! copy.

use std::{collections::HashMap, fs};

use kubefan_common::planted::Bug;

const FILE: &str = "tests/simulation/planted/seeds.txt";

/// The command that brings the file up to date.
pub(super) const RENEW: &str = "run KUBEFAN_RENEW_SEEDS=1 $(tests/simulation/planted/build) in the root of the repository, and commit tests/simulation/planted/seeds.txt";

/// The recorded seed of each bug.
pub(super) struct RecordedSeeds {
    seeds: HashMap<Bug, u64>,
    /// Names of bugs that do not exist.
    unknown: Vec<String>,
}

impl RecordedSeeds {
    /// Reads the file.
    ///
    /// # Errors
    /// If it cannot be read, or a line is not a name and a number.
    pub(super) fn read() -> Result<Self, String> {
        let text = fs::read_to_string(FILE)
            .map_err(|error| format!("{FILE}: {error}. The program must be started in the root of the repository"))?;
        let mut seeds = HashMap::new();
        let mut unknown = Vec::new();
        for line in text.lines() {
            let parsed = line.split_once(' ').and_then(|(name, seed)| Some((name, seed.parse().ok()?)));
            let (name, seed) = parsed.ok_or_else(|| format!("{FILE}: {line:?} is not a name and a seed"))?;
            match Bug::ALL.iter().find(|bug| bug.name() == name) {
                Some(bug) => drop(seeds.insert(*bug, seed)),
                None => unknown.push(name.to_owned()),
            }
        }
        Ok(Self { seeds, unknown })
    }

    /// Whether the file has each bug and no other.
    ///
    /// # Errors
    /// If not. The message names the bugs.
    pub(super) fn check(&self) -> Result<(), String> {
        let missing = Bug::ALL.iter().filter(|bug| !self.seeds.contains_key(bug)).map(|bug| bug.name());
        let missing: Vec<_> = missing.collect();
        if missing.is_empty() && self.unknown.is_empty() {
            return Ok(());
        }
        let list = |names: &[&str]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let unknown: Vec<_> = self.unknown.iter().map(String::as_str).collect();
        Err(format!(
            "{FILE}: missing bugs: {}; unknown names: {}. To correct it, {RENEW}",
            list(&missing),
            list(&unknown)
        ))
    }

    /// The seed that found the bug last.
    pub(super) fn seed(&self, bug: Bug) -> Option<u64> {
        self.seeds.get(&bug).copied()
    }

    /// Replaces the seed of a bug, if there is a new one.
    pub(super) fn replace(&mut self, bug: Bug, seed: Option<u64>) {
        self.seeds.extend(seed.map(|seed| (bug, seed)));
    }

    /// Writes the file, in the order of [`Bug::ALL`].
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write(&self) -> Result<(), String> {
        let lines = Bug::ALL.iter().filter_map(|bug| Some(format!("{} {}\n", bug.name(), self.seed(*bug)?)));
        fs::write(FILE, lines.collect::<String>()).map_err(|error| format!("{FILE}: {error}"))
    }
}
