//! Malformed and malicious input on the data port. Each request must get an answer or a closed
//! connection in time, and other clients must still be served. `-- --nocapture` shows a table of
//! the results.

use std::{net::SocketAddr, time::Duration};

use futures::StreamExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    bad_input::assert_a_subscriber_gets_events,
    harness::{kubefan::Kubefan, simulated::Simulated, tests},
};

tests! {
    local: hostile_requests_get_an_answer_or_a_closed_connection;
}

/// Time limit for an answer or the end of the connection. Requests that stay incomplete are not
/// tested here.
const ANSWER_AT_MOST: Duration = Duration::from_secs(20);
/// After an answer, this much silence means that nothing more will come.
const SILENCE: Duration = Duration::from_secs(5);
/// Number of concurrent connections.
const CONCURRENCY: usize = 8;
const LIST: &str = "/api/v1/pods?resourceVersion=0";
const CHUNKED: &str = "Transfer-Encoding: chunked";

/// The permitted reactions to a request.
#[derive(Debug, Clone, Copy)]
enum Gets {
    /// Answers with exactly these codes, in order.
    Codes(&'static [u16]),
    /// At most one answer, with an error code, and the end of the connection.
    Refused,
    /// Any answer, or the end of the connection.
    Any,
}

use Gets::{Any, Codes, Refused};

/// Bytes to send, and the expected reaction.
struct Case {
    name: &'static str,
    bytes: Vec<u8>,
    gets: Gets,
    /// Whether the client closes its sending side afterwards.
    half_closes: bool,
}

fn case(name: &'static str, gets: Gets, bytes: impl Into<Vec<u8>>) -> Case {
    Case { name, bytes: bytes.into(), gets, half_closes: false }
}

/// A case with a request line.
fn line(name: &'static str, gets: Gets, line: &str) -> Case {
    case(name, gets, format!("{line}\r\nHost: localhost\r\n\r\n"))
}

/// A GET with headers.
fn with(name: &'static str, gets: Gets, headers: &str) -> Case {
    case(name, gets, format!("GET {LIST} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n"))
}

/// A GET of a path.
fn get(name: &'static str, gets: Gets, path: &str) -> Case {
    line(name, gets, &format!("GET {path} HTTP/1.1"))
}

/// A POST with a body that must not be read as another request.
fn body(name: &'static str, gets: Gets, headers: &str, body: &str) -> Case {
    case(name, gets, format!("POST /api/v1/pods HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n{body}"))
}

fn cases() -> Vec<Case> {
    let one = format!("GET {LIST} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let chunk = format!("{:x}\r\n{one}\r\n0\r\n\r\n", one.len());
    let random: Vec<u8> = (0u32..5000).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut all = vec![
        // Request lines.
        Case { half_closes: true, ..case("line ends only", Any, "\r\n\r\n\r\n") },
        case("random bytes", Refused, random.clone()),
        line("a method alone", Refused, "GET"),
        line("no version", Refused, &format!("GET {LIST}")),
        line("version 9.9", Refused, &format!("GET {LIST} HTTP/9.9")),
        line("version 2.0 as text", Refused, &format!("GET {LIST} HTTP/2.0")),
        line("a lower-case method", Any, &format!("get {LIST} HTTP/1.1")),
        line("an unknown method", Any, &format!("BREW {LIST} HTTP/1.1")),
        line("a method of 10,000 letters", Any, &format!("{} {LIST} HTTP/1.1", "A".repeat(10_000))),
        line("CONNECT", Any, "CONNECT 127.0.0.1:22 HTTP/1.1"),
        line("OPTIONS *", Any, "OPTIONS * HTTP/1.1"),
        line("TRACE", Any, &format!("TRACE {LIST} HTTP/1.1")),
        line("absolute form", Codes(&[200]), &format!("GET http://localhost{LIST} HTTP/1.1")),
        line("absolute form of another host", Codes(&[403]), &format!("GET http://elsewhere.example{LIST} HTTP/1.1")),
        line("absolute form of another scheme", Any, "GET gopher://elsewhere/api/v1/pods HTTP/1.1"),
        line("spaces in the path", Refused, "GET /api/v1/po ds HTTP/1.1"),
        case("HTTP/1.0 without a host", Codes(&[200]), format!("GET {LIST} HTTP/1.0\r\n\r\n")),
        case("HTTP/1.1 without a host", Refused, format!("GET {LIST} HTTP/1.1\r\n\r\n")),
        case("line ends without returns", Any, format!("GET {LIST} HTTP/1.1\nHost: localhost\n\n")),
        case("half of the HTTP/2 preface", Refused, "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"),
        case("a TLS handshake", Refused, [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &random[..500]].concat()),
        // Paths and queries.
        get("dots in the path", Any, "/api/v1/../../../etc/passwd"),
        get("escaped dots", Any, "/api/v1/%2e%2e/%2e%2e/secrets"),
        get("two slashes", Any, "//api/v1/pods?resourceVersion=0"),
        get("an escaped null", Any, "/api/v1/namespaces/a%00b/pods?resourceVersion=0"),
        get("an invalid escape", Any, "/api/v1/pods%zz"),
        get("a fragment", Any, "/api/v1/pods?resourceVersion=0#x"),
        case("a path that is not UTF-8", Any, b"GET /api/v1/pods/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        get("a path of 200 KiB", Refused, &format!("/api/v1/pods/{}", "x".repeat(200 << 10))),
        get("a query of 200 KiB", Refused, &format!("{LIST}&x={}", "y".repeat(200 << 10))),
        get("a parameter ten times", Codes(&[200]), &format!("{LIST}{}", "&resourceVersion=9".repeat(10))),
        get("a thousand parameters", Any, &format!("{LIST}{}", "&a=b".repeat(1000))),
        get("nested parentheses", Any, &format!("{LIST}&labelSelector={}", "(".repeat(5000))),
        get("a token of 10 KiB", Any, &format!("/api/v1/pods?continue={}", "A".repeat(10_000))),
        get("a token of nested lists", Any, &format!("/api/v1/pods?continue={}", "W1tb".repeat(2000))),
        get("a watch with the largest timeout", Codes(&[200]), &format!("{LIST}&watch=1&timeoutSeconds={}", i64::MAX)),
        get("a watch with a negative timeout", Any, &format!("{LIST}&watch=1&timeoutSeconds={}", i64::MIN)),
        get("a limit above 64 bits", Any, &format!("{LIST}&limit=99999999999999999999999999")),
        // Headers.
        with("two hosts", Refused, "Host: y"),
        case("a foreign host name", Codes(&[403]), format!("GET {LIST} HTTP/1.1\r\nHost: evil.example\r\n\r\n")),
        case("a host with a port", Codes(&[200]), format!("GET {LIST} HTTP/1.1\r\nHost: [::1]:7443\r\n\r\n")),
        with("a web page of another host", Codes(&[403]), "Origin: https://evil.example"),
        with("a web page without an origin", Codes(&[403]), "Origin: null"),
        with("a web page of this machine", Codes(&[200]), "Origin: http://localhost:3000"),
        with("a header of 40 KiB", Codes(&[200]), &format!("X-A: {}", "b".repeat(40 << 10))),
        with("a header of 100 KiB", Codes(&[431]), &format!("X-A: {}", "b".repeat(100 << 10))),
        get("a query of 40 KiB", Codes(&[200]), &format!("{LIST}&x={}", "y".repeat(40 << 10))),
        with("a space before the colon", Refused, "Accept : application/json"),
        with("a header in two lines", Refused, "X-A: b\r\n c"),
        with("a null in a header", Refused, "X-A: b\0c"),
        with("a header without a name", Refused, ": b"),
        with("a header of 1 MiB", Refused, &format!("X-A: {}", "b".repeat(1 << 20))),
        with("a thousand headers", Refused, &"X-A: b\r\n".repeat(1000)),
        with("an Accept of 10 KiB", Any, &format!("Accept: {}", "a/b,".repeat(2500))),
        with("an Accept that is not ASCII", Any, "Accept: \u{fffd}/*"),
        with("an Accept of separators only", Any, "Accept: ;;,,/=;q=;*"),
        with("Expect: 100-continue", Codes(&[200]), "Expect: 100-continue"),
        with("an unknown Expect", Any, "Expect: the-unexpected"),
        line("gRPC over HTTP/1.1", Codes(&[505]), "POST /a.B/C HTTP/1.1\r\nContent-Type: application/grpc"),
        with("an upgrade to an unknown protocol", Any, "Connection: upgrade\r\nUpgrade: nonsense"),
        with(
            "an upgrade to HTTP/2",
            Any,
            "Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA",
        ),
        with("a websocket without a key", Any, "Connection: upgrade\r\nUpgrade: websocket"),
        with("an upgrade that is not in Connection", Any, "Upgrade: websocket"),
        with("Connection names Host", Any, "Connection: host, close"),
        // Bodies, and requests smuggled in them.
        body("both lengths", Refused, &format!("Content-Length: 6\r\n{CHUNKED}"), &format!("0\r\n\r\n{one}")),
        body("both lengths, other order", Refused, &format!("{CHUNKED}\r\nContent-Length: 4"), &chunk),
        body("two lengths that differ", Refused, "Content-Length: 0\r\nContent-Length: 60", &one),
        body("a list of lengths", Refused, "Content-Length: 0, 60", &one),
        body("a negative length", Refused, "Content-Length: -1", ""),
        body("a length with a sign", Refused, "Content-Length: +0", ""),
        body("a length above 64 bits", Refused, "Content-Length: 99999999999999999999999", "x"),
        body("chunked twice", Any, "Transfer-Encoding: chunked, chunked", "0\r\n\r\n"),
        body("chunked, then not", Refused, "Transfer-Encoding: chunked, identity", "0\r\n\r\n"),
        body("a misspelt chunked", Refused, "Transfer-Encoding: xchunked", "0\r\n\r\n"),
        body("a vertical tab before chunked", Refused, "Transfer-Encoding: \u{b}chunked", "0\r\n\r\n"),
        body("an invalid chunk size", Any, CHUNKED, "zz\r\nabc\r\n0\r\n\r\n"),
        body("a chunk size above 64 bits", Any, CHUNKED, "fffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
        body("a negative chunk size", Any, CHUNKED, "-1\r\nabc\r\n0\r\n\r\n"),
        body("a chunk without its end", Any, CHUNKED, "3\r\nabcX0\r\n\r\n"),
        body("a chunk extension of 100 KiB", Any, CHUNKED, &format!("1;{}\r\na\r\n0\r\n\r\n", "x".repeat(100 << 10))),
        case("chunked in HTTP/1.0", Any, format!("POST /api/v1/pods HTTP/1.0\r\n{CHUNKED}\r\n\r\n0\r\n\r\n{one}")),
        with(
            "a GET whose body is a request",
            Codes(&[200]),
            &format!("Content-Length: {}\r\n\r\n{}", one.len() + 4, one),
        ),
        case("three requests at once", Codes(&[200, 200, 200]), one.repeat(3)),
        // While unread bytes are pending, kubefan cannot notice that the client has gone. Such a
        // watch lasts until its timeout, which is later than the silence, or the next event.
        case(
            "a request pipelined behind a watch",
            Codes(&[200]),
            format!("GET {LIST}&watch=1&timeoutSeconds=20 HTTP/1.1\r\nHost: localhost\r\n\r\n{one}"),
        ),
        case("a request and random bytes", Any, [one.as_bytes(), &random[..100]].concat()),
        // The server cannot distinguish this client from one that is gone.
        Case { half_closes: true, ..case("a client that closes its sending side", Any, one.clone()) },
    ];
    let disconnects = [
        case("disconnect in the request line", Any, "GET /api/v1/po"),
        case("disconnect in the headers", Any, format!("GET {LIST} HTTP/1.1\r\nHost: localhost\r\nAcc")),
        body("disconnect in the body", Any, "Content-Length: 1000", "{"),
        body("disconnect in a chunk", Any, CHUNKED, "ff\r\nabc"),
    ];
    all.extend(disconnects.map(|case| Case { half_closes: true, ..case }));
    all
}

/// The bytes received, and how the connection ended.
struct Got {
    bytes: Vec<u8>,
    closed: bool,
    hangs: bool,
}

async fn send(address: SocketAddr, case: &Case) -> Got {
    let mut stream = TcpStream::connect(address).await.expect("kubefan listens");
    // kubefan may close the connection during the write.
    let _ = timeout(ANSWER_AT_MOST, stream.write_all(&case.bytes)).await;
    if case.half_closes {
        let _ = stream.shutdown().await;
    }
    let limit = Instant::now() + ANSWER_AT_MOST;
    let mut bytes = Vec::new();
    let mut closed = false;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let until = if bytes.is_empty() { limit } else { limit.min(Instant::now() + SILENCE) };
        match timeout_at(until, stream.read(&mut buffer)).await {
            Ok(Ok(0) | Err(_)) => closed = true,
            Ok(Ok(count)) => {
                bytes.extend_from_slice(&buffer[..count]);
                continue;
            }
            Err(_) => {}
        }
        let hangs = !closed && bytes.is_empty();
        return Got { bytes, closed, hangs };
    }
}

/// The status codes of all answers in the received bytes.
fn codes(bytes: &[u8]) -> Vec<u16> {
    let text = String::from_utf8_lossy(bytes);
    let starts = text.match_indices("HTTP/1.").filter_map(|(at, _)| text[at..].get(9..12)?.parse().ok());
    starts.filter(|code| *code != 100).collect()
}

async fn hostile_requests_get_an_answer_or_a_closed_connection() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let cases = cases();
    let answers = futures::stream::iter(&cases).map(|case| send(kubefan.grpc_addr, case));
    let answers: Vec<Got> = answers.buffered(CONCURRENCY).collect().await;
    let mut wrong = Vec::new();
    for (case, got) in cases.iter().zip(&answers) {
        let codes = codes(&got.bytes);
        let end = if got.closed { "closed" } else { "open" };
        println!("{:<42} {:<18} {end}", case.name, format!("{codes:?}"));
        let fits = match case.gets {
            Codes(expected) => codes == expected,
            Refused => got.closed && codes.len() <= 1 && codes.iter().all(|code| (400..600).contains(code)),
            // kubefan must not read trailing bytes as further requests.
            Any => codes.len() <= 2,
        };
        if got.hangs || !fits {
            let text = String::from_utf8_lossy(&got.bytes);
            wrong.push(format!("{}: {:?}, got {codes:?}, {end}: {text}", case.name, case.gets));
        }
    }
    println!("{} requests, {} with an unexpected reaction", cases.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    early_disconnects_leave_nothing_behind(&kubefan).await;
    assert_a_subscriber_gets_events(&simulated, &kubefan).await;
}

/// Clients that disconnect at various points of a list or a watch.
async fn early_disconnects_leave_nothing_behind(kubefan: &Kubefan) {
    for round in 0..100 {
        let mut stream = TcpStream::connect(kubefan.grpc_addr).await.expect("kubefan listens");
        let watch = if round % 2 == 0 { "&watch=1" } else { "" };
        let request = format!("GET {LIST}{watch} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("kubefan accepts a request");
        let mut some = vec![0; round * 7];
        let _ = timeout(Duration::from_secs(1), stream.read_exact(&mut some)).await;
    }
    let open = || async { (kubefan.metric_sum("kubefan_subscribers", "").await? == 0.0).then_some(()) };
    crate::harness::wait::until("every stream to end", crate::harness::wait::SOON, open).await;
}
