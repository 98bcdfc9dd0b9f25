//! Compression of objects at rest: zstd with a dictionary of sample objects of the same resource.
//!
//! Objects of one resource have more in common with each other than within themselves, so a
//! dictionary saves more than a higher compression level. A packed object holds a reference to its
//! packer, so the dictionary can be replaced at any time. zstd contexts are per thread and not per
//! resource: each takes a few hundred KiB, and there may be many resources.

use std::cell::RefCell;

use bytes::Bytes;
use zstd::zstd_safe::{CCtx, CDict, DCtx, DDict, compress_bound};

/// Level 3 makes pods 4 to 8 % smaller, but its prepared dictionary takes six times the memory.
const LEVEL: i32 = 1;
/// Maximum size of a dictionary, in bytes. Twice as much saves only 4 %.
const DICTIONARY_BYTES: usize = 32 << 10;
/// Bytes used of each sample. A longer sample would leave no space for the others.
const SAMPLE_BYTES_MAX: usize = 8 << 10;
/// A scratch buffer that grew beyond this many bytes for one object is freed.
const SCRATCH_BYTES_MAX: usize = 256 << 10;

thread_local! {
    static PACKING: RefCell<(CCtx<'static>, Vec<u8>)> = RefCell::new((CCtx::create(), Vec::new()));
    static UNPACKING: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// Packs the objects of one resource, and unpacks its own packed objects.
#[derive(Default)]
pub struct Packer {
    dictionary: Option<(CDict<'static>, DDict<'static>)>,
}

impl Packer {
    /// A packer whose dictionary is the samples themselves, concatenated in this order.
    ///
    /// A trained dictionary makes pods a fifth smaller if trained with a hundred of them, but
    /// training takes 150 ms. Trained with fifty, it makes them twice as large as this one does.
    pub fn new(samples: impl IntoIterator<Item = Bytes>) -> Self {
        let mut content = Vec::new();
        for sample in samples {
            content.extend_from_slice(&sample[..sample.len().min(SAMPLE_BYTES_MAX)]);
            if content.len() >= DICTIONARY_BYTES {
                break;
            }
        }
        Self { dictionary: (!content.is_empty()).then(|| (CDict::create(&content, LEVEL), DDict::create(&content))) }
    }

    /// Whether this packer has a dictionary.
    pub fn has_dictionary(&self) -> bool {
        self.dictionary.is_some()
    }

    /// `head` unchanged, followed by `json` compressed; `None` if that is not shorter than `json`
    /// alone.
    pub(super) fn pack(&self, head: &[u8], json: &[u8]) -> Option<Box<[u8]>> {
        PACKING.with_borrow_mut(|(context, scratch)| {
            scratch.clear();
            scratch.reserve(compress_bound(json.len()));
            let done = match &self.dictionary {
                Some((dictionary, _)) => context.compress_using_cdict(scratch, json, dictionary),
                None => context.compress(scratch, json, LEVEL),
            };
            let packed = done.is_ok_and(|len| head.len() + len < json.len());
            let data = packed.then(|| [head, scratch].concat().into_boxed_slice());
            if scratch.capacity() > SCRATCH_BYTES_MAX {
                *scratch = Vec::new();
            }
            data
        })
    }

    /// Decompresses an object whose JSON has `json_len` bytes.
    pub(super) fn unpack(&self, packed: &[u8], json_len: usize) -> Vec<u8> {
        let mut json = Vec::with_capacity(json_len);
        let done = UNPACKING.with_borrow_mut(|context| match &self.dictionary {
            Some((_, dictionary)) => context.decompress_using_ddict(&mut json, packed, dictionary),
            None => context.decompress(&mut json, packed),
        });
        // Only corrupted memory can cause any other result.
        assert_eq!(done, Ok(json_len), "an object must unpack to its original length");
        json
    }
}
