//! A gzip watch of the test itself, whose bytes show whether a piece is stored or compressed.

use std::io::Write;

use flate2::write::GzDecoder;
use memchr::memmem;
use reqwest::{
    Response,
    header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING},
};

use super::{ANY_VERSION, Objects, World};
use crate::harness::{servers::is_cached, wait};

/// An open watch.
pub(super) struct GzipWatch {
    response: Response,
    /// The bytes since the last event that was asked for.
    wire: Vec<u8>,
    /// Holds the plain bytes since then.
    decoder: GzDecoder<Vec<u8>>,
}

impl GzipWatch {
    /// Opens a watch with this `Accept` header, which the cache answers.
    pub(super) async fn open(world: &World, objects: &Objects, accept: &str) -> GzipWatch {
        let path = format!("{}?watch=1&resourceVersion={ANY_VERSION}", objects.path);
        let url = format!("https://{}{path}", world.kubefan.grpc_addr);
        let response = wait::until("an answer from the cache", wait::SOON, || async {
            let request = objects.api.client().get(&url).header(ACCEPT, accept).header(ACCEPT_ENCODING, "gzip");
            request.send().await.ok().filter(is_cached)
        })
        .await;
        assert_eq!(response.headers()[CONTENT_ENCODING], "gzip");
        GzipWatch { response, wire: Vec::new(), decoder: GzDecoder::new(Vec::new()) }
    }

    /// Reads up to the event that has this text. Returns whether its bytes are stored.
    pub(super) async fn is_stored(&mut self, text: &str) -> bool {
        let mut searched = 0;
        while !contains(&self.decoder.get_ref()[searched..], text) {
            searched = self.decoder.get_ref().len().saturating_sub(text.len());
            let chunk = tokio::time::timeout(wait::SOON, self.response.chunk()).await.expect("the event arrives");
            let chunk = chunk.expect("the watch goes on").expect("the watch goes on");
            self.wire.extend_from_slice(&chunk);
            self.decoder.write_all(&chunk).expect("it is a gzip body");
            self.decoder.flush().expect("it is a gzip body");
        }
        let is_stored = contains(&self.wire, text);
        self.wire.clear();
        self.decoder.get_mut().clear();
        is_stored
    }
}

/// Whether bytes contain a text.
pub(super) fn contains(bytes: &[u8], text: &str) -> bool {
    memmem::find(bytes, text.as_bytes()).is_some()
}
