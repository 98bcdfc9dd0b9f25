//! HTTP/2 frames written by hand, as no library would write them.

use bytes::{BufMut, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::context::Context;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(super) const END_STREAM: u8 = 0x1;
pub(super) const END_HEADERS: u8 = 0x4;
const ACK: u8 = 0x1;
/// The identifier of SETTINGS_INITIAL_WINDOW_SIZE.
const INITIAL_WINDOW: u16 = 4;
/// The error code CANCEL.
const CANCEL: u32 = 8;
const GOAWAY: u8 = 7;
const READ_BYTES: usize = 16 << 10;
const HEAD_BYTES: usize = 9;

/// Frames that are sent together.
#[derive(Default)]
pub(super) struct Frames(BytesMut);

impl Frames {
    /// The start of a connection. `window` is the initial window of its streams, in bytes.
    pub(super) fn preface(window: u32) -> Self {
        let mut frames = Self(BytesMut::from(PREFACE));
        frames.settings(window);
        frames
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.0.put_uint(payload.len() as u64, 3);
        self.0.put_u8(kind);
        self.0.put_u8(flags);
        self.0.put_u32(stream);
        self.0.put_slice(payload);
    }

    pub(super) fn data(&mut self, stream: u32, flags: u8, payload: &[u8]) {
        self.frame(0, flags, stream, payload);
    }

    pub(super) fn headers(&mut self, stream: u32, flags: u8, fields: &[(&str, &str)]) {
        self.frame(1, flags, stream, &block(fields));
    }

    pub(super) fn reset(&mut self, stream: u32) {
        self.frame(3, 0, stream, &CANCEL.to_be_bytes());
    }

    pub(super) fn settings(&mut self, window: u32) {
        let mut payload = INITIAL_WINDOW.to_be_bytes().to_vec();
        payload.extend(window.to_be_bytes());
        self.frame(4, 0, 0, &payload);
    }

    pub(super) fn settings_ack(&mut self) {
        self.frame(4, ACK, 0, &[]);
    }

    pub(super) fn ping(&mut self) {
        self.frame(6, 0, 0, &[7; 8]);
    }

    pub(super) fn window_update(&mut self, stream: u32, bytes: u32) {
        self.frame(8, 0, stream, &bytes.to_be_bytes());
    }

    pub(super) fn continuation(&mut self, stream: u32, fields: &[(&str, &str)]) {
        self.frame(9, 0, stream, &block(fields));
    }

    pub(super) fn priority(&mut self, stream: u32) {
        self.frame(2, 0, stream, &[0, 0, 0, 0, 16]);
    }

    pub(super) async fn send(self, stream: &mut TcpStream) -> std::io::Result<()> {
        stream.write_all(&self.0).await
    }
}

/// The header fields of a request.
pub(super) fn fields<'a>(method: &'a str, path: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![(":method", method), (":scheme", "http"), (":authority", "localhost"), (":path", path)]
}

/// The header fields of a gRPC call.
pub(super) fn grpc_fields(path: &str) -> Vec<(&str, &str)> {
    let mut fields = fields("POST", path);
    fields.extend([("content-type", "application/grpc"), ("te", "trailers")]);
    fields
}

/// Fields in HPACK, each literally and without the dynamic table (RFC 7541, section 6.2.2).
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        string(&mut block, name);
        string(&mut block, value);
    }
    block
}

/// A string without Huffman coding; its length is an integer with a prefix of 7 bits.
fn string(block: &mut Vec<u8>, text: &str) {
    let mut length = text.len();
    if length < 127 {
        block.push(length as u8);
    } else {
        block.push(127);
        length -= 127;
        while length >= 128 {
            block.push((length % 128 + 128) as u8);
            length /= 128;
        }
        block.push(length as u8);
    }
    block.extend(text.as_bytes());
}

/// Repeats a write, `per_second`, while the server keeps the connection. Reads and counts the
/// server's frames meanwhile.
pub(super) async fn flood(
    context: &Context,
    mut stream: TcpStream,
    per_second: u64,
    mut write: impl FnMut(u64) -> Frames,
) {
    let (mut reader, mut writer) = stream.split();
    let writing = async {
        let mut ticks = tokio::time::interval(std::time::Duration::from_micros(1_000_000 / per_second));
        for number in 0.. {
            ticks.tick().await;
            if writer.write_all(&write(number).0).await.is_err() {
                return;
            }
        }
    };
    let reading = async {
        let mut buffer = vec![0; READ_BYTES];
        let mut scan = Scan::default();
        while let Ok(count @ 1..) = reader.read(&mut buffer).await {
            context.tally.add_bytes(count);
            scan.read(&buffer[..count], |reason| context.tally.count(&format!("GOAWAY {reason}")));
        }
    };
    tokio::join!(writing, reading);
    context.tally.count("ended");
}

/// Finds the GOAWAY frames among the bytes of a server.
#[derive(Default)]
struct Scan {
    head: Vec<u8>,
    skipped: usize,
}

impl Scan {
    fn read(&mut self, mut bytes: &[u8], mut goaway: impl FnMut(u32)) {
        // A GOAWAY is kept with its first 8 bytes of payload: the last stream and the reason.
        const GOAWAY_BYTES: usize = HEAD_BYTES + 8;
        while !bytes.is_empty() {
            if self.skipped > 0 {
                let count = self.skipped.min(bytes.len());
                self.skipped -= count;
                bytes = &bytes[count..];
                continue;
            }
            self.head.push(bytes[0]);
            bytes = &bytes[1..];
            if self.head.len() < HEAD_BYTES {
                continue;
            }
            let length = usize::from(self.head[0]) << 16 | usize::from(self.head[1]) << 8 | usize::from(self.head[2]);
            if self.head[3] == GOAWAY && length >= 8 {
                if self.head.len() < GOAWAY_BYTES {
                    continue;
                }
                let reason: [u8; 4] = [self.head[13], self.head[14], self.head[15], self.head[16]];
                goaway(u32::from_be_bytes(reason));
                self.skipped = length - 8;
            } else {
                self.skipped = length;
            }
            self.head.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goaway_is_found_between_other_frames_wherever_the_bytes_are_split() {
        let mut frames = Frames::default();
        frames.ping();
        frames.frame(GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 11, b'x', b'y']);
        frames.data(1, 0, &[7; 20]);
        frames.frame(GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 2]);
        for size in [1, 3, 1000] {
            let mut scan = Scan::default();
            let mut found = Vec::new();
            for chunk in frames.0.chunks(size) {
                scan.read(chunk, |reason| found.push(reason));
            }
            assert_eq!(found, [11, 2], "{size}");
        }
    }

    #[test]
    fn a_long_string_has_a_length_of_several_bytes() {
        let mut block = Vec::new();
        string(&mut block, &"x".repeat(127 + 128 + 3));
        assert_eq!(block[..3], [127, 0x80 | 3, 1]);
    }
}
