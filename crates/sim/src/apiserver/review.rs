//! Reviews of callers, for programs that cost something to ask: every token is the name of its
//! user, and every user may do everything.

use serde_json::{Value, json};

use super::status::Status;

/// Subject of a review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Review {
    Token,
    Access,
}

impl Review {
    /// The review that is created at a path.
    pub(super) fn at(path: &str) -> Option<Self> {
        match path {
            "/apis/authentication.k8s.io/v1/tokenreviews" => Some(Self::Token),
            "/apis/authorization.k8s.io/v1/subjectaccessreviews" => Some(Self::Access),
            _ => None,
        }
    }

    /// The answer to a review with this body.
    pub(super) fn answer(self, body: &[u8]) -> Result<Value, Status> {
        let mut review: Value = serde_json::from_slice(body).map_err(|error| Status::bad_request(error.to_string()))?;
        if !review.is_object() {
            return Err(Status::bad_request("a review is an object"));
        }
        let user = json!({ "username": review["spec"]["token"], "groups": ["system:authenticated"] });
        review["status"] = match self {
            Self::Token => json!({ "authenticated": true, "user": user, "audiences": review["spec"]["audiences"] }),
            Self::Access => json!({ "allowed": true }),
        };
        Ok(review)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_known_and_every_user_may() {
        let token = Review::at("/apis/authentication.k8s.io/v1/tokenreviews").unwrap();
        let answer = token.answer(br#"{"spec":{"token":"a"}}"#).unwrap();
        assert_eq!(answer["status"]["user"]["username"], "a");
        let access = Review::at("/apis/authorization.k8s.io/v1/subjectaccessreviews").unwrap();
        assert_eq!(access.answer(b"{}").unwrap()["status"]["allowed"], true);
        assert!(access.answer(b"").is_err() && access.answer(b"[]").is_err());
        assert_eq!(Review::at("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"), None);
    }
}
