//! Deltas: an object's new bytes, compressed with its previous bytes as raw dictionary (what `zstd --patch-from` does).
//!
//! The hazard is a base that is not the one the delta was made from: decompression can then succeed with wrong bytes. So a delta
//! carries the CRC-32 of its base, and its frame a checksum of the content; without either it is refused.

use std::cell::RefCell;

use bytes::Bytes;
use zstd::zstd_safe::{CCtx, CParameter, ErrorCode, ResetDirective};

use super::FrameError;
use crate::proto::v1alpha1::ObjectDelta;

/// The level that pays: higher ones take more time for the same bytes, because nearly all of an object is one match with its base.
const LEVEL: i32 = 1;

/// At a level this low zstd indexes only the end of a dictionary that is larger than this; its table then has to grow with it.
const INDEXED_BYTES: usize = 128 << 10;

/// zstd indexes this many bytes of a dictionary for each entry of its table.
const INDEXED_BYTES_PER_ENTRY: usize = 8;

/// Windows have at most 2^this bytes, so that every decoder takes them. Objects are far below: etcd's limit is 1.5 MiB.
const WINDOW_LOG_MAX: u32 = 27;
/// A window that large is indexed by a table of 2^this entries.
const HASH_LOG_MAX: u32 = WINDOW_LOG_MAX - INDEXED_BYTES_PER_ENTRY.ilog2();

/// What starts with this is no raw dictionary to zstd but one of its own making. JSON does not.
const DICTIONARY_MAGIC: [u8; 4] = 0xEC30_A437_u32.to_le_bytes();

thread_local! {
    /// To make one takes longer than to use it. zstd lets go of what a large object made it take.
    static CONTEXT: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
}

/// The largest object that a delta may make, in bytes, unless a reader says otherwise.
pub const OBJECT_BYTES_MAX: usize = 64 << 20;

/// Why a delta gives no object. What is held is then not what the sender holds, and nothing may be made from it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// It was made from other bytes.
    #[error(
        "the delta was made from bytes with CRC-32 {expected:08x}, at version {version}; those held have {held:08x}"
    )]
    WrongBase {
        /// The version of the state it was made from.
        version: String,
        /// That state's CRC-32.
        expected: u32,
        /// The CRC-32 of the bytes that are held.
        held: u32,
    },
    /// It cannot be decompressed, or its content is not what was compressed.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// The CRC-32 (IEEE) by which a base is known.
pub fn base_crc32(base: &[u8]) -> u32 {
    crc32fast::hash(base)
}

/// The zstd frame that makes `new` out of `base`; `None` where it does not pay, because it is not smaller than `new`.
pub fn encode(base: &[u8], new: &[u8]) -> Option<Bytes> {
    if base.is_empty() || base.starts_with(&DICTIONARY_MAGIC) {
        return None;
    }
    // A frame that is not smaller has no room, and is an error.
    let mut frame = Vec::with_capacity(new.len().checked_sub(1)?);
    compress(base, new, &mut frame).ok()?;
    Some(Bytes::from(frame.into_boxed_slice()))
}

fn compress(base: &[u8], new: &[u8], frame: &mut Vec<u8>) -> Result<usize, ErrorCode> {
    let log2 = |bytes: usize| bytes.next_power_of_two().trailing_zeros();
    // By default for an object that a small table can index; above it, so that all of the base is in the table and in the window.
    let (window_log, hash_log) = match base.len() {
        0..=INDEXED_BYTES => (0, 0),
        len => (log2(len + new.len()).min(WINDOW_LOG_MAX), log2(len / INDEXED_BYTES_PER_ENTRY).min(HASH_LOG_MAX)),
    };
    CONTEXT.with_borrow_mut(|context| {
        // One that did not pay was left half done, and takes neither parameters nor a dictionary.
        context.reset(ResetDirective::SessionOnly)?;
        context.set_parameter(CParameter::CompressionLevel(LEVEL))?;
        context.set_parameter(CParameter::ChecksumFlag(true))?;
        context.set_parameter(CParameter::ContentSizeFlag(true))?;
        context.set_parameter(CParameter::WindowLog(window_log))?;
        context.set_parameter(CParameter::HashLog(hash_log))?;
        // The same as a prefix, but copied: a prefix would have to live as long as the context.
        context.load_dictionary(base)?;
        context.compress2(frame, new)
    })
}

/// The message for `new` against `base`, the object's bytes at `base_version`; `None` where it does not pay.
pub fn object_delta(base_version: String, base: &[u8], new: &[u8]) -> Option<ObjectDelta> {
    let zstd = encode(base, new)?;
    Some(ObjectDelta { base_resource_version: base_version, base_crc32: base_crc32(base), zstd })
}

