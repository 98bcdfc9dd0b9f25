//! The encryption of files: AES-256-GCM for each record.
//!
//! A nonce must never repeat under a key. So each file has a key of its own, made from a random
//! salt, and the nonce of a record is its position.

use std::{fmt, fs, path::Path};

use base64::{Engine, prelude::BASE64_STANDARD};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey},
    hmac,
};

use super::saved_error::SavedError;

/// Length of a key, in bytes.
const KEY_BYTES: usize = 32;
/// Separates these keys from others that are made of the same key.
const PURPOSE: &[u8] = b"kubefan state file";

/// The operator's key, from which the keys of files are made.
pub struct StateKey(hmac::Key);

impl StateKey {
    /// Reads a key file: 32 bytes in base64.
    ///
    /// # Errors
    /// The file cannot be read, or has no key.
    pub fn read(path: &Path) -> Result<Self, SavedError> {
        // A pipe would block.
        if !fs::metadata(path)?.is_file() {
            return Err(SavedError::NotAFile);
        }
        Self::parse(&fs::read_to_string(path)?)
    }

    fn parse(text: &str) -> Result<Self, SavedError> {
        let bytes = BASE64_STANDARD.decode(text.trim()).map_err(|_| SavedError::NoKey)?;
        if bytes.len() != KEY_BYTES {
            return Err(SavedError::NoKey);
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &bytes)))
    }

    /// Makes the cipher of a file with this salt.
    pub(super) fn cipher(&self, salt: &[u8]) -> Option<RecordCipher> {
        let mut context = hmac::Context::with_key(&self.0);
        context.update(PURPOSE);
        context.update(salt);
        let key = UnboundKey::new(&AES_256_GCM, context.sign().as_ref()).ok()?;
        Some(RecordCipher(LessSafeKey::new(key)))
    }
}

impl fmt::Debug for StateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StateKey")
    }
}

/// Encrypts and decrypts the records of one file.
pub(super) struct RecordCipher(LessSafeKey);

impl RecordCipher {
    /// Encrypts the record at a position. `None` if it is too long.
    pub(super) fn seal(&self, position: u64, preamble: &[u8], content: &[u8]) -> Option<Vec<u8>> {
        let mut sealed = content.to_vec();
        self.0.seal_in_place_append_tag(nonce(position), Aad::from(preamble), &mut sealed).ok()?;
        Some(sealed)
    }

    /// Decrypts the record at a position. `None` if the key is another one, or the record was
    /// altered or moved.
    pub(super) fn open(&self, position: u64, preamble: &[u8], mut sealed: Vec<u8>) -> Option<Vec<u8>> {
        let length = self.0.open_in_place(nonce(position), Aad::from(preamble), &mut sealed).ok()?.len();
        sealed.truncate(length);
        Some(sealed)
    }
}

fn nonce(position: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&position.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_32_bytes_in_base64() {
        let text = |bytes: usize| format!("{}\n", BASE64_STANDARD.encode(vec![7; bytes]));
        assert!(StateKey::parse(&text(KEY_BYTES)).is_ok());
        for wrong in [text(31), text(33), String::new(), "x".to_owned()] {
            assert!(matches!(StateKey::parse(&wrong), Err(SavedError::NoKey)), "{wrong}");
        }
    }

    #[test]
    fn a_record_opens_only_at_its_place_in_its_file() {
        let key = StateKey::parse(&BASE64_STANDARD.encode([7; KEY_BYTES])).unwrap();
        let cipher = key.cipher(b"salt").unwrap();
        let sealed = cipher.seal(3, b"preamble", b"secret").unwrap();
        assert!(!sealed.windows(6).any(|part| part == b"secret"));
        assert_eq!(cipher.open(3, b"preamble", sealed.clone()).unwrap(), b"secret");
        assert!(cipher.open(4, b"preamble", sealed.clone()).is_none());
        assert!(cipher.open(3, b"another", sealed.clone()).is_none());
        assert!(key.cipher(b"other").unwrap().open(3, b"preamble", sealed).is_none());
    }
}
