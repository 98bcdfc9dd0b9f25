//! Wake-ups, which carry no data, and when they are sent.

pub mod pacer;
pub mod waker;

pub use waker::{ConnectionWaker, OfStream, ReadyStreams, StreamWaker};