/// The object that `delta` makes out of the bytes that are held; an object above `object_bytes_max` is refused before it is made.
pub fn decode(held: &[u8], delta: &ObjectDelta, object_bytes_max: usize) -> Result<Bytes, DeltaError> {
    let crc32 = base_crc32(held);
    if crc32 != delta.base_crc32 {
        let version = delta.base_resource_version.clone();
        return Err(DeltaError::WrongBase { version, expected: delta.base_crc32, held: crc32 });
    }
    Ok(super::decompress(&delta.zstd, held, object_bytes_max)?.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delta(base: &[u8], new: &[u8]) -> ObjectDelta {
        object_delta("7".to_owned(), base, new).expect("it pays")
    }

    fn pod(phase: &str, spread: usize) -> Vec<u8> {
        // Numbers that do not compress by themselves, as uids and hashes in real objects.
        let noise: String =
            (0..spread as u64).map(|i| format!("{:x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
        format!(r#"{{"metadata":{{"name":"a"}},"spec":"{noise}","status":{{"phase":"{phase}"}}}}"#).into_bytes()
    }

    #[test]
    fn a_small_change_is_a_small_delta_however_large_the_object() {
        for spread in [20, 300, 20_000, 100_000] {
            let (base, new) = (pod("Pending", spread), pod("Running", spread));
            let delta = delta(&base, &new);
            assert!(delta.zstd.len() < 80 + new.len() / 1000, "{} of {}", delta.zstd.len(), new.len());
            assert_eq!(decode(&base, &delta, OBJECT_BYTES_MAX).unwrap(), new);
        }
    }

    #[test]
    fn a_change_at_the_start_of_a_large_object_is_found_too() {
        let base = pod("Pending", 60_000);
        let new = [&br#"{"more":1,"#[..], &base[1..]].concat();
        assert!(delta(&base, &new).zstd.len() < new.len() / 100);
    }

    #[test]
    fn an_object_that_stayed_as_it_was_costs_next_to_nothing() {
        let same = pod("Running", 300);
        assert!(delta(&same, &same).zstd.len() < 40);
        assert!(delta(&same[..same.len() - 1], &same).zstd.len() < 40);
    }

    #[test]
    fn what_does_not_pay_is_not_a_delta() {
        assert_eq!(encode(b"", b"anything at all"), None);
        assert_eq!(encode(b"abc", b""), None);
        assert_eq!(encode(b"abc", b"xyz"), None);
        assert_eq!(encode(&DICTIONARY_MAGIC.repeat(9), &DICTIONARY_MAGIC.repeat(9)), None);
        assert!(encode(&pod("a", 10), &pod("b", 10)).is_some(), "and leaves no trace");
    }

    #[test]
    fn a_wrong_base_is_found_by_its_hash_and_behind_that_by_the_checksum() {
        let (base, new, other) = (pod("Pending", 99), pod("Running", 99), pod("Running", 98));
        let delta = delta(&base, &new);
        assert!(matches!(decode(&other, &delta, OBJECT_BYTES_MAX), Err(DeltaError::WrongBase { .. })));
        assert!(matches!(decode(b"", &delta, OBJECT_BYTES_MAX), Err(DeltaError::WrongBase { .. })));
        let forged = ObjectDelta { base_crc32: base_crc32(&other), ..delta };
        assert!(matches!(decode(&other, &forged, OBJECT_BYTES_MAX), Err(DeltaError::Frame(_))));
    }

    #[test]
    fn a_frame_that_cannot_be_checked_or_is_too_large_is_refused() {
        let (base, new) = (pod("Pending", 99), pod("Running", 99));
        let good = delta(&base, &new);
        let too_large = decode(&base, &good, new.len() - 1);
        assert!(matches!(too_large, Err(DeltaError::Frame(FrameError::TooLarge { .. }))), "{too_large:?}");
        let refused =
            |zstd: Vec<u8>| decode(&base, &ObjectDelta { zstd: zstd.into(), ..good.clone() }, OBJECT_BYTES_MAX);
        let with = |set: &[CParameter]| {
            let (mut context, mut frame) = (CCtx::create(), Vec::with_capacity(new.len() * 2));
            for parameter in set {
                context.set_parameter(*parameter).unwrap();
            }
            context.compress2(&mut frame, &new).unwrap();
            frame
        };
        assert!(
            refused(with(&[CParameter::ChecksumFlag(true)])).is_ok(),
            "one that does not use the base is a delta too"
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
        fn any_pair_makes_the_round_trip(base: Vec<u8>, new: Vec<u8>, share in 0..200usize, times in 0..20usize) {
            let base = base.repeat(times);
            let new = [&base[..share.min(base.len())], &new].concat();
            if let Some(delta) = object_delta("1".to_owned(), &base, &new) {
                prop_assert!(delta.zstd.len() < new.len());
                prop_assert_eq!(decode(&base, &delta, OBJECT_BYTES_MAX).unwrap(), new);
            }
        }

        #[test]
        fn a_garbled_delta_is_an_error_and_never_other_bytes(at in 0..1000usize, flip in 1..=255u8, cut in any::<bool>()) {
            let (base, new) = (pod("Pending", 40), pod("Running since 2026-11-21T10:00:00Z", 41));
            let mut delta = delta(&base, &new);
            let at = at % delta.zstd.len();
            let mut bytes = delta.zstd.to_vec();
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            delta.zstd = bytes.into();
            if let Ok(decoded) = decode(&base, &delta, OBJECT_BYTES_MAX) {
                prop_assert_eq!(decoded, new, "a bit that says nothing");
            }
        }

        #[test]
        fn no_bytes_are_too_strange(base: Vec<u8>, zstd: Vec<u8>) {
            let magic = [0x28, 0xb5, 0x2f, 0xfd].into_iter().chain(zstd.iter().copied()).collect::<Vec<u8>>();
            for zstd in [zstd, magic] {
                let delta = ObjectDelta { base_crc32: base_crc32(&base), zstd: zstd.into(), ..ObjectDelta::default() };
                let _ = decode(&base, &delta, 1 << 20);
            }
        }
    }
}
