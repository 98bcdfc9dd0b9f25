//! The sink: a process that accepts connections and reads all that arrives. It answers HTTP/1.1
//! with an empty 200, so that attackers that wait for an answer work as hard as against a server,
//! and nothing else.

use std::{io, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Text that the process prints before its address.
pub(crate) const MARKER: &str = "kubefan: discarding bytes on ";

const READ_BYTES: usize = 16 << 10;
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const END_OF_HEAD: &[u8] = b"\r\n\r\n";
const HTTP2: &[u8] = b"PRI ";

/// Runs the sink process.
///
/// # Errors
/// If it cannot listen on loopback.
pub async fn serve() -> io::Result<()> {
    let listener = kubefan_server::transport::listen::listen_tcp(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    eprintln!("{MARKER}{}", listener.local_addr()?);
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(discard(stream));
        }
    }
}

async fn discard(mut stream: TcpStream) {
    let mut buffer = vec![0; READ_BYTES];
    let mut is_http1 = None;
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let read = &buffer[..count];
        let is_http1 = *is_http1.get_or_insert_with(|| !read.starts_with(HTTP2));
        if is_http1 && read.ends_with(END_OF_HEAD) {
            if stream.write_all(ANSWER).await.is_err() {
                return;
            }
            if memchr::memmem::find(read, b"Connection: close").is_some() {
                return;
            }
        }
    }
}
