//! A TLS ClientHello written by hand, because no library sends an invalid server name.

use bytes::{BufMut, BytesMut};

/// The most bytes of a message that one record carries.
const RECORD_BYTES_MAX: usize = 1 << 14;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const TLS_1_2: u16 = 0x0303;
const TLS_AES_128_GCM_SHA256: u16 = 0x1301;
const SERVER_NAME: u16 = 0;
const HOST_NAME: u8 = 0;

/// The records of a ClientHello with this server name, of at most 65,000 bytes.
pub(super) fn with_server_name(name: &str) -> BytesMut {
    let mut extension = BytesMut::new();
    extension.put_u16(name.len() as u16 + 3);
    extension.put_u8(HOST_NAME);
    extension.put_u16(name.len() as u16);
    extension.put_slice(name.as_bytes());

    let mut hello = BytesMut::new();
    hello.put_u16(TLS_1_2);
    hello.put_bytes(7, 32);
    // No session.
    hello.put_u8(0);
    hello.put_u16(2);
    hello.put_u16(TLS_AES_128_GCM_SHA256);
    // No compression.
    hello.put_slice(&[1, 0]);
    hello.put_u16(extension.len() as u16 + 4);
    hello.put_u16(SERVER_NAME);
    hello.put_u16(extension.len() as u16);
    hello.put_slice(&extension);

    let mut message = BytesMut::new();
    message.put_u8(CLIENT_HELLO);
    message.put_uint(hello.len() as u64, 3);
    message.put_slice(&hello);

    let mut records = BytesMut::new();
    for part in message.chunks(RECORD_BYTES_MAX) {
        records.put_u8(HANDSHAKE);
        records.put_u16(TLS_1_2);
        records.put_u16(part.len() as u16);
        records.put_slice(part);
    }
    records
}

#[cfg(test)]
mod tests {
    use rustls::server::Acceptor;

    use super::*;

    #[test]
    fn a_server_reads_the_name_of_a_long_hello() {
        for (name, read) in [("a".repeat(60) + ".test", true), ("!".repeat(60_000), false)] {
            let (records, mut acceptor) = (with_server_name(&name), Acceptor::default());
            let mut rest = &records[..];
            while !rest.is_empty() {
                acceptor.read_tls(&mut rest).unwrap();
            }
            let accepted = acceptor.accept().expect("a valid hello").expect("a whole hello");
            assert_eq!(accepted.client_hello().server_name(), read.then_some(&*name));
        }
    }
}
