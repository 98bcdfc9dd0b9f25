//! The section "Upstream": where the apiserver is, and how it is read.

use std::{path::PathBuf, time};

use kubefan_model::selector::FieldSelector;
use kubefan_upstream::settings::UpstreamSettings;
use serde::Deserialize;

use super::{
    ConfigError, Duration,
    next_kubefan::{self, SourceSettings},
    rules::{any, at_least, optional, or_false, unusable, wait, wait_or_never},
    section::section,
};

/// The request that reads the initial state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WatchListMode {
    /// By WatchList if the apiserver has it, else by LIST.
    Auto,
    /// By LIST.
    Never,
}

kubefan_common::display_choice!(WatchListMode);

/// The server of lists and watches while the kubefan at `--upstream` is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum UpstreamFallback {
    /// The apiserver, each cache at its turn.
    Paced,
    /// None: caches serve their last state.
    Never,
}

kubefan_common::display_choice!(UpstreamFallback);
section! {
    heading: "Upstream";
    /// The options for reaching and reading the apiserver, as given.
    options: UpstreamOptions;
    /// The settings for reaching and reading the apiserver.
    config: UpstreamConfig {
        /// The address of the apiserver and its credentials.
        settings: UpstreamSettings, settings;
        /// The kubefan to list and watch at, instead of the apiserver.
        source: Option<SourceSettings>, source;
        /// The address of the apiserver and the credentials there, if `settings` are of a kubefan.
        fallback_settings: Option<UpstreamSettings>, fallback_settings;
    }

    /// The kubeconfig, instead of $KUBECONFIG, ~/.kube/config or the pod's service account.
    kubeconfig("FILE"): PathBuf;
    /// The context of the kubeconfig, instead of its current one.
    context("NAME"): String;
    /// List and watch at another kubefan: at the gRPC address https://HOST:PORT, unix:PATH or, on
    /// this machine, HOST:PORT, or at the Kubernetes API that a kubeconfig leads to. Reviews,
    /// discovery, passthrough and self-checks still use --kubeconfig.
    upstream("ADDRESS|FILE"): String;
    /// The CA of that kubefan's certificate (PEM), instead of the system's. Read again when it
    /// does not verify the certificate.
    upstream_ca_file("FILE"): PathBuf;
    /// A file with the token to show there, read again when it changes
    /// [default: with TLS that of the pod's service account, if there is one]
    upstream_token_file("FILE"): PathBuf;
    /// A client certificate to show there (PEM), instead of a token: with both, the token is not
    /// sent.
    upstream_cert_file("FILE"): PathBuf;
    /// The private key of that certificate (PEM) [default: the file of --upstream-cert-file]
    upstream_key_file("FILE"): PathBuf;
    /// The name in that kubefan's certificate, instead of the host of its address.
    upstream_server_name("NAME"): String;
    /// The kubeconfig of the apiserver, if --kubeconfig leads to the kubefan at --upstream, too.
    /// While that is away, everything goes there. Without it, lists and watches go where
    /// --kubeconfig leads.
    upstream_fallback_kubeconfig("FILE"): PathBuf;
    /// Cache only the objects that match, such as spec.nodeName=node-1 in a sidecar.
    upstream_field_selector("SELECTOR"): String => field_selector: Option<FieldSelector>, optional(field_selector);

    [keys]
    /// Lists of the apiserver at the same time, by all caches together. The others wait, those of
    /// caches without a state first. Lower it if a start loads the apiserver, raise it if a start
    /// with many resources takes too long.
    limits.upstream_lists_max("COUNT"): usize = 8 => lists_max: usize, at_least(1);
    /// Programs that share limits.upstreamFallbackRate, at least: the kubefans behind that at
    /// --upstream, and all other programs that fall back. The kubefan at --upstream may tell a
    /// larger number. Raise it to their number before they are more. Lower it if they are few and
    /// should wait for a shorter time.
    limits.upstream_fallback_clients("COUNT"): u32 = 500 => fallback_clients: u32, at_least(1);
    /// Lists and watches that all of these programs together start at the apiserver in a second,
    /// at most, while the kubefan at --upstream is away. It may tell a smaller number. Raise it if
    /// the apiserver can take more, so that the caches are behind for a shorter time.
    limits.upstream_fallback_rate("COUNT"): u32 = 50 => fallback_rate: u32, at_least(1);
    /// While the kubefan at --upstream is away, list and watch at the apiserver, or never. Choose
    /// never if the apiserver could not carry all caches, or must not be asked from here.
    tuning.upstream_fallback("paced or never"): UpstreamFallback = UpstreamFallback::Paced => fallback: UpstreamFallback, any;
    /// Request that reads the initial state: WatchList if the apiserver has it, or always paged
    /// LIST. Choose never if the WatchList of the apiserver misbehaves.
    tuning.watch_list("auto or never"): WatchListMode = WatchListMode::Auto => watch_list: WatchListMode, any;
    /// Objects per page of a LIST; fewer if they are large. Lower it if single answers are too
    /// large for a proxy in between.
    tuning.page_size("COUNT"): u32 = 500 => page_size: u32, at_least(1);
    /// Restart a watch that receives nothing for this long, not even the bookmark that the
    /// apiserver sends about once a minute. Shorten it to notice dead connections sooner, but keep
    /// it above a minute.
    tuning.upstream_idle_timeout("DURATION"): Duration = Duration::from_secs(90) => idle_timeout: time::Duration, wait;
    /// The longest that a request other than a watch may take. Lengthen it if lists of a slow
    /// apiserver fail.
    tuning.request_timeout("DURATION"): Duration = Duration::from_secs(60) => request_timeout: time::Duration, wait;
    /// Time between two checks for a changed schema or server version, after which the resource is
    /// listed again. Lengthen it if the checks show in the load of the apiserver.
    tuning.schema_check_interval("DURATION"): Duration = Duration::from_secs(30)
        => schema_check_interval: time::Duration, wait;
    /// Time between two comparisons of a cache with the apiserver's metadata at the same version,
    /// after which the cache is listed again if it differs. 0s: never. Lengthen it, or turn it off
    /// where another tier checks, if it loads the apiserver.
    tuning.self_check_interval("DURATION"): Duration = Duration::from_secs(5 * 60)
        => self_check_interval: Option<time::Duration>, wait_or_never;
    /// Exit if the apiserver cannot be reached at the start, instead of retrying. Turn it on where
    /// a supervisor must see a failed start.
    tuning.require_upstream("BOOL"): bool => required: bool, or_false;
}

