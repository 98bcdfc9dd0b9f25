//! Bearer tokens in requests, found exactly where the apiserver finds them
//! (`request/bearertoken`, `request/websocket`).
//!
//! The hazard is a token in a log. A [`BearerToken`] shows itself only to the review and to its
//! digest.

use std::fmt;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderMap, header};
use kubefan_admission::Holder;
use ring::hmac;

use super::websocket_protocols::WebsocketProtocols;
use crate::user::Digest;

/// A bearer token. Its debug text is the same for all tokens.
#[derive(Clone, PartialEq, Eq)]
pub struct BearerToken(Box<str>);

impl BearerToken {
    /// The token in the headers of a request: in the first `Authorization`, or among the protocols
    /// of a websocket.
    pub fn of(headers: &HeaderMap, is_websocket: bool) -> Option<Self> {
        let in_header = headers.get(header::AUTHORIZATION).and_then(|value| Self::in_header(value.to_str().ok()?));
        in_header.or_else(|| if is_websocket { Self::in_protocols(headers) } else { None })
    }

    fn in_header(value: &str) -> Option<Self> {
        let mut parts = value.trim().splitn(3, ' ');
        let is_bearer = parts.next()?.eq_ignore_ascii_case("bearer");
        let token = parts.next().filter(|token| is_bearer && !token.is_empty())?;
        Some(Self(token.into()))
    }

    fn in_protocols(headers: &HeaderMap) -> Option<Self> {
        WebsocketProtocols::of(headers).token().map(|token| Self(token.into()))
    }

    /// The holder of a request with this token, as long as its user is not known.
    pub fn holder(&self, holder: Holder) -> Holder {
        holder.identified(&self.0, None)
    }

    /// The text, for a review.
    pub(super) fn expose(&self) -> &str {
        &self.0
    }

    /// The key of the token and the audiences in a cache. Without `key`, the digest says nothing
    /// about the token.
    pub(super) fn digest(&self, key: &hmac::Key, audiences: &[String]) -> Digest {
        let mut context = hmac::Context::with_key(key);
        for part in [&*self.0].into_iter().chain(audiences.iter().map(String::as_str)) {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part.as_bytes());
        }
        let mut digest = Digest::default();
        digest.copy_from_slice(context.sign().as_ref());
        digest
    }

    /// The time at which it expires, in seconds since 1970, if it is a JWT that says so. Its
    /// signature is not checked here: only the claim of a token that was reviewed means something.
    pub(super) fn expires_at_seconds(&self) -> Option<u64> {
        #[derive(serde::Deserialize)]
        struct Claims {
            exp: f64,
        }
        let payload = self.0.split('.').nth(1)?;
        let claims: Claims = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
        (claims.exp.is_finite() && claims.exp >= 0.0).then_some(claims.exp as u64)
    }
}

impl fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerToken")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(header::HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in all {
            headers.append(name.clone(), value.parse().unwrap());
        }
        headers
    }

    fn read(all: &[(header::HeaderName, &str)]) -> Option<String> {
        BearerToken::of(&headers(all), true).map(|token| token.expose().to_owned())
    }

    #[test]
    fn a_token_is_found_where_the_apiserver_finds_it() {
        for (value, token) in [
            ("Bearer abc", Some("abc")),
            ("bearer abc", Some("abc")),
            ("  BEARER abc  ", Some("abc")),
            ("Bearer abc def", Some("abc")),
            ("Bearer  abc", None),
            ("Bearer", None),
            ("Bearer ", None),
            ("Basic abc", None),
            ("abc", None),
            ("", None),
        ] {
            assert_eq!(read(&[(header::AUTHORIZATION, value)]).as_deref(), token, "{value:?}");
        }
        let two = [(header::AUTHORIZATION, "Bearer first"), (header::AUTHORIZATION, "Bearer second")];
        assert_eq!(read(&two).as_deref(), Some("first"));
    }

    #[test]
    fn a_websocket_may_have_it_as_a_protocol() {
        let one = format!("base64url.bearer.authorization.k8s.io.{}", BASE64_URL_SAFE_NO_PAD.encode("abc"));
        let protocol = header::SEC_WEBSOCKET_PROTOCOL;
        assert_eq!(read(&[(protocol.clone(), &format!("v4, {one}"))]).as_deref(), Some("abc"));
        let both = [(header::AUTHORIZATION, "Bearer xyz"), (protocol.clone(), &one)];
        assert_eq!(read(&both).as_deref(), Some("xyz"));
        assert_eq!(BearerToken::of(&headers(&[(protocol, &format!("v4, {one}"))]), false), None, "no websocket");
    }

    #[test]
    fn a_token_shows_nothing_and_its_digest_depends_on_key_and_audiences() {
        let token = BearerToken("very-secret".into());
        assert!(!format!("{token:?}").contains("secret"));
        let key = |bytes: &[u8]| hmac::Key::new(hmac::HMAC_SHA256, bytes);
        let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let digest = token.digest(&key(b"1"), &own(&["a"]));
        assert_eq!(digest, token.digest(&key(b"1"), &own(&["a"])));
        assert_ne!(digest, token.digest(&key(b"2"), &own(&["a"])));
        assert_ne!(digest, token.digest(&key(b"1"), &own(&["a", ""])));
        assert_ne!(digest, BearerToken("very-secreta".into()).digest(&key(b"1"), &[]));
    }

    #[test]
    fn the_end_of_a_jwt_is_read() {
        let jwt = |payload: &str| BearerToken(format!("e30.{}.x", BASE64_URL_SAFE_NO_PAD.encode(payload)).into());
        assert_eq!(jwt(r#"{"exp":1800000000,"aud":["a"]}"#).expires_at_seconds(), Some(1_800_000_000));
        assert_eq!(jwt(r#"{"exp":1.5e9}"#).expires_at_seconds(), Some(1_500_000_000));
        for other in [r#"{"exp":-1}"#, r#"{"exp":"x"}"#, "{}", "no json"] {
            assert_eq!(jwt(other).expires_at_seconds(), None, "{other}");
        }
        assert_eq!(BearerToken("opaque".into()).expires_at_seconds(), None);
    }
}
