//! Compares the Kubernetes API over HTTP with a real kube-apiserver. Both get the same requests
//! while objects change, and their answers must be equal except for masked parts. Hostile requests,
//! early answers, limits and websockets have tests of their own.

mod compare;
mod cross_origin;
mod differential;
mod early_answer;
mod generate;
mod hostile;
mod limits;
mod protobuf_json;
mod request;
mod table;
mod websocket;
mod world;
