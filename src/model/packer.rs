//! Compression of objects at rest: zstd with a dictionary made from the resource's own first objects.
//!
//! Objects of one resource repeat each other more than themselves, so a dictionary is worth more than a level. A packed object keeps
//! the packer that it was made by, so another dictionary may follow at any time. Contexts belong to threads, not to resources: each
//! takes a few hundred KiB, and there may be many resources.

use std::{cell::RefCell, sync::Arc};

use zstd::zstd_safe::{CCtx, CDict, DCtx, DDict, compress_bound};

use super::object::Object;

/// Level 5 makes pods a tenth smaller and takes three times as long, level 1 a tenth larger and is hardly faster.
const LEVEL: i32 = 3;
/// The size of a dictionary, in bytes. Twice as much saves 3 %.
const DICTIONARY_BYTES: usize = 32 << 10;
/// A sample longer than this would crowd out the others, in bytes.
const SAMPLE_BYTES_MAX: usize = 16 << 10;
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
    /// A packer with a dictionary made of samples, in some 100 ms; without one where they are too few.
    ///
    /// A trained dictionary also holds the statistics of its samples, so that packing is twice as fast as with their plain bytes.
    pub fn train(samples: &[Arc<Object>]) -> Self {
        let samples: Vec<_> = samples.iter().map(|sample| sample.bytes()).collect();
        let parts: Vec<_> = samples.iter().map(|json| &json[..json.len().min(SAMPLE_BYTES_MAX)]).collect();
        // A failure says that there is too little to learn from.
        let dictionary = zstd::dict::from_samples(&parts, DICTIONARY_BYTES).ok();
        Self { dictionary: dictionary.map(|content| (CDict::create(&content, LEVEL), DDict::create(&content))) }
    }

    /// Whether it has learnt from samples.
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
    pub const SAMPLES_MAX: usize = 96;

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

    /// A packer made from the samples so far.
    pub fn train(&self) -> Packer {
        Packer::train(&self.samples)
    }
}
