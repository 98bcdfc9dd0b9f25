//! The data of HTTP/2 responses.

use std::io::IoSlice;

use bytes::{Buf, Bytes};

use kubefan_fanout::FrameBuf;

/// A part of the data of a stream.
pub enum Payload {
    /// Encoded messages of a watch, shared with all its subscribers.
    FrameBuf(FrameBuf),
    /// Part of any other response.
    Bytes(Bytes),
}

macro_rules! either {
    ($self:ident, $buffer:ident => $call:expr) => {
        match $self {
            Self::FrameBuf($buffer) => $call,
            Self::Bytes($buffer) => $call,
        }
    };
}

impl Buf for Payload {
    fn remaining(&self) -> usize {
        either!(self, buffer => buffer.remaining())
    }

    fn chunk(&self) -> &[u8] {
        either!(self, buffer => buffer.chunk())
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        either!(self, buffer => buffer.chunks_vectored(slices))
    }

    fn advance(&mut self, count: usize) {
        either!(self, buffer => buffer.advance(count));
    }
}
