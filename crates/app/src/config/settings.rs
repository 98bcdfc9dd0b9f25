//! The configuration file as programs write it: benchmarks and tests start kubefan with settings
//! that have no flags.

/// `apiVersion` of the file.
pub const API_VERSION: &str = "kubefan.dev/v1alpha1";
/// `kind` of the file.
pub const KIND: &str = "ServeConfiguration";
/// The maps of the keys that have no flags.
pub(super) const MAPS: [&str; 2] = ["limits", "tuning"];

/// Whether an argument is a setting of the file, such as `limits.readsMax=5`.
pub fn is_setting(argument: &str) -> bool {
    argument.split_once('.').is_some_and(|(map, _)| MAPS.contains(&map))
}

/// The text of a file with these settings, each like `limits.readsMax=5`. The value is YAML: a list
/// is written like `[a, b]`. A setting without a value is true.
pub fn text_of(settings: &[&str]) -> String {
    format!("apiVersion: {API_VERSION}\nkind: {KIND}\n{}", entries(settings))
}

/// The settings as a configuration file without its header, for a file without these maps.
pub fn entries(settings: &[&str]) -> String {
    let mut text = String::new();
    for map in MAPS {
        let entry = |setting: &&str| {
            let setting = setting.strip_prefix(map)?.strip_prefix('.')?;
            let (key, value) = setting.split_once('=').unwrap_or((setting, "true"));
            Some(format!("  {key}: {value}\n"))
        };
        let entries: String = settings.iter().filter_map(entry).collect();
        if !entries.is_empty() {
            text += &format!("{map}:\n{entries}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_grouped_by_map() {
        let settings = ["limits.readsMax=5", "tuning.cold", "limits.ringAgeMax=1m"];
        assert!(settings.iter().all(|setting| is_setting(setting)));
        assert!(!is_setting("--resource=limits.x") && !is_setting("pods"));
        let text = text_of(&settings);
        assert!(text.ends_with("limits:\n  readsMax: 5\n  ringAgeMax: 1m\ntuning:\n  cold: true\n"), "{text}");
    }
}
