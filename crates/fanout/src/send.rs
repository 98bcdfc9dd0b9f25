//! From events and objects to bytes on the wire.

pub mod chunk;
pub mod control;
pub mod differences;
pub mod encoder;
pub mod frame;
pub mod frame_buf;
pub mod log_entry;

pub use frame_buf::FrameBuf;
