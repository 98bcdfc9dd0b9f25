//! The group "managed certificate": the content of the Secret, and whether the ConfigMaps and the
//! copies have their part of it. Nothing is written, and nothing of a key is shown.

use std::{sync::Arc, time::SystemTime};

use kubefan_app::config::{ServeConfig, TlsSource};
use kubefan_managed_tls::{ManagedTls, Stored, look_once};
use kubefan_upstream::{Upstream, UpstreamError};

use super::{
    certificates::wall_clock,
    report::{Finding, Report},
};

/// Looks at the Secret. Returns the certificate, if it can be used; `upstream` is the apiserver,
/// if it answers.
pub(super) async fn check(
    config: &ServeConfig,
    upstream: Option<&Upstream>,
    report: &mut Report,
) -> Option<Arc<ManagedTls>> {
    let (Some(TlsSource::Managed(options)), Some(upstream)) = (&config.serving.tls, upstream) else { return None };
    report.group("managed certificate");
    let name = format!("Secret {}", options.secret);
    report.waits_for(&name);
    let now = wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let material = match look_once(upstream, options, now).await {
        Ok(material) => material,
        Err(error) => {
            let remedy = match error.error {
                UpstreamError::NotFound { .. } => "create it without data; the chart has it",
                UpstreamError::Forbidden { .. } => {
                    "grant kubefan's account get and update of it; the chart has the role"
                }
                _ => "",
            };
            report.add(Finding::error(name, error.to_string(), remedy));
            return None;
        }
    };
    match material.describe(now.as_secs()) {
        Ok(text) => report.add(Finding::ok(name, text)),
        Err(why) => {
            let text = format!("{why}; `kubefan serve` will make a new one");
            report.add(Finding::ok(name, text));
        }
    }
    for (stored, object) in options.published_in() {
        let name = format!("{} {object}", stored.kind());
        let (part, harm) = match stored {
            Stored::ConfigMap => ("CA", "clients there do not get the CA"),
            Stored::Secret | Stored::Copy => ("certificate", "servers that use this copy do not get the certificate"),
        };
        report.add(match material.is_published(upstream, stored, object).await {
            Ok(true) => Finding::ok(name, format!("has the {part}")),
            Ok(false) => Finding::ok(name, format!("does not have the {part} yet; `kubefan serve` will write it")),
            Err(error) => Finding::warning(name, error.to_string(), harm),
        });
    }
    ManagedTls::of(options.secret.clone(), &material, now.as_secs())
}
