//! Wake-ups, which carry no data, and their times.

pub mod pacer;
pub mod waker;

pub use waker::{ConnectionWaker, OfStream, ReadyStreams, StreamWaker};
