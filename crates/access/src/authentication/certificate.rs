//! Client certificates: identifies their holders by the CAs that kubefan trusts.
//!
//! The hazard is a certificate that proves less than it seems to. The TLS handshake proves only
//! that the client has the private key. Here the rest is verified, by the rules of kube-apiserver
//! (`apiserver/pkg/authentication/request/x509`), once for each connection.
//!
//! - [`bundle`]: the CAs, and whether one of them has signed a certificate.
//! - [`subject`]: the user that a certificate names.
//! - [`trusted_cas`]: the bundle in use, which is replaced when its source changes.
//! - [`cluster`]: reads the bundle of the cluster from its ConfigMap.
//! - [`client_certificate`]: the certificate of a connection, and its verdict about the caller.

pub mod bundle;
pub mod client_certificate;
pub mod cluster;
pub mod subject;
pub mod trusted_cas;

pub use client_certificate::{CertificateVerdict, ClientCertificate};
pub use trusted_cas::TrustedCas;
