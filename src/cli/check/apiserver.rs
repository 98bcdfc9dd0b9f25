//! The group "apiserver": the way there step by step, the credentials, the version, the identity of
//! the cluster and the clock.

use std::time::Duration;

use http::Uri;
use jiff::{Timestamp, fmt::rfc2822};
use kube_client::Config;
use serde::Deserialize;
use serde_json::json;
use tokio::{net::TcpStream, time::timeout};

use kubefan_app::config::ServeConfig;
use kubefan_upstream::{
    ReviewKind, Upstream, UpstreamError,
    client::{ConnectionLimits, UpstreamOptions, Verb},
    passthrough::{Passthrough, PassthroughOptions, check_reviewer},
    settings::SettingsError,
};

use super::{
    certificates::wall_clock,
    configuration::reviews_callers,
    network_step::{STEP_TIMEOUT, resolve, step},
    report::{Finding, Report},
};

/// The minors of Kubernetes 1 that kubefan's tests run against.
const TESTED_MINORS: std::ops::RangeInclusive<u32> = 34..=35;
/// The oldest minor that has everything kubefan asks for: bookmarks, and the reviews in v1.
const OLDEST_MINOR: u32 = 19;
/// Difference of the clocks above which the check warns, in seconds. With more, certificates and
/// tokens begin to fail.
const SKEW_SECONDS_MAX: i64 = 60;

