//! JSON Web Tokens (RFC 7519) in the compact form of RFC 7515, with the algorithms that
//! kube-apiserver signs with.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::{Deserialize, de::IgnoredAny};

/// The longest token that is looked at, in bytes. Those of service accounts have one or two
/// thousand.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// The algorithm of a token's signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) enum Algorithm {
    RS256,
    RS384,
    RS512,
    ES256,
    ES384,
}

/// A token whose signature was not verified yet.
pub(super) struct JsonWebToken<'a> {
    pub(super) algorithm: Algorithm,
    pub(super) key_id: String,
    /// The signed part of the token.
    pub(super) signed: &'a str,
    pub(super) signature: Vec<u8>,
    pub(super) payload: Vec<u8>,
}

#[derive(Deserialize)]
struct Header {
    #[serde(rename = "alg")]
    algorithm: Algorithm,
    #[serde(rename = "kid")]
    key_id: String,
    /// Extensions that must be understood.
    #[serde(rename = "crit")]
    critical: Option<IgnoredAny>,
}

impl<'a> JsonWebToken<'a> {
    /// Parses a token. `None` for any other text.
    pub(super) fn parse(text: &'a str) -> Option<Self> {
        if text.len() > TOKEN_BYTES_MAX {
            return None;
        }
        let decode = |part: &str| BASE64_URL_SAFE_NO_PAD.decode(part).ok();
        let (signed, signature) = text.rsplit_once('.')?;
        let (header, payload) = signed.split_once('.')?;
        let Header { algorithm, key_id, critical } = serde_json::from_slice(&decode(header)?).ok()?;
        if critical.is_some() {
            return None;
        }
        // A further dot is no letter of base64.
        Some(Self { algorithm, key_id, signed, signature: decode(signature)?, payload: decode(payload)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(header: &str) -> String {
        let encode = |part: &str| BASE64_URL_SAFE_NO_PAD.encode(part);
        format!("{}.{}.{}", encode(header), encode("{}"), encode("signature"))
    }

    #[test]
    fn only_a_signed_token_of_a_known_algorithm_is_one() {
        let good = token(r#"{"alg":"ES256","kid":"a"}"#);
        let parsed = JsonWebToken::parse(&good).unwrap();
        assert_eq!((parsed.algorithm, parsed.key_id.as_str()), (Algorithm::ES256, "a"));
        assert_eq!((parsed.signature.as_slice(), parsed.payload.as_slice()), (&b"signature"[..], &b"{}"[..]));
        for header in [
            r#"{"alg":"none","kid":"a"}"#,
            r#"{"alg":"HS256","kid":"a"}"#,
            r#"{"alg":"ES256"}"#,
            r#"{"alg":"ES256","kid":"a","crit":["b64"]}"#,
            r#"{"alg":"ES256","alg":"RS256","kid":"a"}"#,
            "",
        ] {
            assert!(JsonWebToken::parse(&token(header)).is_none(), "{header}");
        }
        for text in ["", "a", "a.b", "a.b.c", &format!("{good}.x"), &"a".repeat(TOKEN_BYTES_MAX + 1)] {
            assert!(JsonWebToken::parse(text).is_none(), "{text}");
        }
    }
}
