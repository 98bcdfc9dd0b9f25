//! Reads a gRPC call: its content type, its deadline, and the single message of its request (gRPC's
//! `PROTOCOL-HTTP2.md`).

use std::{future::Future, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use h2::RecvStream;
use http::{HeaderMap, HeaderValue, Method, Request, header};
use tokio::time::Instant;
use tonic::Status;

use super::status;

/// The length of a message's prefix, in bytes: a compression flag, and the message length as four
/// bytes.
const PREFIX_BYTES: usize = 5;

/// The content type of a gRPC response.
pub const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Start of the paths of kubefan's gRPC services.
const SERVICES: [&str; 3] = ["/kubefan.v1alpha1.", "/grpc.health.v1.", REFLECTION];
/// Start of the paths of the watch service.
const WATCH_SERVICE: &str = "/kubefan.v1alpha1.WatchService/";
/// Start of the paths of reflection, in both of its versions.
const REFLECTION: &str = "/grpc.reflection.";
/// The path of a watch of the health.
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
/// Start of the paths that forward requests to services in the cluster.
const APISERVER_PATHS: [&str; 2] = ["/api/", "/apis/"];

/// Whether a request is a gRPC call whose messages are protobuf.
pub fn is_grpc<B>(request: &Request<B>) -> bool {
    let protobuf = matches!(content_type(request.headers()), "application/grpc" | "application/grpc+proto");
    protobuf && request.method() == Method::POST
}

/// Whether a request is for a gRPC service, gRPC-Web included. The path of a service is enough:
/// such a call must not reach the apiserver, whatever its content type. The content type alone is
/// not enough, because a call to a service in the cluster may be forwarded through the apiserver.
pub fn is_any_grpc<B>(request: &Request<B>) -> bool {
    let path = request.uri().path();
    let is_of_the_apiserver = APISERVER_PATHS.iter().any(|prefix| path.starts_with(prefix));
    let has_type = content_type(request.headers()).starts_with("application/grpc");
    is_of_a_service(path) || (has_type && !is_of_the_apiserver)
}

fn is_of_a_service(path: &str) -> bool {
    SERVICES.iter().any(|prefix| path.starts_with(prefix))
}

/// Whether a path names a call of the watch service.
pub fn is_of_watch_service(path: &str) -> bool {
    path.starts_with(WATCH_SERVICE)
}

/// Whether a path names a stream whose messages come over time.
pub fn is_stream(path: &str) -> bool {
    path == HEALTH_WATCH || is_reflection(path)
}

/// Whether a path is one of reflection: a stream that its client ends, and nothing else would. (A
/// watch of the health ends by itself after a drain was announced in it.)
pub fn is_reflection(path: &str) -> bool {
    path.starts_with(REFLECTION)
}

fn content_type(headers: &HeaderMap) -> &str {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim_end()
}

/// The timeout of the call. An invalid one is ignored, as other servers do.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    const DIGITS_MAX: usize = 8;
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > DIGITS_MAX || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// The deadline of the call.
pub fn deadline_at(headers: &HeaderMap) -> Option<Instant> {
    timeout(headers).and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Waits for a future, at most until the deadline. The future is passed pinned, because a future
/// moved into another one takes its space twice.
pub async fn within<F: Future + Unpin>(deadline_at: Option<Instant>, future: F) -> Option<F::Output> {
    match deadline_at {
        Some(deadline_at) => tokio::time::timeout_at(deadline_at, future).await.ok(),
        None => Some(future.await),
    }
}

/// Checks that the messages of a request are not compressed.
///
/// # Errors
/// The status of the call if they are.
pub fn check_encoding(headers: &HeaderMap) -> Result<(), Status> {
    let encoding = headers.get("grpc-encoding").map_or(&b"identity"[..], |value| value.as_bytes());
    if encoding == b"identity" { Ok(()) } else { Err(status::compressed()) }
}

/// Reads the single message of a request, at most `bytes_max` bytes. `None` if the caller went
/// away.
pub async fn message(body: &mut RecvStream, bytes_max: usize) -> Result<Option<Bytes>, Status> {
    let mut buffer = BytesMut::new();
    loop {
        if let Some(message) = take_message(&mut buffer, bytes_max)? {
            return Ok(Some(message));
        }
        match body.data().await {
            Some(Ok(data)) => {
                // Fails only if the stream is gone, which the next read reports.
                let _ = body.flow_control().release_capacity(data.len());
                buffer.extend_from_slice(&data);
            }
            Some(Err(_)) => return Ok(None),
            None if buffer.is_empty() => return Err(status::malformed("it has no message")),
            None => return Err(status::malformed("its message is incomplete")),
        }
    }
}

/// Takes the single message of a request, at most `bytes_max` bytes, from `buffer`. `None` until
/// all of it has arrived.
pub fn take_message(buffer: &mut BytesMut, bytes_max: usize) -> Result<Option<Bytes>, Status> {
    let Some((flag, prefix)) = buffer.first_chunk::<PREFIX_BYTES>().map(|prefix| (prefix[0], &prefix[1..])) else {
        return Ok(None);
    };
    if flag != 0 {
        return Err(status::malformed("its message is marked as compressed, but grpc-encoding is not set"));
    }
    let length = prefix.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    if length > bytes_max {
        return Err(status::too_long(&format!("{length} bytes; the limit is {bytes_max}")));
    }
    match buffer.len().cmp(&(PREFIX_BYTES + length)) {
        std::cmp::Ordering::Less => Ok(None),
        std::cmp::Ordering::Equal => {
            buffer.advance(PREFIX_BYTES);
            Ok(Some(buffer.split().freeze()))
        }
        std::cmp::Ordering::Greater => Err(status::malformed("it has more than one message")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_known_by_its_path_and_otherwise_by_its_content_type() {
        for (path, kind, is) in [
            ("/kubefan.v1alpha1.WatchService/Watch", "application/json", true),
            ("/grpc.health.v1.Health/Check", "", true),
            ("/unknown.Service/Method", "application/grpc-web+proto", true),
            ("/unknown.Service/Method", "application/json", false),
            ("/api/v1/namespaces/a/services/b/proxy/c.D/E", "application/grpc", false),
            ("/apis/apps/v1/deployments", "application/json", false),
        ] {
            let request = Request::post(path).header("content-type", kind).body(()).unwrap();
            assert_eq!(is_any_grpc(&request), is, "{path} {kind}");
        }
    }

    #[test]
    fn grpc_timeouts_are_parsed_and_invalid_ones_ignored() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            timeout(&headers)
        };
        assert_eq!(read("5S"), Some(Duration::from_secs(5)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(read("82f"), None);
        assert_eq!(read("250m"), Some(Duration::from_millis(250)));
        for bad in ["", "S", "123456789S", "-1S", "1", "1.5S"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