fn settings(options: &UpstreamOptions) -> Result<UpstreamSettings, ConfigError> {
    Ok(UpstreamSettings { kubeconfig: options.kubeconfig.clone(), context: options.context.clone() })
}

impl UpstreamConfig {
    /// Whether requests are forwarded to the kubefan at `--upstream`: if `--kubeconfig` and it name
    /// the same file, or if `--upstream-fallback-kubeconfig` says so. Otherwise `--kubeconfig` may
    /// lead to the apiserver.
    pub fn forwards_to_kubefan(&self) -> bool {
        let is_behind_kubefan = self.source.is_some() && self.fallback_settings.is_some();
        is_behind_kubefan || matches!(&self.source, Some(SourceSettings::Http(source)) if *source == self.settings)
    }
}

fn fallback_settings(options: &UpstreamOptions) -> Result<Option<UpstreamSettings>, ConfigError> {
    let settings = |file| UpstreamSettings { kubeconfig: Some(file), context: None };
    Ok(options.upstream_fallback_kubeconfig.clone().map(settings))
}

fn source(options: &UpstreamOptions) -> Result<Option<SourceSettings>, ConfigError> {
    let options = options.clone();
    next_kubefan::source(next_kubefan::Given {
        upstream: options.upstream,
        ca_file: options.upstream_ca_file,
        token_file: options.upstream_token_file,
        certificate_file: options.upstream_cert_file,
        key_file: options.upstream_key_file,
        server_name: options.upstream_server_name,
    })
}

/// Checks the form only: the apiserver knows best which fields a resource has.
fn field_selector(flag: &'static str, selector: String) -> Result<FieldSelector, ConfigError> {
    let bad = selector.split(',').find(|term| {
        let field = term.split(['=', '!']).next().unwrap_or_default();
        field.trim().is_empty() || !term.contains('=')
    });
    let problem = match (bad, FieldSelector::parse(&selector)) {
        (Some(term), _) => format!("{term:?} is no term of a field selector; write it like spec.nodeName=node-1"),
        (None, Err(error)) => error.to_string(),
        (None, Ok(selector)) => return Ok(selector),
    };
    Err(unusable(flag, selector, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_forwarded_to_a_kubefan_only_if_the_configuration_says_so() {
        const GRPC: &str = "https://kubefan:7443";
        let forwards_to_kubefan = |upstream: Option<&str>, fallback: Option<&str>, context: Option<&str>| {
            let options = UpstreamOptions {
                kubeconfig: Some("kubefan.kubeconfig".into()),
                context: context.map(str::to_owned),
                upstream: upstream.map(str::to_owned),
                upstream_fallback_kubeconfig: fallback.map(PathBuf::from),
                ..UpstreamOptions::default()
            };
            options.resolve().unwrap().forwards_to_kubefan()
        };
        assert!(!forwards_to_kubefan(None, None, None));
        assert!(!forwards_to_kubefan(Some(GRPC), None, None), "--kubeconfig may lead to the apiserver");
        assert!(forwards_to_kubefan(Some(GRPC), Some("apiserver.kubeconfig"), None), "the node form");
        assert!(forwards_to_kubefan(Some("kubefan.kubeconfig"), None, None));
        assert!(forwards_to_kubefan(Some("kubefan.kubeconfig"), Some("apiserver.kubeconfig"), None));
        assert!(!forwards_to_kubefan(Some("other.kubeconfig"), None, None));
        assert!(!forwards_to_kubefan(Some("kubefan.kubeconfig"), None, Some("apiserver")), "another context");
        assert!(!forwards_to_kubefan(None, Some("apiserver.kubeconfig"), None), "without a kubefan");
    }
}
