//! Response builders (whole, streamed or compressed) that set kube-apiserver's headers.

use std::{convert::Infallible, io::Write as _};

use bytes::{Bytes, BytesMut};
use flate2::{Compression, write::GzEncoder};
use futures::{Stream, StreamExt};
use http::{Response, StatusCode, header, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use serde_json::Value;

use super::{accept::PROTOBUF_WATCH, object::put_value, server::Inner, status::Status};

/// The body of a response.
pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

impl Inner {
    pub(super) fn whole(&self, code: StatusCode, media_type: &'static str, body: Bytes) -> Response<Body> {
        self.counters.bytes_sent.add(body.len());
        let mut response = Response::new(Full::new(body).boxed_unsync());
        *response.status_mut() = code;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(media_type));
        headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-cache, private"));
        response
    }

    pub(super) fn text(&self, code: StatusCode, text: &'static str) -> Response<Body> {
        self.whole(code, "text/plain; charset=utf-8", Bytes::from_static(text.as_bytes()))
    }

    pub(super) fn json(&self, value: &Value) -> Response<Body> {
        let mut body = Vec::new();
        put_value(&mut body, value);
        body.push(b'\n');
        self.whole(StatusCode::OK, "application/json", body.into())
    }

    pub(super) fn object(&self, code: StatusCode, object: &Bytes) -> Response<Body> {
        let mut body = BytesMut::with_capacity(object.len() + 1);
        body.extend_from_slice(object);
        body.extend_from_slice(b"\n");
        self.whole(code, "application/json", body.freeze())
    }

    pub(super) fn failure(&self, status: &Status) -> Response<Body> {
        let mut body = Vec::new();
        put_value(&mut body, status);
        body.push(b'\n');
        let code = StatusCode::from_u16(status.http_code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = self.whole(code, "application/json", body.into());
        let retry_after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        if retry_after > 0 {
            response.headers_mut().insert(header::RETRY_AFTER, retry_after.into());
        }
        response
    }

    pub(super) fn streamed(&self, chunks: impl Stream<Item = Bytes> + Send + 'static) -> Response<Body> {
        let counters = self.counters.clone();
        let frames = chunks.map(move |chunk| {
            counters.bytes_sent.add(chunk.len());
            Ok(Frame::data(chunk))
        });
        let mut response = self.whole(StatusCode::OK, "application/json", Bytes::new());
        *response.body_mut() = StreamBody::new(frames).boxed_unsync();
        response
    }

    /// Streams the lines as one gzip member per line.
    pub(super) fn gzipped(&self, lines: impl Stream<Item = Bytes> + Send + 'static) -> Response<Body> {
        let mut response = self.streamed(lines.map(|lines| {
            let mut members = Vec::new();
            for line in lines.split_inclusive(|b| *b == b'\n') {
                let mut gzip = GzEncoder::new(members, Compression::fast());
                // Writing to memory cannot fail.
                let _ = gzip.write_all(line);
                members = gzip.finish().unwrap_or_default();
            }
            Bytes::from(members)
        }));
        response.headers_mut().insert(header::CONTENT_ENCODING, header::HeaderValue::from_static("gzip"));
        response
    }
}

pub(super) fn takes_gzip(request: &Parts) -> bool {
    let accepted = request.headers.get(header::ACCEPT_ENCODING);
    accepted.and_then(|value| value.to_str().ok()).is_some_and(|value| value.contains("gzip"))
}

/// The response as protobuf.
pub(super) fn as_protobuf(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(PROTOBUF_WATCH));
    response
}
