//! Lists and objects as gzip bodies.
//!
//! The chunks of a list are compressed once for all its readers (see [`SharedList`]). A body has
//! them between pieces of its own: the head, the separators, and the tail.

use bytes::{Bytes, BytesMut};
use kubefan_audit::Notes;
use kubefan_cache::kube_encoding::list::ListMeta;
use kubefan_fanout::{ListExtent, Served, SharedList};
use kubefan_gzip::{Checksum, END_BYTES, HEADER, Piece, end};
use kubefan_telemetry::metrics::GzipPieces;
use tokio::task::yield_now;

use crate::sliced_list::{Chunk, SlicedList};

/// The least size of a list or an object that is compressed, as the apiserver's
/// `defaultGzipThresholdBytes`.
pub(super) const COMPRESSED_BYTES_MIN: usize = 128 << 10;
/// Chunks whose items a task measures before others run.
const SLICE_CHUNKS: usize = 4;

/// A list that is being sent.
pub(super) struct GzipListing {
    served: Served,
    list: SharedList,
    /// Number of chunks of the list.
    chunks: usize,
    /// The next chunk.
    next: usize,
    head: Bytes,
    separator: Piece,
    tail: Bytes,
    /// The checksum of the plain bytes so far.
    checksum: Checksum,
    notes: Notes,
}

/// Bytes that are sent together.
#[derive(Default)]
struct BodyPart {
    bytes: BytesMut,
    pieces: GzipPieces,
}

impl GzipListing {
    /// Plans the list and measures what its head contains.
    pub(super) async fn new(served: Served, list: SharedList, meta: &ListMeta, notes: Notes) -> Self {
        let extent = extent(&list).await;
        let items = list.items();
        let mut items_len = 0;
        if items.needs_items_len() {
            for index in 0..extent.chunks {
                items_len += list.items_len(index);
                if index % SLICE_CHUNKS == SLICE_CHUNKS - 1 {
                    yield_now().await;
                }
            }
        }
        let (head, tail) = items.head_and_tail(meta, items_len, extent.objects == 0);
        let separator = Piece::stored(Bytes::from_static(items.separator()));
        let checksum = Checksum::EMPTY;
        Self { served, chunks: extent.chunks, list, next: 0, head, separator, tail, checksum, notes }
    }

    fn put(&mut self, piece: &Piece, part: &mut BodyPart) {
        piece.put(&mut part.bytes);
        self.checksum = self.checksum.then(piece.checksum());
        part.pieces.plain_bytes += piece.checksum().len();
    }
}

/// Finds the objects of a list.
async fn extent(list: &SharedList) -> ListExtent {
    loop {
        if let Some(extent) = list.extent() {
            return extent;
        }
        yield_now().await;
    }
}

impl SlicedList for GzipListing {
    type Content = Bytes;

    /// Returns a chunk of the list with what is before it.
    async fn next_chunk(&mut self) -> Chunk<Bytes> {
        // Other tasks run between two chunks, which another reader may not have compressed yet.
        yield_now().await;
        let mut part = BodyPart::default();
        if self.next == 0 {
            part.bytes.extend_from_slice(&HEADER);
            self.put(&Piece::stored(self.head.clone()), &mut part);
        } else if self.next < self.chunks {
            self.put(&self.separator.clone(), &mut part);
        }
        let mut objects = 0;
        if let Some(chunk) = self.list.chunk(self.next) {
            objects = chunk.objects;
            self.put(&chunk.piece, &mut part);
            part.pieces.made += u64::from(chunk.is_new);
            part.pieces.sent += 1;
        }
        self.next += 1;
        let is_last = self.next >= self.chunks;
        if is_last {
            self.put(&Piece::stored(self.tail.clone()), &mut part);
            part.bytes.extend_from_slice(&end(self.checksum));
        }
        let BodyPart { bytes, pieces } = part;
        let metrics = self.served.hub.metrics();
        metrics.snapshot_sent(objects, bytes.len());
        metrics.gzip_sent(pieces, bytes.len());
        self.notes.sent(objects, bytes.len());
        Chunk { content: bytes.freeze(), is_last }
    }
}

/// Returns the body of one piece.
pub(super) fn body_of(piece: &Piece) -> Bytes {
    let mut body = BytesMut::with_capacity(HEADER.len() + piece.wire_len() + END_BYTES);
    body.extend_from_slice(&HEADER);
    piece.put(&mut body);
    body.extend_from_slice(&end(piece.checksum()));
    body.freeze()
}
