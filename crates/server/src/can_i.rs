//! `kubefan auth can-i`, as a request to the admin port: the user and the read that it asks about.
//!
//! The query has `verb` (get, list or watch), `resource` (any name that kubectl takes),
//! `namespace`, `name`, `labelSelector`, `fieldSelector`, `user`, `uid`, any number of `group`, and
//! any number of `extra` as KEY=VALUE.

use kubefan_access::{Identity, Read, ReadVerb, user::ANONYMOUS};
use kubefan_common::proto::v1alpha1::Target;

/// A question of the operator.
#[derive(Debug, Clone, PartialEq)]
pub struct CanI {
    /// The user it is about.
    pub user: Identity,
    /// The read.
    pub read: Read,
}

impl CanI {
    /// Parses a query.
    ///
    /// # Errors
    /// The mistake in it, worded for the operator.
    pub fn of_query(query: &str) -> Result<Self, String> {
        let mut target = Target::default();
        let mut verb = None;
        let mut user = Identity::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let value = value.into_owned();
            match &*name {
                "verb" => verb = Some(value),
                "resource" => target.resource = value,
                "namespace" => target.namespace = value,
                "name" => target.name = value,
                "labelSelector" => target.label_selector = value,
                "fieldSelector" => target.field_selector = value,
                "user" => user.user = value,
                "uid" => user.uid = value,
                "group" => user.groups.push(value),
                "extra" => {
                    let (key, value) = value.split_once('=').ok_or("write extra as KEY=VALUE")?;
                    let values: &mut Vec<String> = user.extra.entry(key.to_lowercase()).or_default();
                    values.push(value.to_owned());
                }
                other => return Err(format!("{other:?} is no parameter of this path")),
            }
        }
        if user.user.is_empty() {
            return Err("name the user".to_owned());
        }
        if target.resource.is_empty() {
            return Err("name the resource".to_owned());
        }
        let read = match verb.as_deref() {
            Some("get") if target.name.is_empty() => {
                return Err("a get names an object; list and watch need not".to_owned());
            }
            Some("get") => Read::object(target),
            Some("list") => Read::collection(ReadVerb::List, target),
            Some("watch") => Read::collection(ReadVerb::Watch, target),
            _ => return Err("name the verb: get, list or watch".to_owned()),
        };
        Ok(Self { user: as_impersonated(user), read })
    }
}

/// The user with the groups that the apiserver adds to a user that another one acts as
/// (`WithImpersonation`).
fn as_impersonated(mut user: Identity) -> Identity {
    if let Some((namespace, _)) = user.service_account()
        && user.groups.is_empty()
    {
        user.groups = Identity::service_account_groups(namespace);
    }
    // As a request without credentials has it.
    if user.user == ANONYMOUS && user.groups.is_empty() {
        return Identity { uid: user.uid, extra: user.extra, ..Identity::anonymous() };
    }
    user.authenticated()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_question_names_a_user_and_a_read() {
        let CanI { user, read } = CanI::of_query(
            "verb=watch&resource=po&namespace=a&fieldSelector=spec.nodeName%3Dn&user=u&group=g&extra=scopes%3Dview",
        )
        .unwrap();
        assert_eq!(
            (user.user.as_str(), &*user.groups),
            ("u", &["g".to_owned(), "system:authenticated".to_owned()][..])
        );
        assert_eq!(user.extra, BTreeMap::from([("scopes".to_owned(), vec!["view".to_owned()])]));
        let target = Target {
            resource: "po".to_owned(),
            namespace: "a".to_owned(),
            field_selector: "spec.nodeName=n".to_owned(),
            ..Target::default()
        };
        assert_eq!(read, Read::collection(ReadVerb::Watch, target));
    }

    #[test]
    fn a_service_account_is_in_its_groups() {
        let groups = |query: &str| CanI::of_query(query).unwrap().user.groups;
        assert_eq!(
            groups("verb=list&resource=po&user=system:serviceaccount:a:b"),
            ["system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"]
        );
        assert_eq!(groups("verb=list&resource=po&user=system:anonymous"), ["system:unauthenticated"]);
    }

    #[test]
    fn a_bad_question_says_what_is_wrong() {
        for (query, problem) in [
            ("", "name the user"),
            ("user=u", "name the resource"),
            ("user=u&resource=po", "name the verb"),
            ("user=u&resource=po&verb=create", "name the verb"),
            ("user=u&resource=po&verb=get", "a get names an object"),
            ("user=u&resource=po&verb=list&limit=1", "\"limit\" is no parameter"),
            ("user=u&resource=po&verb=list&extra=x", "KEY=VALUE"),
        ] {
            let error = CanI::of_query(query).unwrap_err();
            assert!(error.contains(problem), "{query}: {error}");
        }
    }
}
