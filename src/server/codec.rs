//! A tonic codec for messages that are encoded already.

use std::marker::PhantomData;

use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

use crate::fanout::Frame;

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
        frame.write(buffer);
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
