//! The rules for label keys and values (`content.IsLabelKey` and `IsLabelValue` in apimachinery).
//! The texts are apimachinery's, because users search for them.

const NAME_BYTES_MAX: usize = 63;
const SUBDOMAIN_BYTES_MAX: usize = 253;

const NAME_REGEX: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const NAME_RULE: &str =
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const SUBDOMAIN_RULE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
     and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

/// Returns the reason why `key` is not a label key; `None` if it is one.
pub(super) fn label_key(key: &str) -> Option<String> {
    let example = "(e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is";
    let mut faults = Vec::new();
    let name = match key.split_once('/') {
        None => key,
        Some((_, name)) if name.contains('/') => {
            return Some(format!(
                "a valid label key {NAME_RULE} {example} '{NAME_REGEX}') with an optional DNS subdomain prefix and '/' \
                 (e.g. 'example.com/MyName')"
            ));
        }
        Some(("", name)) => {
            faults.push("prefix part must be non-empty".to_owned());
            name
        }
        Some((prefix, name)) => {
            if prefix.len() > SUBDOMAIN_BYTES_MAX {
                faults.push(format!("prefix part must be no more than {SUBDOMAIN_BYTES_MAX} bytes"));
            }
            if !prefix.split('.').all(is_dns_label) {
                faults.push(format!("prefix part {SUBDOMAIN_RULE}"));
            }
            name
        }
    };
    if name.is_empty() {
        faults.push("name part must be non-empty".to_owned());
    } else if name.len() > NAME_BYTES_MAX {
        faults.push(format!("name part must be no more than {NAME_BYTES_MAX} bytes"));
    }
    if !is_name(name) {
        faults.push(format!("name part {NAME_RULE} {example} '{NAME_REGEX}')"));
    }
    (!faults.is_empty()).then(|| faults.join("; "))
}

/// Returns the reason why `value` is not a label value; `None` if it is one.
pub(super) fn label_value(value: &str) -> Option<String> {
    let mut faults = Vec::new();
    if value.len() > NAME_BYTES_MAX {
        faults.push(format!("must be no more than {NAME_BYTES_MAX} bytes"));
    }
    if !value.is_empty() && !is_name(value) {
        faults.push(format!(
            "a valid label must be an empty string or consist of {} (e.g. 'MyValue',  or 'my_value',  or '12345', \
             regex used for validation is '({NAME_REGEX})?')",
            NAME_RULE.trim_start_matches("must consist of ")
        ));
    }
    (!faults.is_empty()).then(|| faults.join("; "))
}

fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn is_dns_label(text: &str) -> bool {
    let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(alphanumeric)
        && bytes.last().is_some_and(alphanumeric)
        && bytes.iter().all(|b| alphanumeric(b) || *b == b'-')
}
