//! Deltas: an object's new bytes, compressed with its previous bytes as a raw dictionary, like
//! `zstd --patch-from`.
//!
//! The problem: most changes of an object touch a few bytes, but a watch sends the whole object. A
//! delta is little more than the change, and any zstd library can decode it. Its base is the
//! previous state of the object, whatever state a single subscriber has, so one delta serves all
//! subscribers. The obvious alternative, a JSON patch, does not reproduce the apiserver's bytes.
//!
//! The hazard is a wrong base: decompression can then succeed with wrong bytes. So a delta carries
//! the CRC-32 of its base, and its frame a checksum of the content. A frame without a checksum is
//! refused.

use std::cell::RefCell;

use bytes::Bytes;
use zstd::zstd_safe::{CCtx, CParameter, ErrorCode, ResetDirective};

use super::FrameError;
use crate::proto::v1alpha1::ObjectDelta;

/// Higher levels take longer and save nothing, because nearly all of an object is one match with
/// its base.
const LEVEL: i32 = 1;

/// At this level zstd indexes only the end of a dictionary that is larger than this, unless its
/// hash table is enlarged.
const INDEXED_BYTES: usize = 128 << 10;

/// zstd indexes one position of a dictionary per this many bytes.
const INDEXED_BYTES_PER_ENTRY: usize = 8;

/// Windows are at most 2^27 bytes, which every decoder accepts. Objects are far smaller: etcd's
/// limit is 1.5 MiB.
const WINDOW_LOG_MAX: u32 = 27;
/// log2 of the hash table that indexes a window of the maximum size.
const HASH_LOG_MAX: u32 = WINDOW_LOG_MAX - INDEXED_BYTES_PER_ENTRY.ilog2();

/// zstd would parse bytes that start like this as a trained dictionary. JSON never does.
const DICTIONARY_MAGIC: [u8; 4] = 0xEC30_A437_u32.to_le_bytes();

thread_local! {
    /// Creating a context takes longer than using it. zstd frees excess memory after a large
    /// object.
    static CONTEXT: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
}

/// Default limit for the size of a decoded object, in bytes.
pub const OBJECT_BYTES_MAX: usize = 64 << 20;

/// The reason why a delta cannot be decoded. The client's base then differs from the sender's, and
/// must not be used again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// The delta was made from other bytes.
    #[error(
        "wrong base: the delta needs the object at version {version} with CRC-32 {expected:08x}, but the client's copy \
         has {actual:08x}"
    )]
    WrongBase {
        /// The version of the expected base.
        version: String,
        /// The CRC-32 of the expected base.
        expected: u32,
        /// The CRC-32 of the bytes that the client has.
        actual: u32,
    },
    /// The delta cannot be decompressed, or its content is corrupt.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// The CRC-32 (IEEE) that identifies a base.
pub fn base_crc32(base: &[u8]) -> u32 {
    crc32fast::hash(base)
}

/// Returns the zstd frame that turns `base` into `new`. `None` if it is not smaller than `new`.
pub fn encode(base: &[u8], new: &[u8]) -> Option<Bytes> {
    if base.is_empty() || base.starts_with(&DICTIONARY_MAGIC) {
        return None;
    }
    // A frame that is not smaller does not fit and gives an error.
    let mut frame = Vec::with_capacity(new.len().checked_sub(1)?);
    compress(base, new, &mut frame).ok()?;
    Some(Bytes::from(frame.into_boxed_slice()))
}

