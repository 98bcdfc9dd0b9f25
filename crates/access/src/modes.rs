//! The reads that an operator has taken out of the caches: `modes` in the configuration file.
//!
//! The decision is one pure function of the resource and the caller. The first rule that matches
//! both decides; without one a read is answered as usual.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, de::Error};

use super::user::Identity;

/// The server that answers reads of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum Mode {
    /// The cache; the apiserver if no cache can answer.
    #[default]
    Cache,
    /// The apiserver, for reads over HTTP. Over gRPC there is no answer.
    Passthrough,
    /// Reads are refused.
    Deny,
}

impl Mode {
    /// The name in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cache => "Cache",
            Self::Passthrough => "Passthrough",
            Self::Deny => "Deny",
        }
    }
}

/// The name of a resource in a rule: `*`, the plural in every group, or the plural of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourcePattern {
    /// `None` for every resource.
    resource: Option<String>,
    /// `None` for every group.
    group: Option<String>,
}

impl FromStr for ResourcePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (resource, group) = match text.split_once('.') {
            Some((resource, group)) => (resource, Some(group)),
            None => (text, None),
        };
        let is_label = |part: &str| {
            let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            !part.is_empty() && part.bytes().all(inner)
        };
        if (resource != "*" && !is_label(resource)) || !group.unwrap_or("core").split('.').all(is_label) {
            return Err(format!(
                "{text:?} is no name of a resource; write the plural in lower case, like pods or deployments.apps, or \"*\" for all"
            ));
        }
        if let Some((version, rest)) = group.and_then(|group| group.split_once('.').or(Some((group, ""))))
            && is_version(version)
        {
            let without = format!("{resource}.{rest}");
            return Err(format!("{text:?} has a version; leave it out: {}", without.trim_end_matches('.')));
        }
        let resource = (resource != "*").then(|| resource.to_owned());
        Ok(Self { resource, group: group.map(str::to_owned) })
    }
}

/// Whether this is a version of an API, such as `v1` or `v2beta1`.
fn is_version(text: &str) -> bool {
    text.strip_prefix('v').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

impl fmt::Display for ResourcePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource.as_deref().unwrap_or("*"))?;
        self.group.as_ref().map_or(Ok(()), |group| write!(f, ".{group}"))
    }
}

impl ResourcePattern {
    /// Whether it is for one name, and not for all resources or for all of a group.
    pub fn names_resource(&self) -> bool {
        self.resource.is_some()
    }

    /// Whether it is for this resource.
    pub fn matches(&self, group: &str, resource: &str) -> bool {
        self.resource.as_ref().is_none_or(|own| own == resource) && self.group.as_ref().is_none_or(|own| own == group)
    }
}

/// The name of a user or a group in a rule; a `*` at its end stands for any rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern {
    start: String,
    is_start: bool,
}

impl FromStr for NamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (start, is_start) = text.strip_suffix('*').map_or((text, false), |start| (start, true));
        if text.trim().is_empty() || start.contains('*') {
            return Err(format!("{text:?} is no name; write it exactly, or with one * at its end"));
        }
        Ok(Self { start: start.to_owned(), is_start })
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.start, if self.is_start { "*" } else { "" })
    }
}

impl NamePattern {
    fn matches(&self, name: &str) -> bool {
        if self.is_start { name.starts_with(&self.start) } else { name == self.start }
    }
}

