//! The TLS handshake of a connection, for the data port and the admin port.

use std::io;

use kubefan_access::AccessControl;
use rustls::pki_types::CertificateDer;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    http2::connection::Io,
    limits::TLS_BYTES_MAX,
    mismatch,
    preface::{self, Rewound},
};
use crate::client_info::ClientInfo;

/// Performs the handshake. A client that speaks plaintext gets an explanation.
///
/// # Errors
/// If the handshake fails, or the client does not speak TLS.
pub async fn accept<T: Io>(io: T, tls: TlsAcceptor) -> io::Result<TlsStream<Rewound<T>>> {
    let (is_http2, io) = preface::detect(io).await?;
    if mismatch::is_plaintext(io.first()) {
        if is_http2 {
            mismatch::refuse_http2(io, mismatch::NEEDS_TLS).await.map_err(io::Error::other)?
        } else {
            mismatch::refuse(io, mismatch::NEEDS_TLS).await?
        }
        return Err(io::Error::other(mismatch::NEEDS_TLS));
    }
    tls.accept_with(io, |session| session.set_buffer_limit(Some(TLS_BYTES_MAX))).await
}

/// The client of a connection whose handshake is done.
pub fn client<T>(io: &TlsStream<T>, client: ClientInfo, access: &AccessControl) -> ClientInfo {
    let chain = io.get_ref().1.peer_certificates();
    let certificate = chain.and_then(|chain: &[CertificateDer<'_>]| access.certificate(chain));
    ClientInfo { is_encrypted: true, has_certificate: chain.is_some(), certificate, ..client }
}
