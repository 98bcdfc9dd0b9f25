//! The TLS configuration: a CA file or the system's CAs, and a client certificate.
//!
//! The crypto provider is always ring, and not the process's default. A program that has none, or
//! another one, works too.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier,
    crypto::ring,
    pki_types::{PrivateKeyDer, pem::PemObject},
};

use crate::authorities::{self, certificates};

/// Returns the configuration. The errors name the file and quote nothing from it.
pub(super) async fn config(
    ca_file: Option<&Path>,
    client_certificate: Option<(&Path, &Path)>,
) -> Result<ClientConfig, String> {
    let roots = match ca_file {
        Some(file) => authorities::read(file).await?.1,
        None => {
            let system = tokio::task::spawn_blocking(rustls_native_certs::load_native_certs).await;
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(system.map_err(|error| error.to_string())?.certs);
            roots
        }
    };
    let builder = builder()?.with_root_certificates(roots);
    let Some((certificate_file, key_file)) = client_certificate else { return Ok(builder.with_no_client_auth()) };
    let chain = certificates(&read("client certificate", certificate_file).await?)
        .map_err(|problem| format!("client certificate {}: {problem}", certificate_file.display()))?;
    let key = PrivateKeyDer::from_pem_slice(&read("client key", key_file).await?)
        .map_err(|_| format!("client key {}: it contains no PEM private key", key_file.display()))?;
    builder.with_client_auth_cert(chain, key).map_err(|error| {
        format!("client certificate {} with key {}: {error}", certificate_file.display(), key_file.display())
    })
}

/// A configuration that trusts no server, for addresses without TLS.
pub(super) fn without_authorities() -> Result<ClientConfig, String> {
    Ok(builder()?.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
}

fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, String> {
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())
}

async fn read(what: &str, file: &Path) -> Result<Vec<u8>, String> {
    tokio::fs::read(file).await.map_err(|error| format!("{what} {}: {error}", file.display()))
}