macro_rules! deserialize_pattern {
    ($($pattern:ty),*) => {$(
        impl<'de> Deserialize<'de> for $pattern {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}
deserialize_pattern!(ResourcePattern, NamePattern);

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModeRule {
    /// The resources.
    pub resources: Vec<ResourcePattern>,
    /// Users. If neither users nor groups are given, the rule is for all callers, otherwise for
    /// these users and for the members of these groups.
    #[serde(default)]
    pub users: Option<Vec<NamePattern>>,
    /// Groups.
    #[serde(default)]
    pub groups: Option<Vec<NamePattern>>,
    /// The mode of these reads.
    pub mode: Mode,
}

impl ModeRule {
    /// Whether the rule is for some callers only.
    pub fn names_callers(&self) -> bool {
        self.users.is_some() || self.groups.is_some()
    }

    fn is_for(&self, caller: &Identity) -> bool {
        let users = self.users.iter().flatten().any(|user| user.matches(&caller.user));
        users || self.groups.iter().flatten().any(|group| caller.groups.iter().any(|own| group.matches(own)))
    }
}

/// All rules, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Modes(Vec<ModeRule>);

impl Modes {
    /// Creates the modes from these rules.
    pub fn new(rules: Vec<ModeRule>) -> Self {
        Self(rules)
    }

    /// The rules.
    pub fn rules(&self) -> &[ModeRule] {
        &self.0
    }

    /// Returns the mode of a caller's reads of a resource, from the first rule that matches. `None`
    /// if that depends on the caller, which is not known.
    pub fn mode(&self, group: &str, resource: &str, caller: Option<&Identity>) -> Option<Mode> {
        let of_resource = |rule: &&ModeRule| rule.resources.iter().any(|own| own.matches(group, resource));
        for rule in self.0.iter().filter(of_resource) {
            match caller {
                _ if !rule.names_callers() => return Some(rule.mode),
                None => return None,
                Some(caller) if rule.is_for(caller) => return Some(rule.mode),
                Some(_) => {}
            }
        }
        Some(Mode::Cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(texts: &[&str]) -> Option<Vec<NamePattern>> {
        (!texts.is_empty()).then(|| texts.iter().map(|text| text.parse().unwrap()).collect())
    }

    fn rule(resources: &[&str], users: &[&str], groups: &[&str], mode: Mode) -> ModeRule {
        let resources = resources.iter().map(|text| text.parse().unwrap()).collect();
        ModeRule { resources, users: names(users), groups: names(groups), mode }
    }

    fn user(name: &str, groups: &[&str]) -> Identity {
        let groups = groups.iter().map(|&group| group.to_owned()).collect();
        Identity { user: name.to_owned(), groups, ..Identity::default() }
    }

    #[test]
    fn the_first_rule_that_matches_resource_and_caller_decides() {
        let modes = Modes::new(vec![
            rule(&["secrets"], &[], &[], Mode::Deny),
            rule(&["pods"], &["admin"], &[], Mode::Cache),
            rule(&["pods", "deployments.apps"], &["system:serviceaccount:noisy:*"], &["batch-*"], Mode::Deny),
            rule(&["pods"], &[], &[], Mode::Passthrough),
            rule(&["*.example.com"], &[], &[], Mode::Passthrough),
            rule(&["*"], &["eve"], &[], Mode::Deny),
        ]);
        let anyone = user("jo", &["dev"]);
        let noisy = user("system:serviceaccount:noisy:agent", &[]);
        let admin = user("admin", &["batch-7"]);
        let eve = user("eve", &[]);
        let member = user("jo", &["dev", "batch-7"]);
        use Mode::{Cache, Deny, Passthrough};
        for (group, resource, caller, expected) in [
            ("", "secrets", None, Some(Deny)),
            ("", "secrets", Some(&admin), Some(Deny)),
            ("", "pods", Some(&admin), Some(Cache)),
            ("", "pods", Some(&noisy), Some(Deny)),
            ("", "pods", Some(&member), Some(Deny)),
            ("", "pods", Some(&anyone), Some(Passthrough)),
            ("metrics.k8s.io", "pods", Some(&anyone), Some(Passthrough)),
            ("", "pods", Some(&eve), Some(Passthrough)),
            ("", "pods", None, None),
            ("apps", "deployments", Some(&noisy), Some(Deny)),
            ("extensions", "deployments", Some(&noisy), Some(Cache)),
            ("apps", "deployments", Some(&anyone), Some(Cache)),
            ("apps", "deployments", None, None),
            ("example.com", "widgets", Some(&eve), Some(Passthrough)),
            ("example.com", "widgets", None, Some(Passthrough)),
            ("", "nodes", Some(&eve), Some(Deny)),
            ("", "nodes", Some(&anyone), Some(Cache)),
        ] {
            assert_eq!(modes.mode(group, resource, caller), expected, "{group} {resource} {caller:?}");
        }
        assert_eq!(Modes::default().mode("", "pods", None), Some(Cache), "without rules no caller is asked for");
    }

    #[test]
    fn a_list_of_callers_that_is_empty_is_for_no_one() {
        let rule = ModeRule { users: Some(Vec::new()), ..rule(&["*"], &[], &[], Mode::Deny) };
        assert_eq!(Modes::new(vec![rule]).mode("", "pods", Some(&user("x", &[]))), Some(Mode::Cache));
    }

    #[test]
    fn a_name_that_could_match_nothing_is_refused() {
        for good in ["*", "pods", "deployments.apps", "*.apps", "widgets.v.example.com"] {
            assert_eq!(good.parse::<ResourcePattern>().unwrap().to_string(), good);
        }
        for (bad, expected) in [
            (
                "Pod",
                "\"Pod\" is no name of a resource; write the plural in lower case, like pods or deployments.apps, or \"*\" for all",
            ),
            ("pods/log", "\"pods/log\" is no name of a resource"),
            ("po*", "\"po*\" is no name"),
            ("", "\"\" is no name"),
            ("pods.", "\"pods.\" is no name"),
            ("deployments.v1.apps", "\"deployments.v1.apps\" has a version; leave it out: deployments.apps"),
            ("pods.v1", "\"pods.v1\" has a version; leave it out: pods"),
        ] {
            let error = bad.parse::<ResourcePattern>().unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        for bad in ["", " ", "a*b", "**"] {
            assert!(bad.parse::<NamePattern>().is_err(), "{bad:?}");
        }
        assert!("*".parse::<NamePattern>().unwrap().matches("anyone"));
    }
}
