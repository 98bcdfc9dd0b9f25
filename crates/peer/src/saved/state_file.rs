//! The format of a file.
//!
//! ```text
//! preamble   magic (8 bytes), format, cipher (0: none, 1: AES-256-GCM), salt (16 bytes)
//! record     length, content, CRC-32 over preamble, position and content
//! ```
//!
//! Numbers are little-endian and have 4 bytes, positions 8. The content of the first record is a
//! [`StateHead`] in JSON, that of the others a `TransferResponse`. With a cipher it is encrypted.
//! The trailer of the transfer is the last record, and nothing follows it.

use std::io::{self, Read, Write};

use kubefan_common::proto::v1alpha1::TransferResponse;
use prost::Message;

use super::{
    saved_error::SavedError,
    state_head::StateHead,
    state_key::{RecordCipher, StateKey},
};
use crate::{decode::CHUNK_BYTES_MAX, error::PeerError};

const MAGIC: &[u8; 8] = b"kubefan\0";
/// The number of this format. A change of the parts of a transfer changes it too.
pub(super) const FORMAT: u32 = 1;
const PLAIN: u32 = 0;
const AES_256_GCM: u32 = 1;
pub(super) const SALT_BYTES: usize = 16;
const PREAMBLE_BYTES: usize = 16 + SALT_BYTES;
/// The longest record: a chunk that compression has made slightly larger, with its tag.
const RECORD_BYTES_MAX: usize = CHUNK_BYTES_MAX + (1 << 20);

/// The first bytes of a file.
type Preamble = [u8; PREAMBLE_BYTES];

fn preamble(cipher: u32, salt: [u8; SALT_BYTES]) -> Preamble {
    let mut preamble = [0; PREAMBLE_BYTES];
    preamble[..8].copy_from_slice(MAGIC);
    preamble[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    preamble[12..16].copy_from_slice(&cipher.to_le_bytes());
    preamble[16..].copy_from_slice(&salt);
    preamble
}

fn checksum(preamble: &Preamble, position: u64, content: &[u8]) -> u32 {
    let mut digest = crc32fast::Hasher::new();
    digest.update(preamble);
    digest.update(&position.to_le_bytes());
    digest.update(content);
    digest.finalize()
}

/// The content of a file.
pub(super) struct StateParts<'a, P> {
    pub(super) head: &'a StateHead,
    pub(super) parts: P,
    /// Encrypts it, if there is one.
    pub(super) key: Option<&'a StateKey>,
    pub(super) salt: [u8; SALT_BYTES],
}

/// Writes a file. Returns its length in bytes.
///
/// # Errors
/// It cannot be written, or not be encoded. What was written must not be used.
pub(super) fn write(
    output: impl Write,
    content: StateParts<'_, impl Iterator<Item = Result<TransferResponse, PeerError>>>,
) -> Result<u64, SavedError> {
    let StateParts { head, parts, key, salt } = content;
    let cipher = key.map(|key| key.cipher(&salt).ok_or(SavedError::WrongKey)).transpose()?;
    let preamble = preamble(if cipher.is_some() { AES_256_GCM } else { PLAIN }, salt);
    let mut writer = RecordWriter { output, preamble, cipher, position: 0, bytes: PREAMBLE_BYTES as u64 };
    writer.output.write_all(&preamble)?;
    writer.put(&serde_json::to_vec(head).map_err(io::Error::from)?)?;
    for part in parts {
        writer.put(&part?.encode_to_vec())?;
    }
    writer.output.flush()?;
    Ok(writer.bytes)
}

struct RecordWriter<W> {
    output: W,
    preamble: Preamble,
    cipher: Option<RecordCipher>,
    position: u64,
    bytes: u64,
}

