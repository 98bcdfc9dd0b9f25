//! Chunks of a snapshot or of a list: a run of objects, encoded once and sent to many.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kubefan_cache::{budget::Budgets, kube_encoding::list::ListEncoder};
use kubefan_common::encoding::chunk;
use kubefan_gzip::{Compressors, Piece};
use kubefan_model::object::Object;
use kubefan_telemetry::metrics::GzipPieces;
use tokio::time::Instant;

use super::{
    control,
    encoder::Encoder,
    frame::{Body, EventHead, Sink, put_delimited},
    frame_buf::FrameBuf,
};

/// The bytes of a chunk.
#[derive(Clone)]
pub enum EncodedChunk {
    /// A whole gRPC message.
    Message(Bytes),
    /// A piece of a gzip body: events of a watch over HTTP, or items of a list.
    Piece(Piece),
}

impl EncodedChunk {
    /// Its size on the wire.
    pub fn wire_len(&self) -> usize {
        match self {
            Self::Message(bytes) => bytes.len(),
            Self::Piece(piece) => piece.wire_len(),
        }
    }

    /// Adds the chunk, which has this many objects, to frames. `is_new` if it was encoded for them.
    pub fn append_to(&self, objects: usize, is_new: bool, frames: &mut FrameBuf) {
        match self {
            Self::Message(bytes) => {
                frames.push(bytes.clone());
                frames.count(1);
            }
            Self::Piece(piece) => {
                frames.push_piece(piece);
                frames.count_pieces(GzipPieces { made: is_new.into(), sent: 1, plain_bytes: 0 });
                frames.count(objects);
            }
        }
    }
}

/// Encodes runs of objects.
pub trait ChunkEncoder {
    /// Encodes a run of objects, which have this many bytes of JSON together. `may_compress`: a
    /// piece of a gzip body may be compressed; otherwise it is stored.
    fn encode(&self, objects: &[Arc<Object>], json_bytes: usize, may_compress: bool) -> EncodedChunk;

    /// The length of their plain items, if the head of a list needs it.
    fn items_len(&self, objects: &[Arc<Object>]) -> usize;

    /// Whether its chunks are pieces of gzip bodies.
    fn is_gzip(&self) -> bool;

    /// The budgets of the chunks that are retained, and of CPU time.
    fn budgets(&self) -> &Budgets;

    /// Takes the CPU time to compress a run with this many bytes of JSON. Returns false if the
    /// budget is spent.
    fn takes_compression(&self, json_bytes: usize) -> bool {
        !self.is_gzip() || self.budgets().chunk_compression.take(json_bytes, Instant::now())
    }
}

/// Objects at the start of a watch.
impl ChunkEncoder for Encoder {
    fn encode(&self, objects: &[Arc<Object>], json_bytes: usize, may_compress: bool) -> EncodedChunk {
        if self.is_gzip() {
            let mut events = self.buffer(json_bytes + 64 * objects.len());
            for object in objects {
                self.object(object, &mut events);
            }
            return EncodedChunk::Piece(self.piece(events.freeze(), may_compress));
        }
        let mut content = BytesMut::with_capacity(json_bytes + 128 * objects.len());
        for object in objects {
            let body = Body::object(self.snapshot_bytes(object));
            put_delimited(&EventHead::of_snapshot(object), &body, &mut content);
        }
        let mut message = self.buffer(0);
        match chunk::encode_content(&content) {
            Ok(zstd) => message.message(&control::snapshot_chunk(zstd)),
            // More than a chunk may hold: the objects are sent one by one.
            Err(_) => {
                for object in objects {
                    self.object(object, &mut message);
                }
            }
        }
        EncodedChunk::Message(message.freeze())
    }

    fn items_len(&self, _: &[Arc<Object>]) -> usize {
        0
    }

    fn is_gzip(&self) -> bool {
        Encoder::is_gzip(self)
    }

    fn budgets(&self) -> &Budgets {
        Encoder::budgets(self)
    }
}

/// Encodes the items of lists as pieces of gzip bodies.
pub struct ListPieces {
    /// The encoder of plain items.
    pub items: ListEncoder,
    /// The compressors of the cache's lists.
    pub compressors: Arc<Compressors>,
    /// The budgets of the pieces that are retained, and of CPU time.
    pub budgets: Budgets,
}

/// Items of a list. The separator before a chunk is not part of it, so a chunk may be the first.
impl ChunkEncoder for ListPieces {
    fn encode(&self, objects: &[Arc<Object>], json_bytes: usize, may_compress: bool) -> EncodedChunk {
        let mut items = BytesMut::with_capacity(json_bytes + objects.len());
        for (index, object) in objects.iter().enumerate() {
            self.items.put(object, index == 0, &mut items);
        }
        EncodedChunk::Piece(self.compressors.piece(items.freeze(), may_compress))
    }

    fn items_len(&self, objects: &[Arc<Object>]) -> usize {
        if !self.items.needs_items_len() {
            return 0;
        }
        objects.iter().map(|object| self.items.item_len(object)).sum()
    }

    fn is_gzip(&self) -> bool {
        true
    }

    fn budgets(&self) -> &Budgets {
        &self.budgets
    }
}