const WHO_AM_I: ReviewKind = ReviewKind {
    path: "/apis/authentication.k8s.io/v1/selfsubjectreviews",
    api_version: "authentication.k8s.io/v1",
    kind: "SelfSubjectReview",
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    git_version: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WhoAmI {
    user_info: UserInfo,
}

#[derive(Deserialize)]
struct UserInfo {
    username: String,
}

/// Checks the way to the apiserver. Returns a client if it answers.
pub(super) async fn check(config: &ServeConfig, report: &mut Report) -> Option<Upstream> {
    report.group("apiserver");
    let kubeconfig = match config.upstream.settings.load().await {
        Ok(kubeconfig) => kubeconfig,
        Err(error) => {
            report.add(Finding::error("kubeconfig", error.to_string(), ""));
            return None;
        }
    };
    let server = server_name(&kubeconfig.cluster_url);
    report.add(Finding::ok("kubeconfig", format!("names {server}")));
    report.add_all(protection(config, &kubeconfig).await);
    if !reaches(&kubeconfig, report).await {
        return None;
    }
    let upstream = client(config, report).await?;
    report.waits_for("GET /version");
    let response = match upstream.get_accept(Verb::Get, "/version", "application/json").await {
        Ok(response) => response,
        Err(error) => {
            report.add(judge_failure(&error));
            return None;
        }
    };
    if kubeconfig.cluster_url.scheme_str() == Some("https") && !kubeconfig.accept_invalid_certs {
        report.add(Finding::ok("TLS", "its certificate is verified"));
    }
    let version = serde_json::from_slice::<Version>(response.body());
    report.add(match version {
        Ok(version) => judge_version(&version.git_version),
        Err(_) => {
            Finding::error("version", "GET /version is not answered by an apiserver", "correct the server's address")
        }
    });
    let date = response.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
    let now = Timestamp::try_from(wall_clock()).unwrap_or_default();
    report.add_all(date.and_then(|date| rfc2822::parse(date).ok()).map(|date| judge_clock(date.timestamp(), now)));
    report.waits_for("the identity of this account");
    let who = upstream.review::<WhoAmI>(&WHO_AM_I, &json!({})).await;
    let is_accepted = !matches!(who, Err(UpstreamError::Auth { .. }));
    report.add(judge_account(who.map(|who| who.user_info.username)));
    if !is_accepted {
        return None;
    }
    report.waits_for("the identity of the cluster");
    report.add(identity(&upstream).await);
    Some(upstream)
}

fn server_name(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or("https");
    format!("{scheme}://{}", host_and_port(url).map_or_else(String::new, |(host, port)| format!("{host}:{port}")))
}

fn host_and_port(url: &Uri) -> Option<(&str, u16)> {
    let default = if url.scheme_str() == Some("http") { 80 } else { 443 };
    Some((url.host()?, url.port_u16().unwrap_or(default)))
}

/// Whether credentials and reviews are protected on the way.
async fn protection(config: &ServeConfig, kubeconfig: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    if kubeconfig.accept_invalid_certs {
        found.push(Finding::warning(
            "TLS",
            "the kubeconfig sets insecure-skip-tls-verify, so any server could pass for the apiserver",
            "name its CA instead (certificate-authority)",
        ));
    }
    if reviews_callers(config) {
        let checked = check_reviewer(&config.upstream.settings).await;
        found.extend(checked.err().map(|error| Finding::error("reviews of callers", error.to_string(), "")));
    }
    if let Some(credentials) = config.access.credentials() {
        let options = PassthroughOptions {
            credentials,
            requests_max: config.passthrough.requests_max,
            allows_insecure_upstream: config.passthrough.allows_insecure_upstream,
            connection: ConnectionLimits::APISERVER,
        };
        // A plugin that hangs, and settings that cannot be used at all, fail for kubefan's own
        // requests, too, and are named there.
        let making = Passthrough::from_settings(config.upstream.settings.clone(), options);
        let made = timeout(STEP_TIMEOUT, making).await.map_or(Ok(()), |made| made.map(|_| ()));
        let refused = made.err().filter(|error| !matches!(error, SettingsError::Transport { .. }));
        found.extend(refused.map(|error| Finding::error("passthrough", error.to_string(), "")));
    }
    found
}

/// Checks DNS and TCP, which is not possible through a proxy.
async fn reaches(kubeconfig: &Config, report: &mut Report) -> bool {
    let Some((host, port)) = host_and_port(&kubeconfig.cluster_url) else {
        report.add(Finding::error("address", "the server of the kubeconfig has no host", "correct it"));
        return false;
    };
    if let Some(proxy) = &kubeconfig.proxy_url {
        report.add(Finding::ok("address", format!("reached through the proxy {}", server_name(proxy))));
        return true;
    }
    report.waits_for(&format!("DNS for {host}"));
    let addresses = match resolve(host, port).await {
        Ok(addresses) => addresses,
        Err(message) => {
            let remedy = "correct the name, or the DNS of this machine";
            report.add(Finding::error("DNS", format!("{host} cannot be resolved: {message}"), remedy));
            return false;
        }
    };
    let listed: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    report.add(Finding::ok("DNS", format!("{host} is {}", listed.join(", "))));
    report.waits_for(&format!("TCP to {host}:{port}"));
    let mut failed = Vec::new();
    for address in addresses {
        match step(TcpStream::connect(address)).await {
            Ok(_) => {
                report.add(Finding::ok("TCP", format!("{address} accepts connections")));
                return true;
            }
            Err(message) => failed.push(format!("{address}: {message}")),
        }
    }
    let remedy = "is the apiserver running, and does a firewall or a NetworkPolicy let kubefan through?";
    report.add(Finding::error("TCP", failed.join(", "), remedy));
    false
}

async fn client(config: &ServeConfig, report: &mut Report) -> Option<Upstream> {
    report.waits_for("the credentials");
    let options = UpstreamOptions {
        connection: ConnectionLimits::APISERVER,
        request_timeout: config.upstream.request_timeout.min(Duration::from_secs(30)),
        ..UpstreamOptions::default()
    };
    match step(Upstream::from_settings(config.upstream.settings.clone(), options)).await {
        Ok(upstream) => Some(upstream),
        Err(message) => {
            report.add(Finding::error("credentials", message, ""));
            None
        }
    }
}

/// Names the step that failed.
fn judge_failure(error: &UpstreamError) -> Finding {
    let text = error.to_string();
    match error {
        // Most texts of TLS have the advice.
        UpstreamError::Tls { .. } if text.contains("kubeconfig") => Finding::error("TLS", text, ""),
        UpstreamError::Tls { .. } => {
            Finding::error("TLS", text, "is certificate-authority in the kubeconfig the CA of this server?")
        }
        UpstreamError::Credentials { .. } => Finding::error("credentials", text, "correct the user of the kubeconfig"),
        UpstreamError::Auth { .. } => {
            Finding::error("credentials", text, "renew the token or the certificate of the kubeconfig's user")
        }
        UpstreamError::Forbidden { .. } => Finding::error("version", text, "grant it the ClusterRole system:discovery"),
        UpstreamError::Reset { .. } => Finding::error(
            "TLS",
            text,
            "does the server speak TLS, and does the kubeconfig name https or http as it does?",
        ),
        _ => Finding::error("answer", text, "is this the address of an apiserver, and is it ready?"),
    }
}

/// `git_version` is like `v1.35.4` or `v1.33.5-gke.1`.
fn judge_version(git_version: &str) -> Finding {
    let oldest = TESTED_MINORS.start();
    let newest = TESTED_MINORS.end();
    let mut parts = git_version.trim_start_matches('v').split(['.', '-', '+']);
    let minor = (parts.next() == Some("1")).then(|| parts.next()?.parse::<u32>().ok()).flatten();
    match minor {
        Some(minor) if minor < OLDEST_MINOR => Finding::error(
            "version",
            format!("{git_version} is too old: it lacks bookmarks or reviews in v1"),
            format!("upgrade the apiserver to 1.{OLDEST_MINOR} or later"),
        ),
        Some(minor) if TESTED_MINORS.contains(&minor) => Finding::ok("version", git_version),
        Some(_) => Finding::warning(
            "version",
            format!("kubefan is tested with 1.{oldest} to 1.{newest}, and not with {git_version}"),
            "try it first, and run `kubefan verify` there",
        ),
        None => Finding::warning(
            "version",
            format!("{git_version:?} is no version of Kubernetes 1"),
            format!("kubefan is tested with 1.{oldest} to 1.{newest}"),
        ),
    }
}

fn judge_clock(server: Timestamp, own: Timestamp) -> Finding {
    let ahead = own.as_second() - server.as_second();
    match ahead.abs() {
        ..=SKEW_SECONDS_MAX => Finding::ok("clock", format!("within {SKEW_SECONDS_MAX} s of the apiserver's")),
        seconds => {
            let side = if ahead > 0 { "ahead of" } else { "behind" };
            let message = format!("this machine is {seconds} s {side} the apiserver: tokens and certificates may fail");
            Finding::warning("clock", message, "synchronize the clocks (NTP)")
        }
    }
}

/// `user` is the name that the apiserver knows this account by.
fn judge_account(user: Result<String, UpstreamError>) -> Finding {
    match user {
        Ok(user) if user == "system:anonymous" => Finding::error(
            "credentials",
            "the apiserver takes kubefan for system:anonymous: the kubeconfig has no credentials for it",
            "add a token or a certificate to its user",
        ),
        Ok(user) => Finding::ok("credentials", format!("the apiserver knows kubefan as {user}")),
        Err(error @ UpstreamError::Auth { .. }) => judge_failure(&error),
        // Servers before 1.28, and simulated ones.
        Err(UpstreamError::NotFound { .. }) => {
            Finding::ok("credentials", "accepted; the apiserver does not tell their user (before 1.28)")
        }
        Err(error) => Finding::warning("credentials", format!("the apiserver does not tell their user: {error}"), ""),
    }
}

async fn identity(upstream: &Upstream) -> Finding {
    let remedy = "allow it to get the namespace kube-system";
    match upstream.confirm().await {
        Err(error) => Finding::error("cluster", error.to_string(), ""),
        Ok(()) => match (upstream.cluster(), upstream.proven_identity()) {
            (Some(uid), _) => Finding::ok("cluster", format!("kube-system has the uid {uid}")),
            (None, Some(identity)) => Finding::warning(
                "cluster",
                format!(
                    "known by its {identity} only, which may be rotated or shared: kubefan may not get the namespace kube-system"
                ),
                remedy,
            ),
            (None, None) => Finding::warning(
                "cluster",
                "another cluster behind this address could not be told apart: kubefan may not get the namespace kube-system",
                remedy,
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::*;

    #[test]
    fn versions_are_judged_by_their_minor() {
        let cases = [
            ("v1.35.4", Outcome::Ok),
            ("v1.34.1-gke.100", Outcome::Ok),
            ("v1.33.0+k3s1", Outcome::Warning),
            ("v1.99.0", Outcome::Warning),
            ("v1.18.20", Outcome::Error),
            ("v2.0.0", Outcome::Warning),
            ("", Outcome::Warning),
        ];
        for (version, outcome) in cases {
            assert_eq!(judge_version(version).result, outcome, "{version}");
        }
    }

    #[test]
    fn clocks_may_differ_by_a_minute() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(judge_clock(at(1000), at(1060)).result, Outcome::Ok);
        let ahead = judge_clock(at(1000), at(1061));
        assert_eq!(ahead.result, Outcome::Warning);
        assert!(ahead.message.contains("61 s ahead of"), "{ahead:?}");
        assert!(judge_clock(at(2000), at(1000)).message.contains("1000 s behind"));
        let date = rfc2822::parse("Tue, 24 Nov 2026 11:44:16 GMT").unwrap();
        assert_eq!(date.timestamp().as_second(), 1_795_520_656, "the form of an HTTP date");
    }

    #[test]
    fn each_failure_names_its_step() {
        let server = "https://h:6443".to_owned();
        let message = "no".to_owned();
        let cases = [
            (UpstreamError::Tls { server, message: message.clone() }, "TLS"),
            (UpstreamError::Auth { message: message.clone() }, "credentials"),
            (UpstreamError::Credentials { message: message.clone() }, "credentials"),
            (UpstreamError::Reset { message: message.clone() }, "TLS"),
            (UpstreamError::NotFound { message }, "answer"),
        ];
        for (error, check) in cases {
            let finding = judge_failure(&error);
            assert_eq!((finding.result, finding.check.as_str()), (Outcome::Error, check));
        }
        assert_eq!(judge_account(Ok("system:anonymous".to_owned())).result, Outcome::Error);
        assert_eq!(judge_account(Ok("system:serviceaccount:kubefan:kubefan".to_owned())).result, Outcome::Ok);
    }

    #[test]
    fn the_port_follows_the_scheme_and_user_info_is_left_out() {
        let name = |url: &str| server_name(&url.parse().unwrap());
        assert_eq!(name("https://u:secret@h.example/k8s"), "https://h.example:443");
        assert_eq!(name("http://[::1]"), "http://[::1]:80");
    }
}
