//! The bearer tokens that the apiserver has accepted lately.
//!
//! Only bearer tokens count: the apiserver answers 401 to every unknown one (`k8s.io/apiserver`,
//! `bearertoken.Authenticator`). A caller with any other credential may be anonymous to it: with an
//! empty token, or a header that no authenticator knows.
//!
//! The hazard is an answer that was given before the token was read. The apiserver gives 400, 429
//! and, to OPTIONS, 204 then (`DefaultBuildHandlerChain`), and a gateway in front of it anything
//! else. So only a success accepts a token.

use std::{
    hash::{BuildHasher, RandomState},
    num::NonZero,
    sync::{Mutex, PoisonError},
};

use http::{HeaderMap, Method, StatusCode, header};
use lru::LruCache;

/// The most tokens to remember. A token that is forgotten, or has had no success yet, costs its
/// owner nothing but a place among the callers whose requests may have to be repeated.
const TOKENS_MAX: NonZero<usize> = NonZero::new(16_384).unwrap();

/// A short key of a bearer token. Two tokens have the same key only by chance; then one of them
/// counts as accepted too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TokenKey(u64);

impl TokenKey {
    /// The key of a request's token, if it has one.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        static KEYS: std::sync::LazyLock<RandomState> = std::sync::LazyLock::new(RandomState::new);
        let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, rest) = value.trim().split_once(' ')?;
        let token = rest.split(' ').next().filter(|token| !token.is_empty())?;
        scheme.eq_ignore_ascii_case("bearer").then(|| Self(KEYS.hash_one(token)))
    }
}

/// The accepted tokens that were used last.
pub(super) struct AcceptedTokens(Mutex<LruCache<TokenKey, ()>>);

impl Default for AcceptedTokens {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(TOKENS_MAX)))
    }
}

impl AcceptedTokens {
    /// Whether the apiserver has accepted the token. No token is never accepted.
    pub(super) fn contains(&self, token: Option<TokenKey>) -> bool {
        token.is_some_and(|token| self.tokens().get(&token).is_some())
    }

    /// Records an answer to a request with this token; `None` is no answer.
    pub(super) fn answered(&self, token: Option<TokenKey>, method: &Method, status: Option<StatusCode>) {
        let Some((token, status)) = token.zip(status) else { return };
        if status == StatusCode::UNAUTHORIZED {
            self.tokens().pop(&token);
        } else if status.is_success() && *method != Method::OPTIONS {
            self.tokens().put(token, ());
        }
    }

    fn tokens(&self) -> std::sync::MutexGuard<'_, LruCache<TokenKey, ()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(authorization: &'static str) -> Option<TokenKey> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, http::HeaderValue::from_static(authorization));
        TokenKey::of(&headers)
    }

    #[test]
    fn only_a_bearer_token_can_be_accepted() {
        for header in ["", "Bearer", "Bearer ", "Bearer  a", "Basic YTpi", "token", "Negotiate a"] {
            assert_eq!(key(header), None, "{header:?}");
        }
        assert_eq!(TokenKey::of(&HeaderMap::new()), None);
        assert!(key("Bearer a").is_some());
        assert_eq!(
            (key("bearer a"), key(" BEARER a b")),
            (key("Bearer a"), key("Bearer a")),
            "as the apiserver reads it"
        );
        assert_ne!(key("Bearer a"), key("Bearer b"));
    }

    #[test]
    fn a_token_is_accepted_until_it_is_refused() {
        let tokens = AcceptedTokens::default();
        let token = key("Bearer a");
        let other = key("Bearer b");
        let answered = |token, method: &Method, status| tokens.answered(token, method, status);
        assert!(!tokens.contains(token));
        answered(token, &Method::POST, Some(StatusCode::CREATED));
        assert!(tokens.contains(token) && !tokens.contains(other));
        for status in [None, Some(StatusCode::FORBIDDEN), Some(StatusCode::BAD_GATEWAY)] {
            answered(token, &Method::GET, status);
            assert!(tokens.contains(token), "{status:?} does not refuse the token");
        }
        answered(token, &Method::GET, Some(StatusCode::UNAUTHORIZED));
        assert!(!tokens.contains(token));
        answered(None, &Method::GET, Some(StatusCode::OK));
        assert!(!tokens.contains(None));
    }

    #[test]
    fn an_answer_that_needs_no_authentication_accepts_no_token() {
        let tokens = AcceptedTokens::default();
        let token = key("Bearer wrong");
        for (method, status, from) in [
            (Method::GET, StatusCode::BAD_REQUEST, "a timeout that is none (WithRequestDeadline)"),
            (Method::OPTIONS, StatusCode::NO_CONTENT, "the CORS filter"),
            (Method::GET, StatusCode::TOO_MANY_REQUESTS, "an apiserver that ends (WithRetryAfter)"),
            (Method::GET, StatusCode::FORBIDDEN, "a gateway"),
            (Method::GET, StatusCode::NOT_FOUND, "a gateway"),
            (Method::GET, StatusCode::FOUND, "a gateway"),
            (Method::GET, StatusCode::BAD_GATEWAY, "a gateway"),
        ] {
            tokens.answered(token, &method, Some(status));
            assert!(!tokens.contains(token), "{status} is the answer of {from}");
        }
    }
}
