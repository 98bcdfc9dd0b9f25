//! The public keys of the issuer of service account tokens: a JSON Web Key Set (RFC 7517).
//!
//! No library: the maintained ones need a second cryptographic library beside ring, or the crate
//! `rsa`, which has an open advisory (RUSTSEC-2023-0071). The rest of the work is base64, and the
//! bytes in ring's form. A key is used for its own algorithm only, whatever a token says.

use std::collections::HashMap;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use kubefan_upstream::UpstreamError;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, EcdsaVerificationAlgorithm, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde::Deserialize;

use super::json_web_token::{Algorithm, JsonWebToken};

/// The most keys of an issuer.
const KEYS_MAX: usize = 64;

/// An issuer and its keys.
pub(super) struct SigningKeys {
    issuer: String,
    by_id: HashMap<String, Key>,
}

enum Key {
    Rsa {
        modulus: Vec<u8>,
        exponent: Vec<u8>,
        algorithm: Option<Algorithm>,
    },
    /// An uncompressed point.
    Ecdsa {
        point: Vec<u8>,
        algorithm: Algorithm,
    },
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct WebKey {
    kid: String,
    #[serde(rename = "use", default)]
    usage: Option<String>,
    #[serde(flatten)]
    form: Form,
}

#[derive(Deserialize)]
#[serde(tag = "kty")]
enum Form {
    #[serde(rename = "RSA")]
    Rsa { n: String, e: String, alg: Option<Algorithm> },
    #[serde(rename = "EC")]
    Ec { crv: String, x: String, y: String },
}

impl SigningKeys {
    /// Reads a key set. Keys that cannot be used are left out: their tokens go to TokenReviews.
    pub(super) fn of_json(issuer: String, json: &[u8]) -> Result<Self, UpstreamError> {
        let KeySet { keys } = serde_json::from_slice(json).map_err(UpstreamError::invalid_json)?;
        let usable = keys.into_iter().filter_map(|key| {
            let WebKey { kid, usage, form } = serde_json::from_value(key).ok()?;
            if usage.is_some_and(|usage| usage != "sig") {
                return None;
            }
            Some((kid, Key::of(form)?))
        });
        Ok(Self { issuer, by_id: usable.take(KEYS_MAX).collect() })
    }

    /// Returns the issuer that signs with them.
    pub(super) fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Whether there is a key with this ID.
    pub(super) fn has(&self, id: &str) -> bool {
        self.by_id.contains_key(id)
    }

    /// The number of keys.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The payload of a token, if one of the keys has signed it.
    pub(super) fn verified<'a>(&self, token: &'a JsonWebToken<'_>) -> Option<&'a [u8]> {
        let key = self.by_id.get(&token.key_id)?;
        key.verifies(token.algorithm, token.signed.as_bytes(), &token.signature).then_some(&token.payload)
    }
}

impl Key {
    fn of(form: Form) -> Option<Self> {
        let decode = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).ok();
        match form {
            Form::Rsa { n, e, alg } => {
                let is_rsa = alg.is_none_or(|alg| rsa(alg).is_some());
                is_rsa.then_some(Self::Rsa { modulus: decode(&n)?, exponent: decode(&e)?, algorithm: alg })
            }
            Form::Ec { crv, x, y } => {
                let (algorithm, bytes) = match crv.as_str() {
                    "P-256" => (Algorithm::ES256, 32),
                    "P-384" => (Algorithm::ES384, 48),
                    _ => return None,
                };
                let x = decode(&x)?;
                let y = decode(&y)?;
                let is_whole = x.len() == bytes && y.len() == bytes;
                is_whole.then(|| Self::Ecdsa { point: [&[4], &*x, &*y].concat(), algorithm })
            }
        }
    }

    fn verifies(&self, by: Algorithm, signed: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Rsa { modulus: n, exponent: e, algorithm } => {
                let Some(parameters) = rsa(by).filter(|_| algorithm.is_none_or(|own| own == by)) else { return false };
                RsaPublicKeyComponents { n, e }.verify(parameters, signed, signature).is_ok()
            }
            Self::Ecdsa { point, algorithm } => {
                let Some(curve) = ecdsa(by).filter(|_| *algorithm == by) else { return false };
                UnparsedPublicKey::new(curve, point).verify(signed, signature).is_ok()
            }
        }
    }
}

fn rsa(algorithm: Algorithm) -> Option<&'static RsaParameters> {
    match algorithm {
        Algorithm::RS256 => Some(&RSA_PKCS1_2048_8192_SHA256),
        Algorithm::RS384 => Some(&RSA_PKCS1_2048_8192_SHA384),
        Algorithm::RS512 => Some(&RSA_PKCS1_2048_8192_SHA512),
        Algorithm::ES256 | Algorithm::ES384 => None,
    }
}

fn ecdsa(algorithm: Algorithm) -> Option<&'static EcdsaVerificationAlgorithm> {
    match algorithm {
        Algorithm::ES256 => Some(&ECDSA_P256_SHA256_FIXED),
        Algorithm::ES384 => Some(&ECDSA_P384_SHA384_FIXED),
        Algorithm::RS256 | Algorithm::RS384 | Algorithm::RS512 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_key_sets_are_not_quoted() {
        for json in [r#""very-secret""#, r#"{"keys":"very-secret"}"#] {
            let error = SigningKeys::of_json("issuer".to_owned(), json.as_bytes()).err().unwrap().to_string();
            assert!(error.contains("invalid type, expected ") && !error.contains("very-secret"), "{error}");
        }
    }
}
