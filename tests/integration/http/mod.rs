//! The Kubernetes API over HTTP, held against a real kube-apiserver: the same requests to both, while somebody writes, and what must
//! be equal is.

mod ask;
mod compare;
mod differential;
mod generate;
mod hostile;
mod limits;
mod readable;
mod table;
mod websocket;
mod world;

pub(crate) use differential::TESTS;
pub(crate) use hostile::TESTS as HOSTILE;
pub(crate) use limits::TESTS as LIMITS;
pub(crate) use websocket::TESTS as WEBSOCKET;
