//! The protocols that a websocket's handshake names, and the token among them, read exactly as the
//! apiserver reads them (`request/websocket`).
//!
//! The hazard is a token that one reader of the header takes for a protocol: it would be sent back
//! to the browser, or on to the apiserver.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderMap, HeaderValue, header};

/// The prefix of a bearer token in `Sec-WebSocket-Protocol`, for browsers, which cannot set headers
/// (`apiserver/pkg/authentication/request/websocket`).
const TOKEN_PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// The values of `Sec-WebSocket-Protocol`.
pub struct WebsocketProtocols<'a> {
    /// The tokens, encoded and without their prefix.
    tokens: Vec<&'a str>,
    /// All other values, empty ones included.
    others: Vec<&'a str>,
}

impl<'a> WebsocketProtocols<'a> {
    /// Splits the protocols in the headers of a request.
    pub fn of(headers: &'a HeaderMap) -> Self {
        let values = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).into_iter();
        let values = values.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
        let mut all = Self { tokens: Vec::new(), others: Vec::new() };
        for value in values.map(str::trim) {
            match value.strip_prefix(TOKEN_PREFIX) {
                Some(token) => all.tokens.push(token),
                None => all.others.push(value),
            }
        }
        all
    }

    /// Whether there is a token, valid or not.
    pub fn has_token(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Returns the token. `None` also for headers that the apiserver refuses: several tokens, valid
    /// or not, and a token without another protocol beside it.
    pub(super) fn token(&self) -> Option<String> {
        let [encoded] = self.tokens[..] else { return None };
        if self.others.is_empty() {
            return None;
        }
        let token = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(encoded).ok()?).ok()?;
        Some(token).filter(|token| !token.is_empty())
    }

    /// Returns the names of the protocols, without tokens.
    pub fn names(&self) -> Vec<&'a str> {
        self.others.iter().copied().filter(|name| !name.is_empty()).collect()
    }

    /// Returns the header without tokens. `None` if nothing is left of it.
    pub fn without_token(&self) -> Option<HeaderValue> {
        let left = HeaderValue::try_from(self.others.join(", ")).ok()?;
        (!left.is_empty()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_no_protocol_for_any_reader() {
        let token = |text: &str| format!("{TOKEN_PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(text));
        let (abc, def) = (token("abc"), token("def"));
        let invalid = format!("{TOKEN_PREFIX}!");
        let both = format!("v4, {abc}");
        for (values, has_token, found, names, left) in [
            (vec![], false, None, vec![], None),
            (vec!["v4"], false, None, vec!["v4"], Some("v4")),
            (vec!["v4,v5"], false, None, vec!["v4", "v5"], Some("v4, v5")),
            (vec![both.as_str()], true, Some("abc"), vec!["v4"], Some("v4")),
            (vec![abc.as_str(), "v4"], true, Some("abc"), vec!["v4"], Some("v4")),
            (vec![abc.as_str(), "v4,"], true, Some("abc"), vec!["v4"], Some("v4, ")),
            // The apiserver counts an empty value as a protocol beside the token.
            (vec![abc.as_str(), ""], true, Some("abc"), vec![], None),
            (vec![abc.as_str()], true, None, vec![], None),
            (vec![both.as_str(), def.as_str()], true, None, vec!["v4"], Some("v4")),
            (vec![both.as_str(), invalid.as_str()], true, None, vec!["v4"], Some("v4")),
            (vec![TOKEN_PREFIX, "v4"], true, None, vec!["v4"], Some("v4")),
        ] {
            let mut headers = HeaderMap::new();
            for value in &values {
                headers.append(header::SEC_WEBSOCKET_PROTOCOL, value.parse().unwrap());
            }
            let protocols = WebsocketProtocols::of(&headers);
            assert_eq!(protocols.has_token(), has_token, "{values:?}");
            assert_eq!(protocols.token().as_deref(), found, "{values:?}");
            assert_eq!(protocols.names(), names, "{values:?}");
            let expected = left.map(|left| HeaderValue::from_str(left).unwrap());
            assert_eq!(protocols.without_token(), expected, "{values:?}");
        }
    }
}
