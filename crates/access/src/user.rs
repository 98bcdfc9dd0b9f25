//! A user, as the apiserver knows it (`user.Info`).

use std::{collections::BTreeMap, fmt};

use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use serde::{Deserialize, Deserializer, Serialize};

/// The group of every user that authenticated itself.
pub const AUTHENTICATED: &str = "system:authenticated";
/// The user that did not authenticate itself.
pub const ANONYMOUS: &str = "system:anonymous";
/// The group of that user.
pub const UNAUTHENTICATED: &str = "system:unauthenticated";

/// Start of the name of a service account's user (`ServiceAccountUsernamePrefix`).
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";
/// The group of all service accounts. The one of a namespace has its name behind a colon.
const SERVICE_ACCOUNTS: &str = "system:serviceaccounts";

/// The extras of a token that is bound to a pod (`serviceaccount.UserInfo`).
const POD_EXTRAS: [&str; 2] = ["authentication.kubernetes.io/pod-uid", "authentication.kubernetes.io/pod-name"];

/// A SHA-256 digest.
pub type Digest = [u8; SHA256_OUTPUT_LEN];

/// A user with its groups and extras. Extras carry rights in some clusters, so they are a part of a
/// caller's identity.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// The name.
    #[serde(rename = "username", deserialize_with = "or_default")]
    pub user: String,
    /// Unique over time; may be empty.
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
    /// The groups, in the apiserver's order.
    #[serde(deserialize_with = "or_default")]
    pub groups: Vec<String>,
    /// More about the user, such as the pod that a token is bound to.
    #[serde(deserialize_with = "or_default")]
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Go writes an empty map or slice as `null`.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

impl Identity {
    /// The user without credentials.
    pub fn anonymous() -> Self {
        let groups = vec![UNAUTHENTICATED.to_owned()];
        Self { user: ANONYMOUS.to_owned(), groups, ..Self::default() }
    }

    /// Returns the name that a limit is counted by: a user, or all service accounts of one
    /// namespace, because the namespace's administrator can make any number of them.
    pub fn tenant(&self) -> &str {
        let of_namespace = self.user.strip_prefix(SERVICE_ACCOUNT).and_then(|rest| rest.split_once(':'));
        of_namespace.map_or(&self.user, |(namespace, _)| &self.user[..SERVICE_ACCOUNT.len() + namespace.len()])
    }

    /// The user name of a service account (`MakeUsername`).
    pub fn service_account_name(namespace: &str, name: &str) -> String {
        format!("{SERVICE_ACCOUNT}{namespace}:{name}")
    }

    /// The groups of the service accounts of a namespace (`MakeGroupNames`).
    pub fn service_account_groups(namespace: &str) -> Vec<String> {
        vec![SERVICE_ACCOUNTS.to_owned(), format!("{SERVICE_ACCOUNTS}:{namespace}")]
    }

    /// Namespace and name, if it is a service account.
    pub fn service_account(&self) -> Option<(&str, &str)> {
        self.user.strip_prefix(SERVICE_ACCOUNT)?.split_once(':')
    }

    /// Adds the group of all authenticated users, as the apiserver does
    /// (`AuthenticatedGroupAdder`).
    #[must_use]
    pub fn authenticated(mut self) -> Self {
        let is_marked = self.groups.iter().any(|group| group == AUTHENTICATED || group == UNAUTHENTICATED);
        if self.user != ANONYMOUS && !is_marked {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }

    /// Leaves extras out, by their keys.
    #[must_use]
    pub fn without_extra(mut self, ignored: &[String]) -> Self {
        self.extra.retain(|key, _| !ignored.contains(key));
        self
    }

    /// The uid of the pod that the token is bound to, or the name if only that is known.
    pub fn pod(&self) -> Option<&str> {
        let value = |key| self.extra.get(key)?.first().map(String::as_str);
        POD_EXTRAS.into_iter().find_map(value)
    }

    /// A digest of everything in it. Two identities have the same only if they are equal.
    pub fn digest(&self) -> Digest {
        let mut parts = Parts::default();
        parts.add(&self.user);
        parts.add(&self.uid);
        parts.add_all(&self.groups);
        parts.add_number(self.extra.len());
        for (key, values) in &self.extra {
            parts.add(key);
            parts.add_all(values);
        }
        parts.digest()
    }
}

/// Names the user only: extras may say more than a log should.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Texts that are digested together. Each has its length before it, so no two sequences of texts
/// have the same bytes.
pub(crate) struct Parts(Context);

impl Default for Parts {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Parts {
    pub(crate) fn add_number(&mut self, number: usize) {
        self.0.update(&(number as u64).to_le_bytes());
    }

    pub(crate) fn add(&mut self, text: &str) {
        self.add_number(text.len());
        self.0.update(text.as_bytes());
    }

    pub(crate) fn add_digest(&mut self, digest: &Digest) {
        self.0.update(digest);
    }

    fn add_all(&mut self, texts: &[String]) {
        self.add_number(texts.len());
        for text in texts {
            self.add(text);
        }
    }

    pub(crate) fn digest(self) -> Digest {
        let mut digest = [0; SHA256_OUTPUT_LEN];
        digest.copy_from_slice(self.0.finish().as_ref());
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(user: &str, groups: &[&str], extra: &[(&str, &[&str])]) -> Identity {
        let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let extra = extra.iter().map(|(key, values)| ((*key).to_owned(), own(values))).collect();
        Identity { user: user.to_owned(), groups: own(groups), extra, ..Identity::default() }
    }

    #[test]
    fn different_identities_have_different_digests() {
        let all = [
            identity("a", &[], &[]),
            identity("", &["a"], &[]),
            identity("a", &["b", "c"], &[]),
            identity("a", &["bc"], &[]),
            identity("a", &["b"], &[("c", &[])]),
            identity("a", &["b"], &[("c", &["d"])]),
            identity("a", &["b"], &[("c", &["d", ""])]),
            Identity { uid: "a".to_owned(), ..Identity::default() },
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(all[..index].iter().all(|other| other.digest() != one.digest()), "{index}");
            assert_eq!(one.digest(), one.clone().digest());
        }
    }

    #[test]
    fn an_ignored_extra_is_no_part_of_the_identity() {
        let one = identity("a", &[], &[("pod", &["1"]), ("role", &["x"])]).without_extra(&["pod".to_owned()]);
        let other = identity("a", &[], &[("pod", &["2"]), ("role", &["x"])]).without_extra(&["pod".to_owned()]);
        assert_eq!(one.digest(), other.digest());
        assert!(one.extra.contains_key("role"));
    }

    #[test]
    fn an_answer_with_nulls_is_read_and_debug_shows_the_name_only() {
        let text = r#"{"username":"a","uid":null,"groups":null,"extra":null}"#;
        let read: Identity = serde_json::from_str(text).unwrap();
        assert_eq!(read, identity("a", &[], &[]));
        let shown = format!("{:?}", identity("a", &["g"], &[("key", &["secret"])]));
        assert!(shown.contains("\"a\"") && !shown.contains("secret"), "{shown}");
    }

    #[test]
    fn authenticated_users_are_in_their_group_once() {
        let groups = |identity: Identity| identity.authenticated().groups;
        assert_eq!(groups(identity("a", &["g"], &[])), ["g", AUTHENTICATED]);
        assert_eq!(groups(identity("a", &[AUTHENTICATED], &[])), [AUTHENTICATED]);
        assert_eq!(groups(Identity::anonymous()), [UNAUTHENTICATED]);
    }
}
