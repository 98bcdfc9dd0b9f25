//! The objects that the token of a service account is bound to: its account, and its pod or node.
//!
//! A TokenReview names them, and only proves them for that moment: the apiserver refuses the token
//! once one of them is deleted (`Validate` in `pkg/serviceaccount/claims.go`). kubefan keeps no
//! token to ask again with. So it looks them up in its caches while a stream lasts. A token may
//! also be bound to a Secret, which no TokenReview names.

use kubefan_model::{GroupVersionResource, ObjectKey};

use super::user::Identity;

/// The extras with the names and uids of a pod and of a node (`serviceaccount.UserInfo`).
const POD: [&str; 2] = ["authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"];
const NODE: [&str; 2] = ["authentication.kubernetes.io/node-name", "authentication.kubernetes.io/node-uid"];

/// An object without which a token is not valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundObject {
    /// The resource, of the core group.
    pub resource: &'static str,
    /// Namespace and name.
    pub key: ObjectKey,
    /// Uid of the object: another object of this name does not count.
    pub uid: String,
}

impl BoundObject {
    /// The objects that the token of a user is bound to; none if it is not a service account's.
    pub fn of(user: &Identity) -> Vec<Self> {
        let Some((namespace, name)) = user.service_account() else { return Vec::new() };
        let account = (!user.uid.is_empty()).then(|| Self {
            resource: "serviceaccounts",
            key: ObjectKey::new(namespace, name),
            uid: user.uid.clone(),
        });
        let of = |resource, namespace, [name, uid]: [&str; 2]| {
            let value = |key| user.extra.get(key)?.first().cloned();
            Some(Self { resource, key: ObjectKey::new(namespace, &value(name)?), uid: value(uid)? })
        };
        // The token of a pod names its node too, but is not bound to it.
        let pod_or_node = of("pods", namespace, POD).or_else(|| of("nodes", "", NODE));
        account.into_iter().chain(pod_or_node).collect()
    }

    /// The full name of its resource.
    pub fn gvr(&self) -> GroupVersionResource {
        GroupVersionResource::new("", "v1", self.resource)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(user: &str, extra: &[(&str, &str)]) -> Vec<String> {
        let extra = extra.iter().map(|(key, value)| ((*key).to_owned(), vec![(*value).to_owned()])).collect();
        let user = Identity { user: user.to_owned(), uid: "of-account".to_owned(), extra, ..Identity::default() };
        BoundObject::of(&user)
            .iter()
            .map(|object| format!("{} {:?} {}", object.resource, object.key, object.uid))
            .collect()
    }

    #[test]
    fn a_token_is_bound_to_its_account_and_to_its_pod_or_node() {
        let account = format!("serviceaccounts {:?} of-account", ObjectKey::new("team", "agent"));
        assert_eq!(bound("system:serviceaccount:team:agent", &[]), std::slice::from_ref(&account));
        let node = [(NODE[0], "n1"), (NODE[1], "of-node")];
        let pod = [(POD[0], "p1"), (POD[1], "of-pod"), node[0], node[1]];
        let of_pod = format!("pods {:?} of-pod", ObjectKey::new("team", "p1"));
        assert_eq!(bound("system:serviceaccount:team:agent", &pod), [account.clone(), of_pod]);
        let of_node = format!("nodes {:?} of-node", ObjectKey::new("", "n1"));
        assert_eq!(bound("system:serviceaccount:team:agent", &node), [account, of_node]);
    }

    #[test]
    fn other_users_are_bound_to_nothing() {
        for user in ["alice", "system:serviceaccount:team", "system:node:n1"] {
            assert!(bound(user, &[(POD[0], "p1"), (POD[1], "of-pod")]).is_empty(), "{user}");
        }
    }
}