fn compress(base: &[u8], new: &[u8], frame: &mut Vec<u8>) -> Result<usize, ErrorCode> {
    let log2 = |bytes: usize| bytes.next_power_of_two().trailing_zeros();
    // zstd's defaults are enough for a small base. For a larger one, both the hash table and the
    // window must cover all of it.
    let (window_log, hash_log) = match base.len() {
        0..=INDEXED_BYTES => (0, 0),
        len => (log2(len + new.len()).min(WINDOW_LOG_MAX), log2(len / INDEXED_BYTES_PER_ENTRY).min(HASH_LOG_MAX)),
    };
    CONTEXT.with_borrow_mut(|context| {
        // An earlier compression that failed leaves the context busy; it then accepts neither
        // parameters nor a dictionary.
        context.reset(ResetDirective::SessionOnly)?;
        context.set_parameter(CParameter::CompressionLevel(LEVEL))?;
        context.set_parameter(CParameter::ChecksumFlag(true))?;
        context.set_parameter(CParameter::ContentSizeFlag(true))?;
        context.set_parameter(CParameter::WindowLog(window_log))?;
        context.set_parameter(CParameter::HashLog(hash_log))?;
        // Like a prefix, but copied: a prefix would have to live as long as the context.
        context.load_dictionary(base)?;
        context.compress2(frame, new)
    })
}

/// The message that turns `base`, the object's bytes at `base_version`, into `new`. `None` if it
/// would not be smaller than `new`.
pub fn object_delta(base_version: String, base: &[u8], new: &[u8]) -> Option<ObjectDelta> {
    let zstd = encode(base, new)?;
    Some(ObjectDelta { base_resource_version: base_version, base_crc32: base_crc32(base), zstd })
}

