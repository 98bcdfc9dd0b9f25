//! The headers that let a request to the apiserver act as another user (`Impersonate-*`), written
//! as client-go writes them (`transport/round_trippers.go`).
//!
//! The hazard is a user that is another one when the headers are read. HTTP ignores spaces around a
//! value, and the apiserver reads the keys of extras in lower case. So a key is escaped, and a user
//! is refused if its name, uid, group or extra would not arrive unchanged.

use std::{collections::BTreeMap, fmt::Write};

use http::{HeaderMap, HeaderName, HeaderValue};

const USER: HeaderName = HeaderName::from_static("impersonate-user");
const UID: HeaderName = HeaderName::from_static("impersonate-uid");
const GROUP: HeaderName = HeaderName::from_static("impersonate-group");
const EXTRA: &str = "impersonate-extra-";

/// The most groups and values of extras of a user. Directories have users with hundreds of groups.
const VALUES_MAX: usize = 4096;

/// The user that a request acts as.
#[derive(Clone)]
pub struct ActingAs(Vec<(HeaderName, HeaderValue)>);

/// A user that no headers can name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} cannot be the value of an HTTP header, so kubefan cannot act as this user (--access=authorized-impersonate)"
)]
pub struct UnfitUser {
    what: &'static str,
}

impl ActingAs {
    /// The headers of a user with this name, uid, groups and extras. An empty uid is left out.
    ///
    /// # Errors
    /// A part of it would not arrive as it is.
    pub fn new(
        name: &str,
        uid: &str,
        groups: &[String],
        extra: &BTreeMap<String, Vec<String>>,
    ) -> Result<Self, UnfitUser> {
        let unfit = |what| UnfitUser { what };
        if name.is_empty() || groups.len() + extra.values().map(Vec::len).sum::<usize>() > VALUES_MAX {
            return Err(unfit("an empty name, or one of so many groups and extras,"));
        }
        let mut headers = vec![(USER, value(name).ok_or(unfit("its name"))?)];
        if !uid.is_empty() {
            headers.push((UID, value(uid).ok_or(unfit("its uid"))?));
        }
        for group in groups {
            headers.push((GROUP, value(group).ok_or(unfit("one of its groups"))?));
        }
        for (key, values) in extra {
            let name = HeaderName::try_from(format!("{EXTRA}{}", escaped(key)));
            let name = name.map_err(|_| unfit("a key of its extras"))?;
            for text in values {
                headers.push((name.clone(), value(text).ok_or(unfit("a value of its extras"))?));
            }
        }
        Ok(Self(headers))
    }

    /// Writes the headers. Those of the same names must have been removed.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        for (name, value) in self.0 {
            headers.append(name, value);
        }
    }
}

/// A value that arrives as it is.
fn value(text: &str) -> Option<HeaderValue> {
    let is_trimmed = text.trim_matches([' ', '\t']).len() == text.len();
    HeaderValue::from_bytes(text.as_bytes()).ok().filter(|_| is_trimmed)
}

/// The key of an extra as a part of a header's name: `headerKeyEscape` of client-go. Capital
/// letters are escaped too, because a name does not distinguish them.
fn escaped(key: &str) -> String {
    let mut escaped = String::new();
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' => escaped.push(char::from(byte)),
            b'!' | b'#' | b'$' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~' => {
                escaped.push(char::from(byte));
            }
            // Writing to a text cannot fail.
            other => drop(write!(escaped, "%{other:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acting_as(name: &str, uid: &str, groups: &[&str], extra: &[(&str, &[&str])]) -> Result<Vec<String>, String> {
        let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let extra = extra.iter().map(|(key, values)| ((*key).to_owned(), own(values))).collect();
        let acting_as = ActingAs::new(name, uid, &own(groups), &extra).map_err(|error| error.to_string())?;
        let mut headers = HeaderMap::new();
        acting_as.write(&mut headers);
        let line = |(name, value): (&HeaderName, &HeaderValue)| {
            format!("{name}: {}", String::from_utf8(value.as_bytes().to_vec()).unwrap())
        };
        Ok(headers.iter().map(line).collect())
    }

    #[test]
    fn a_user_is_written_as_client_go_writes_it() {
        let extra: [(&str, &[&str]); 3] = [
            ("authentication.kubernetes.io/credential-id", &["JTI=1"]),
            ("Scopes%", &["a", "b, c"]),
            ("with space:é", &[""]),
        ];
        let mut lines = acting_as("system:serviceaccount:a:b", "1-2", &["g", "system:authenticated"], &extra).unwrap();
        lines.sort_unstable();
        assert_eq!(
            lines,
            [
                "impersonate-extra-%53copes%25: a",
                "impersonate-extra-%53copes%25: b, c",
                "impersonate-extra-authentication.kubernetes.io%2fcredential-id: JTI=1",
                "impersonate-extra-with%20space%3a%c3%a9: ",
                "impersonate-group: g",
                "impersonate-group: system:authenticated",
                "impersonate-uid: 1-2",
                "impersonate-user: system:serviceaccount:a:b",
            ]
        );
        assert_eq!(acting_as("jörg", "", &[], &[]).unwrap(), ["impersonate-user: jörg"]);
    }

    #[test]
    fn a_user_that_would_arrive_as_another_one_is_refused() {
        let many = vec!["g"; VALUES_MAX + 1];
        for (refused, what) in [
            (acting_as("", "", &[], &[]), "empty name"),
            (acting_as(" admin", "", &[], &[]), "its name"),
            (acting_as("admin\t", "", &[], &[]), "its name"),
            (acting_as("a\nb", "", &[], &[]), "its name"),
            (acting_as("a", "\0", &[], &[]), "its uid"),
            (acting_as("a", "", &["system:masters "], &[]), "one of its groups"),
            (acting_as("a", "", &["x\r\nImpersonate-Group: y"], &[]), "one of its groups"),
            (acting_as("a", "", &[], &[("k", &["\u{7f}"])]), "a value of its extras"),
            (acting_as("a", "", &many, &[]), "so many groups"),
        ] {
            let text = refused.unwrap_err();
            assert!(text.starts_with(what) || text.contains(what), "{text}");
            assert!(!text.contains("admin"), "{text}");
        }
    }
}
