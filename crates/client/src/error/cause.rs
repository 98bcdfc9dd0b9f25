//! The reason of a failed connection, in words for people.

use std::error::Error;

use kubefan_common::{
    text::{find, innermost},
    tls::{self, TlsSettings},
};

/// The text for a plaintext connection to a port that needs TLS.
pub(crate) const NEEDS_TLS: &str = "the server needs TLS on this port; use an https:// address";

/// Advice in TLS errors, for users of the client library.
const SETTINGS: TlsSettings =
    TlsSettings { trust: "the CA file must contain the CA that has", plaintext: "use an address without https://" };

/// The cause of an error: the explanation of a TLS error, or the text of the innermost error.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    if let Some(error) = find::<rustls::Error>(error) {
        return tls::explain(error, SETTINGS).unwrap_or_else(|| format!("TLS failed: {error}"));
    }
    let text = innermost(error).to_string();
    // Cuts the error number off, as in "Connection refused (os error 111)".
    let text = text.split(" (os error").next().unwrap_or(&text);
    tls::plain(text).to_owned()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn the_cause_is_the_tls_refusal_or_the_systems_reason() {
        for (error, text) in [
            (
                rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer),
                "no trusted CA has signed the server's certificate; the CA file must contain the CA that has",
            ),
            (rustls::Error::HandshakeNotComplete, "TLS failed: "),
        ] {
            let wrapped = io::Error::new(io::ErrorKind::InvalidData, error);
            assert!(root_cause(&wrapped).starts_with(text), "{}", root_cause(&wrapped));
        }
        assert_eq!(root_cause(&io::Error::from_raw_os_error(111)), "Connection refused");
    }
}
