//! Compression of objects at rest: zstd with a dictionary made from the resource's own first objects.
//!
//! Objects of one resource repeat each other more than themselves, so a dictionary is worth more than a level. A packed object keeps
//! the packer that it was made by, so another dictionary may follow at any time. Contexts belong to threads, not to resources: each
//! takes a few hundred KiB, and there may be many resources.

use std::{cell::RefCell, sync::Arc};

use zstd::zstd_safe::{CCtx, CDict, DCtx, DDict, compress_bound};

use super::object::Object;

/// Level 3 makes pods 4 to 8 % smaller, and its prepared dictionary takes six times the memory.
const LEVEL: i32 = 1;
/// The most that a dictionary holds, in bytes. Twice as much saves 4 %.
const DICTIONARY_BYTES: usize = 32 << 10;
/// A sample longer than this would crowd out the others, in bytes.
const SAMPLE_BYTES_MAX: usize = 8 << 10;
/// A scratch buffer that has grown beyond this for one object is not kept, in bytes.
const SCRATCH_BYTES_MAX: usize = 256 << 10;

thread_local! {
    static PACKING: RefCell<(CCtx<'static>, Vec<u8>)> = RefCell::new((CCtx::create(), Vec::new()));
    static UNPACKING: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// Packs objects of one resource, and unpacks what it has packed.
#[derive(Default)]
pub struct Packer {
    dictionary: Option<(CDict<'static>, DDict<'static>)>,
}

impl Packer {
    /// A packer whose dictionary is the samples themselves, the first ones first.
    ///
    /// A trained dictionary makes pods a fifth smaller where it has learnt from a hundred of them, but takes 150 ms; from fifty it makes
    /// them twice as large as these.
    pub fn new(samples: &[Arc<Object>]) -> Self {
        let mut content = Vec::new();
        for sample in samples {
            let json = sample.bytes();
            content.extend_from_slice(&json[..json.len().min(SAMPLE_BYTES_MAX)]);
            if content.len() >= DICTIONARY_BYTES {
                break;
            }
        }
        Self { dictionary: (!content.is_empty()).then(|| (CDict::create(&content, LEVEL), DDict::create(&content))) }
    }

    /// Whether it has a dictionary.
    pub fn has_dictionary(&self) -> bool {
        self.dictionary.is_some()
    }

    /// `head` as it is, followed by `json` packed; `None` where that is not shorter than `json` alone.
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

    /// The `json_len` bytes that were packed.
    pub(super) fn unpack(&self, packed: &[u8], json_len: usize) -> Vec<u8> {
        let mut json = Vec::with_capacity(json_len);
        let done = UNPACKING.with_borrow_mut(|context| match &self.dictionary {
            Some((_, dictionary)) => context.decompress_using_ddict(&mut json, packed, dictionary),
            None => context.decompress(&mut json, packed),
        });
        // Anything else is memory that something else has written to.
        assert_eq!(done, Ok(json_len), "what this packer has packed, it unpacks");
        json
    }
}

/// Chooses the samples of a dictionary among the objects that pass by: spread evenly over all of them, however many will come.
///
/// Lists come in the order of keys, so the first objects alone would be those of one namespace.
#[derive(Default)]
pub struct Sampler {
    samples: Vec<Arc<Object>>,
    /// Every so many objects one is taken, as a power of two; one more whenever there are too many samples.
    stride_log2: u32,
    seen: usize,
}

impl Sampler {
    /// How many samples are held at most; half as many at least, once so many objects have passed.
    pub const SAMPLES_MAX: usize = 32;

    /// Looks at an object.
    pub fn look(&mut self, object: &Arc<Object>) {
        if self.seen & ((1 << self.stride_log2) - 1) == 0 {
            if self.samples.len() == Self::SAMPLES_MAX {
                let mut keep = [true, false].into_iter().cycle();
                self.samples.retain(|_| keep.next().unwrap_or_default());
                self.stride_log2 += 1;
            }
            self.samples.push(object.clone());
        }
        self.seen += 1;
    }

    /// The number of objects looked at.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// A packer made of the samples so far.
    pub fn packer(&self) -> Packer {
        let mut samples: Vec<_> = self.samples.iter().enumerate().collect();
        // Neighbours are most alike, and not all may fit: first one of each half, then one of each quarter, and so on.
        samples.sort_by_key(|(at, _)| at.reverse_bits());
        Packer::new(&samples.into_iter().map(|(_, sample)| sample.clone()).collect::<Vec<_>>())
    }
}