/// Applies a delta to `base`, the bytes that the client has. An object larger than
/// `object_bytes_max` is refused before it is decompressed.
pub fn decode(base: &[u8], delta: &ObjectDelta, object_bytes_max: usize) -> Result<Bytes, DeltaError> {
    let crc32 = base_crc32(base);
    if crc32 != delta.base_crc32 {
        let version = delta.base_resource_version.clone();
        return Err(DeltaError::WrongBase { version, expected: delta.base_crc32, actual: crc32 });
    }
    Ok(super::decompress(&delta.zstd, base, object_bytes_max)?.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delta(base: &[u8], new: &[u8]) -> ObjectDelta {
        object_delta("7".to_owned(), base, new).expect("the delta is smaller")
    }

    fn pod(phase: &str, spread: usize) -> Vec<u8> {
        // Numbers that do not compress, like the uids and hashes in real objects.
        let noise: String =
            (0..spread as u64).map(|i| format!("{:x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
        format!(r#"{{"metadata":{{"name":"a"}},"spec":"{noise}","status":{{"phase":"{phase}"}}}}"#).into_bytes()
    }

    #[test]
    fn a_small_change_is_a_small_delta_however_large_the_object() {
        for spread in [20, 300, 20_000, 100_000] {
            let base = pod("Pending", spread);
            let new = pod("Running", spread);
            let delta = delta(&base, &new);
            assert!(delta.zstd.len() < 80 + new.len() / 1000, "{} of {}", delta.zstd.len(), new.len());
            assert_eq!(decode(&base, &delta, OBJECT_BYTES_MAX).unwrap(), new);
        }
    }

    #[test]
    fn a_change_at_the_start_of_a_large_object_is_a_small_delta() {
        let base = pod("Pending", 60_000);
        let new = [&br#"{"more":1,"#[..], &base[1..]].concat();
        assert!(delta(&base, &new).zstd.len() < new.len() / 100);
    }

    #[test]
    fn an_unchanged_object_is_a_tiny_delta() {
        let same = pod("Running", 300);
        assert!(delta(&same, &same).zstd.len() < 40);
        assert!(delta(&same[..same.len() - 1], &same).zstd.len() < 40);
    }

    #[test]
    fn a_delta_that_saves_nothing_is_not_made() {
        assert_eq!(encode(b"", b"anything at all"), None);
        assert_eq!(encode(b"abc", b""), None);
        assert_eq!(encode(b"abc", b"xyz"), None);
        assert_eq!(encode(&DICTIONARY_MAGIC.repeat(9), &DICTIONARY_MAGIC.repeat(9)), None);
        assert!(encode(&pod("a", 10), &pod("b", 10)).is_some(), "an earlier failure has no effect");
    }

    #[test]
    fn a_wrong_base_is_detected_by_its_crc_and_otherwise_by_the_checksum() {
        let base = pod("Pending", 99);
        let new = pod("Running", 99);
        let other = pod("Running", 98);
        let delta = delta(&base, &new);
        assert!(matches!(decode(&other, &delta, OBJECT_BYTES_MAX), Err(DeltaError::WrongBase { .. })));
        assert!(matches!(decode(b"", &delta, OBJECT_BYTES_MAX), Err(DeltaError::WrongBase { .. })));
        let forged = ObjectDelta { base_crc32: base_crc32(&other), ..delta };
        assert!(matches!(decode(&other, &forged, OBJECT_BYTES_MAX), Err(DeltaError::Frame(_))));
    }

    #[test]
    fn a_frame_that_cannot_be_verified_or_is_too_large_is_refused() {
        let base = pod("Pending", 99);
        let new = pod("Running", 99);
        let good = delta(&base, &new);
        let too_large = decode(&base, &good, new.len() - 1);
        assert!(matches!(too_large, Err(DeltaError::Frame(FrameError::TooLarge { .. }))), "{too_large:?}");
        let refused =
            |zstd: Vec<u8>| decode(&base, &ObjectDelta { zstd: zstd.into(), ..good.clone() }, OBJECT_BYTES_MAX);
        let with = |set: &[CParameter]| {
            let mut context = CCtx::create();
            let mut frame = Vec::with_capacity(new.len() * 2);
            for parameter in set {
                context.set_parameter(*parameter).unwrap();
            }
            context.compress2(&mut frame, &new).unwrap();
            frame
        };
        assert!(
            refused(with(&[CParameter::ChecksumFlag(true)])).is_ok(),
            "a frame that does not use the base is valid"
        );
        for frame in [
            with(&[]),
            with(&[CParameter::ChecksumFlag(true), CParameter::ContentSizeFlag(false)]),
            [good.zstd.to_vec(), good.zstd.to_vec()].concat(),
            Vec::new(),
        ] {
            assert!(matches!(refused(frame), Err(DeltaError::Frame(FrameError::Broken(_)))));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_pair_of_objects_round_trips(base: Vec<u8>, new: Vec<u8>, share in 0..200usize, times in 0..20usize) {
            let base = base.repeat(times);
            let new = [&base[..share.min(base.len())], &new].concat();
            if let Some(delta) = object_delta("1".to_owned(), &base, &new) {
                prop_assert!(delta.zstd.len() < new.len());
                prop_assert_eq!(decode(&base, &delta, OBJECT_BYTES_MAX).unwrap(), new);
            }
        }

        #[test]
        fn a_corrupt_delta_never_decodes_to_other_bytes(at in 0..1000usize, flip in 1..=255u8, cut in any::<bool>()) {
            let base = pod("Pending", 40);
            let new = pod("Running since 2026-11-21T10:00:00Z", 41);
            let mut delta = delta(&base, &new);
            let at = at % delta.zstd.len();
            let mut bytes = delta.zstd.to_vec();
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            delta.zstd = bytes.into();
            if let Ok(decoded) = decode(&base, &delta, OBJECT_BYTES_MAX) {
                prop_assert_eq!(decoded, new, "the flipped bit has no meaning");
            }
        }

        #[test]
        fn any_bytes_are_accepted_without_a_panic(base: Vec<u8>, zstd: Vec<u8>) {
            let magic = [0x28, 0xb5, 0x2f, 0xfd].into_iter().chain(zstd.iter().copied()).collect::<Vec<u8>>();
            for zstd in [zstd, magic] {
                let delta = ObjectDelta { base_crc32: base_crc32(&base), zstd: zstd.into(), ..ObjectDelta::default() };
                let _ = decode(&base, &delta, 1 << 20);
            }
        }
    }
}
