//! TokenReviews: whose token it is.

use kubefan_upstream::{ReviewKind, Upstream, UpstreamError};
use serde::{Deserialize, Serialize};

use super::bearer_token::BearerToken;
use crate::user::{ANONYMOUS, Identity};

const TOKEN_REVIEW: ReviewKind = ReviewKind {
    path: "/apis/authentication.k8s.io/v1/tokenreviews",
    api_version: "authentication.k8s.io/v1",
    kind: "TokenReview",
};

#[derive(Serialize)]
struct Spec<'a> {
    token: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    audiences: &'a [String],
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    authenticated: bool,
    user: Identity,
    audiences: Option<Vec<String>>,
}

/// Asks whose token it is. `None` if the apiserver does not know the token, or knows it for none of
/// `audiences`. Without audiences the apiserver's own count.
pub(super) async fn review(
    upstream: &Upstream,
    token: &BearerToken,
    audiences: &[String],
) -> Result<Option<Identity>, UpstreamError> {
    let spec = Spec { token: token.expose(), audiences };
    Ok(user_of(upstream.review(&TOKEN_REVIEW, &spec).await?, audiences))
}

fn user_of(status: Status, audiences: &[String]) -> Option<Identity> {
    // An authenticator that knows no audiences answers with none. Then the token is valid for the
    // apiserver, and for nothing else.
    let valid_for = status.audiences.unwrap_or_default();
    let is_for_us = audiences.is_empty() || valid_for.iter().any(|audience| audiences.contains(audience));
    let is_user = status.authenticated && !status.user.user.is_empty() && status.user.user != ANONYMOUS;
    (is_user && is_for_us).then(|| status.user.authenticated())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(status: &str, audiences: &[&str]) -> Option<String> {
        let audiences: Vec<String> = audiences.iter().map(|audience| (*audience).to_owned()).collect();
        user_of(serde_json::from_str(status).unwrap(), &audiences).map(|identity| identity.user)
    }

    #[test]
    fn only_a_token_for_one_of_the_audiences_is_known() {
        let known = r#"{"authenticated":true,"user":{"username":"a"},"audiences":["x","y"]}"#;
        assert_eq!(user(known, &["y", "z"]).as_deref(), Some("a"));
        assert_eq!(user(known, &["z"]), None);
        assert_eq!(user(known, &[]).as_deref(), Some("a"), "the apiserver's own");
        let unaware = r#"{"authenticated":true,"user":{"username":"a"},"audiences":null}"#;
        assert_eq!(user(unaware, &["z"]), None);
        assert_eq!(user(unaware, &[]).as_deref(), Some("a"));
    }

    #[test]
    fn an_unknown_token_has_no_user() {
        for status in [
            "{}",
            r#"{"authenticated":false,"error":"invalid bearer token","user":{}}"#,
            r#"{"authenticated":false,"user":{"username":"a"}}"#,
            r#"{"authenticated":true,"user":{}}"#,
            r#"{"authenticated":true,"user":{"username":"system:anonymous"}}"#,
        ] {
            assert_eq!(user(status, &[]), None, "{status}");
        }
    }
}
