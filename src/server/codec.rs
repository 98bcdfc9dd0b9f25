//! A tonic codec for messages that are encoded already.

use std::marker::PhantomData;

use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use bytes::{Buf, BufMut, Bytes};
use prost::Message;

use crate::{fanout::Pieces, proto::v1alpha1::WatchResponse};

/// One message, encoded.
pub struct Frame(Bytes);

impl Frame {
    /// Takes the next message out of a batch.
    pub fn take(pieces: &mut Pieces) -> Option<Self> {
        let prefix = pieces.has_remaining().then(|| pieces.copy_to_bytes(5))?;
        let message_len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        Some(Self(pieces.copy_to_bytes(message_len)))
    }
}

impl From<WatchResponse> for Frame {
    fn from(response: WatchResponse) -> Self {
        Self(response.encode_to_vec().into())
    }
}

/// Decodes requests by prost, writes [`Frame`]s as they are.
#[derive(Debug, Clone)]
pub struct FrameCodec<T>(PhantomData<T>);

impl<T> Default for FrameCodec<T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: prost::Message + Default + Send + 'static> Codec for FrameCodec<T> {
    type Encode = Frame;
    type Decode = T;
    type Encoder = FrameEncoder;
    type Decoder = RequestDecoder<T>;

    fn encoder(&mut self) -> Self::Encoder {
        FrameEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        RequestDecoder(PhantomData)
    }
}

/// Writes frames.
#[derive(Debug)]
pub struct FrameEncoder;

impl Encoder for FrameEncoder {
    type Item = Frame;
    type Error = Status;

    fn encode(&mut self, frame: Frame, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&frame.0);
        Ok(())
    }
}

/// Reads requests.
#[derive(Debug)]
pub struct RequestDecoder<T>(PhantomData<T>);

impl<T: prost::Message + Default> Decoder for RequestDecoder<T> {
    type Item = T;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<T>, Status> {
        let broken = |error: prost::DecodeError| Status::internal(format!("the request cannot be decoded: {error}"));
        T::decode(buffer).map(Some).map_err(broken)
    }
}
