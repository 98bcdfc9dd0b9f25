//! The flow-control windows of the subscribers.

/// HTTP/2 flow-control windows and frame size of the subscribers, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// The window of a stream.
    pub stream: u32,
    /// The window of a connection.
    pub connection: u32,
    /// The largest frame.
    pub frame: u32,
}

impl Windows {
    /// As in kubefan's own client: windows that never block the server, and large frames.
    pub const KUBEFAN: Self = Self { stream: 2 << 20, connection: 16 << 20, frame: 1 << 20 };
    /// As in Go's `net/http`, and therefore client-go: large windows and the smallest permitted
    /// frames.
    pub const GO: Self = Self { stream: 4 << 20, connection: 1 << 30, frame: 16_384 };
    /// The initial values of HTTP/2, which many clients keep.
    pub const HTTP2: Self = Self { stream: 65_535, connection: 65_535, frame: 16_384 };
}
