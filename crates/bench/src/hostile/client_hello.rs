//! A TLS ClientHello written by hand, because no library sends an invalid server name.

use bytes::{BufMut, BytesMut};

/// The most bytes of a message that one record carries.
const RECORD_BYTES_MAX: usize = 1 << 14;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const TLS_1_2: u16 = 0x0303;
const TLS_AES_128_GCM_SHA256: u16 = 0x1301;
const SERVER_NAME: u16 = 0;
const SIGNATURE_ALGORITHMS: u16 = 13;
const ECDSA_SECP256R1_SHA256: u16 = 0x0403;
const HOST_NAME: u8 = 0;

/// The records of a ClientHello with this server name, of at most 65,000 bytes.
pub(super) fn with_server_name(name: &str) -> BytesMut {
    let mut extensions = BytesMut::new();
    // Servers demand it.
    extensions.put_u16(SIGNATURE_ALGORITHMS);
    extensions.put_u16(4);
    extensions.put_u16(2);
    extensions.put_u16(ECDSA_SECP256R1_SHA256);
    extensions.put_u16(SERVER_NAME);
    extensions.put_u16(name.len() as u16 + 5);
    extensions.put_u16(name.len() as u16 + 3);
    extensions.put_u8(HOST_NAME);
    extensions.put_u16(name.len() as u16);
    extensions.put_slice(name.as_bytes());

    let mut hello = BytesMut::new();
    hello.put_u16(TLS_1_2);
    hello.put_bytes(7, 32);
    // No session.
    hello.put_u8(0);
    hello.put_u16(2);
    hello.put_u16(TLS_AES_128_GCM_SHA256);
    // No compression.
    hello.put_slice(&[1, 0]);
    hello.put_u16(extensions.len() as u16);
    hello.put_slice(&extensions);

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
    use rustls::{Error, PeerMisbehaved, server::Acceptor};

    use super::*;

    /// The server name that a server reads.
    fn read(records: &[u8]) -> Result<Option<String>, Error> {
        let mut rest = records;
        let mut acceptor = Acceptor::default();
        loop {
            assert!(!rest.is_empty(), "a whole hello");
            acceptor.read_tls(&mut rest).unwrap();
            if let Some(accepted) = acceptor.accept().map_err(|(error, _)| error)? {
                return Ok(accepted.client_hello().server_name().map(str::to_owned));
            }
        }
    }

    #[test]
    fn a_server_reads_the_name_of_a_hello() {
        let name = "a".repeat(60) + ".test";
        assert_eq!(read(&with_server_name(&name)), Ok(Some(name)));
        let refused = Err(PeerMisbehaved::ServerNameMustContainOneHostName.into());
        assert_eq!(read(&with_server_name(&"!".repeat(60_000))), refused);
    }
}