impl<W: Write> RecordWriter<W> {
    fn put(&mut self, content: &[u8]) -> Result<(), SavedError> {
        let malformed = || SavedError::Malformed(self.position);
        let seal = |cipher: &RecordCipher| cipher.seal(self.position, &self.preamble, content).ok_or_else(malformed);
        let sealed = self.cipher.as_ref().map(seal).transpose()?;
        let content = sealed.as_deref().unwrap_or(content);
        let length = u32::try_from(content.len()).ok().filter(|_| content.len() <= RECORD_BYTES_MAX);
        let length = length.ok_or_else(malformed)?;
        self.output.write_all(&length.to_le_bytes())?;
        self.output.write_all(content)?;
        self.output.write_all(&checksum(&self.preamble, self.position, content).to_le_bytes())?;
        self.position += 1;
        self.bytes += 8 + u64::from(length);
        Ok(())
    }
}

/// Reads a file, record by record.
pub(super) struct StateReader<R> {
    input: R,
    preamble: Preamble,
    cipher: Option<RecordCipher>,
    position: u64,
}

impl<R: Read> StateReader<R> {
    /// Reads the start of a file.
    ///
    /// # Errors
    /// It is not a file of this format, or the key does not open it.
    pub(super) fn open(mut input: R, key: Option<&StateKey>) -> Result<(StateHead, Self), SavedError> {
        let mut preamble = [0; PREAMBLE_BYTES];
        let read = read_up_to(&mut input, &mut preamble)?;
        if !MAGIC.starts_with(&preamble[..read.min(MAGIC.len())]) {
            return Err(SavedError::NotAState);
        }
        if read < PREAMBLE_BYTES {
            return Err(SavedError::Torn);
        }
        let number =
            |at: usize| u32::from_le_bytes([preamble[at], preamble[at + 1], preamble[at + 2], preamble[at + 3]]);
        if number(8) != FORMAT {
            return Err(SavedError::OtherFormat(number(8)));
        }
        let cipher = match (number(12), key) {
            (PLAIN, None) => None,
            (PLAIN, Some(_)) => return Err(SavedError::Plain),
            (AES_256_GCM, None) => return Err(SavedError::Encrypted),
            (AES_256_GCM, Some(key)) => Some(key.cipher(&preamble[16..]).ok_or(SavedError::WrongKey)?),
            _ => return Err(SavedError::NotAState),
        };
        let mut reader = Self { input, preamble, cipher, position: 0 };
        let head = reader.record()?.ok_or(SavedError::Torn)?;
        let head = serde_json::from_slice(&head).map_err(|_| SavedError::Malformed(0))?;
        Ok((head, reader))
    }

    /// Returns the next part of the transfer. `None` at the end of the file, which only a decoder
    /// can know to be its right end.
    ///
    /// # Errors
    /// The file is torn or was altered.
    pub(super) fn next_part(&mut self) -> Result<Option<TransferResponse>, SavedError> {
        let position = self.position;
        let Some(content) = self.record()? else { return Ok(None) };
        TransferResponse::decode(content.as_slice()).map(Some).map_err(|_| SavedError::Malformed(position))
    }

    fn record(&mut self) -> Result<Option<Vec<u8>>, SavedError> {
        let mut number = [0; 4];
        match read_up_to(&mut self.input, &mut number)? {
            0 => return Ok(None),
            4 => {}
            _ => return Err(SavedError::Torn),
        }
        let length = u32::from_le_bytes(number) as usize;
        if length > RECORD_BYTES_MAX {
            return Err(SavedError::Malformed(self.position));
        }
        // Not allocated at once, because the length may be wrong.
        let mut content = Vec::new();
        (&mut self.input).take(length as u64).read_to_end(&mut content)?;
        if content.len() < length || read_up_to(&mut self.input, &mut number)? < number.len() {
            return Err(SavedError::Torn);
        }
        if u32::from_le_bytes(number) != checksum(&self.preamble, self.position, &content) {
            return Err(SavedError::Checksum(self.position));
        }
        let content = match &self.cipher {
            Some(cipher) => cipher.open(self.position, &self.preamble, content).ok_or(SavedError::WrongKey)?,
            None => content,
        };
        self.position += 1;
        Ok(Some(content))
    }
}

/// Reads until `buffer` is full or the input ends. Returns the number of bytes.
fn read_up_to(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match input.read(&mut buffer[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}
