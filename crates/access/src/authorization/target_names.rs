//! The names in the target of a read.
//!
//! The hazard is a name that means something else in a path upstream, so nothing is looked up by
//! names that were not checked.

use kubefan_cache::Refusal;
use kubefan_common::proto::v1alpha1::Target;

/// The longest name, in bytes. Kubernetes allows 253 characters for names and groups.
const NAME_BYTES_MAX: usize = 512;

/// A text in the place of a name that is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidName {
    /// The field at fault, as a path in the request message.
    field: &'static str,
    message: String,
}

impl From<InvalidName> for Refusal {
    fn from(InvalidName { field, message }: InvalidName) -> Self {
        Self::Invalid { field, message }
    }
}

/// Checks the names of a target.
///
/// # Errors
/// Names the field at fault.
pub(super) fn check(target: &Target) -> Result<(), InvalidName> {
    let invalid = |field, message: String| Err(InvalidName { field, message });
    if target.resource.is_empty() {
        return invalid("target.resource", "required: a plural name such as \"pods\"".into());
    }
    let names = [
        ("target.group", &target.group),
        ("target.version", &target.version),
        ("target.resource", &target.resource),
        ("target.namespace", &target.namespace),
        ("target.name", &target.name),
    ];
    for (field, name) in names {
        if name.len() > NAME_BYTES_MAX {
            return invalid(field, format!("longer than {NAME_BYTES_MAX} bytes"));
        }
        // Names become segments of paths upstream.
        if name.contains(['/', '%', '?', '#']) || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return invalid(
                field,
                format!("{name:?} is not a name: it contains a character that is not allowed in names"),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_of_a_target_is_checked() {
        let own = str::to_owned;
        let pods = || Target { resource: own("pods"), ..Target::default() };
        assert_eq!(check(&pods()), Ok(()));
        for name in ["a/b", "a%2Fb", "a?b", "a#b", "a b", "a\n", "a\u{a0}b", &"a".repeat(NAME_BYTES_MAX + 1)] {
            for (field, target) in [
                ("target.group", Target { group: own(name), ..pods() }),
                ("target.version", Target { version: own(name), ..pods() }),
                ("target.resource", Target { resource: own(name), ..pods() }),
                ("target.namespace", Target { namespace: own(name), ..pods() }),
                ("target.name", Target { name: own(name), ..pods() }),
            ] {
                assert_eq!(check(&target).map_err(|invalid| invalid.field), Err(field), "{name:?}");
            }
        }
        assert_eq!(check(&Target::default()).map_err(|invalid| invalid.field), Err("target.resource"));
    }
}
