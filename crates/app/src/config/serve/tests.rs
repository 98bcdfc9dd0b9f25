use clap::Parser;
use kubefan_upstream::passthrough::Credentials;

use super::*;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    options: ServeOptions,
}

fn given(flags: &[&str]) -> ServeOptions {
    Flags::parse_from(["serve"].iter().chain(flags)).options
}

fn validated(flags: &[&str]) -> ServeConfig {
    given(flags).validate().unwrap()
}

fn problem(flags: &[&str]) -> String {
    given(flags).validate().unwrap_err().to_string()
}

#[test]
fn no_options_at_all_are_the_defaults() {
    let default = ServeConfig::default();
    assert_eq!(ServeOptions::default().validate(), Ok(default.clone()));
    // The limits of the tables are refused while the tables are off, the rights of sockets
    // without a file, the version of TLS without TLS, and everything about an audit log or a
    // collector or a managed certificate without one.
    let refused = ["cache_tables_bytes_max", "listen_mode", "tls_min_version"];
    let prefixes = ["audit_log_", "otlp_", "tls_managed_"];
    let is_refused = |field: &str| refused.contains(&field) || prefixes.iter().any(|prefix| field.starts_with(prefix));
    let shown = default_texts().into_iter().filter(|(field, _)| !is_refused(field));
    let flags: Vec<String> = shown.map(|(field, text)| format!("--{}={text}", field.replace('_', "-"))).collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    assert_eq!(validated(&flags), default, "the defaults that --help shows are those that apply");
}

#[test]
fn an_option_that_is_given_above_wins_over_one_given_below() {
    let upper = given(&["--page-size=7", "--resource=pods"]);
    let lower = given(&["--page-size=9", "--ring-events-max=11", "--resource=nodes,services"]);
    let config = upper.overlay(lower).validate().unwrap();
    assert_eq!((config.upstream.page_size, config.cache.ring_events_max), (7, 11));
    assert_eq!(config.cache.resources, ["pods".into()]);
}

#[test]
fn callers_are_authorized_unless_only_the_users_of_this_machine_reach_the_port_without_tls() {
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let mode = |flags: &[&str]| validated(&[&["--resource=pods"], flags].concat()).callers.mode;
    let socket = "--listen=unix:/run/k.sock";
    let open: [&[&str]; 5] = [
        &[],
        &["--listen=[::1]:7443"],
        &[socket],
        &[socket, "--listen-mode=0600"],
        &["--admin-listen=unix:/run/a.sock", "--listen-mode=0666"],
    ];
    for flags in open {
        assert_eq!(mode(flags), AuthorizationMode::AlwaysAllow, "{flags:?}");
        let webhook = [flags, &["--authorization-mode=Webhook", "--anonymous-auth"]].concat();
        assert_eq!(mode(&webhook), AuthorizationMode::Webhook, "the given one wins: {flags:?}");
    }
    let closed: [&[&str]; 6] = [
        &tls,
        &["--listen=127.0.0.2:0", tls[0], tls[1]],
        &["--listen=:7443", tls[0], tls[1]],
        &["--listen=10.0.0.1:7443", tls[0], tls[1]],
        &[socket, "--listen-mode=0660"],
        &[socket, "--listen-mode=0602"],
    ];
    for flags in closed {
        assert_eq!(mode(flags), AuthorizationMode::Webhook, "{flags:?}");
        let is_local = flags.iter().all(|flag| !flag.contains(":7443"));
        let open = [flags, &["--authorization-mode=AlwaysAllow"]].concat();
        match is_local {
            true => assert_eq!(mode(&open), AuthorizationMode::AlwaysAllow, "the given one wins: {flags:?}"),
            false => assert!(problem(&open).contains("--insecure"), "{flags:?}"),
        }
    }
}

#[test]
fn other_machines_are_served_everything_only_with_insecure_and_choose_resources_only_with_on_demand() {
    let open = ["--listen=:7443", "--resource=pods", "--authorization-mode=AlwaysAllow"];
    let refused = problem(&open);
    assert!(
        refused.starts_with(
            "--listen [::]:7443 can be reached by other machines, and with --authorization-mode=AlwaysAllow"
        )
    );
    let insecure = [open.as_slice(), &["--insecure"]].concat();
    assert!(!validated(&insecure).on_demand.is_on);
    let config = validated(&[insecure.as_slice(), &["--on-demand"]].concat());
    assert_eq!(config.on_demand, ServeConfig::default().on_demand);
    assert!(given(&["--admin-listen=0.0.0.0:7444"]).validate().is_ok(), "health and metrics may be seen");
}

#[test]
fn an_address_of_other_machines_may_be_served_to_callers_that_are_reviewed() {
    let open = ["--listen=:7443", "--resource=pods", "--authorization-mode=Webhook"];
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let config = validated(&[&open[..], &tls].concat());
    assert_eq!((config.callers.mode, config.serving.insecure), (AuthorizationMode::Webhook, false));
    assert_eq!(config.callers.always_allow_groups, ["system:masters"]);
    assert!(problem(&open).contains("needs TLS"));
    let refused = problem(&[&open[..], &tls, &["--insecure"]].concat());
    assert!(refused.starts_with("--insecure has no effect with --listen [::]:7443"), "{refused}");
    validated(&["--listen=unix:/run/kubefan.sock", "--authorization-mode=Webhook"]);
    let own = ["--api-audiences=kubefan", "--passthrough=off"];
    assert_eq!(validated(&[&open[..], &tls, &own].concat()).callers.api_audiences, ["kubefan"]);
}

#[test]
fn requests_are_forwarded_with_the_callers_credentials_unless_options_say_otherwise() {
    let credentials = |flags: &[&str]| validated(flags).passthrough.credentials;
    assert_eq!(credentials(&["--listen=127.0.0.1:0"]), Some(Credentials::Caller));
    assert_eq!(credentials(&["--passthrough=self", "--listen=[::1]:0"]), Some(Credentials::Own));
    assert_eq!(credentials(&["--passthrough=self", "--listen=unix:/run/kubefan.sock"]), Some(Credentials::Own));
    assert_eq!(credentials(&["--passthrough=off", "--listen=127.0.0.1:0"]), None);
    let acting = ["--passthrough=impersonate", "--tls-cert-file=a", "--tls-private-key-file=b", "--api-audiences=k"];
    assert_eq!(credentials(&acting), Some(Credentials::Impersonate));
}

#[test]
fn each_contradiction_names_its_flags() {
    let webhook = "--authorization-mode=Webhook";
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let cases: [(&[&str], &str); 36] = [
        (
            &["--passthrough=impersonate"],
            "--passthrough=impersonate acts as callers, and kubefan does not know them with",
        ),
        (
            &[tls[0], tls[1], "--passthrough=impersonate", "--passthrough-insecure-upstream"],
            "--passthrough-insecure-upstream has no effect with --passthrough=impersonate",
        ),
        (&["--listen=:7443", "--resource=pods"], "--listen [::]:7443 can be reached by other machines, so callers are"),
        (&["--listen=:7443", "--insecure"], "--insecure has no effect with --listen [::]:7443, whose callers"),
        (
            &[tls[0], tls[1], "--passthrough=self"],
            "--passthrough=self lets every caller act as kubefan, and with TLS callers read only what they may",
        ),
        (
            &["--listen=unix:/run/k.sock", "--listen-mode=0660", "--passthrough=self"],
            "--passthrough=self lets every caller act as kubefan, and with --listen-mode=0660 callers",
        ),
        (&["--audit-log-mode=batch"], "--audit-log-mode has no effect without --audit-log-path"),
        (&[webhook], "--authorization-mode=Webhook with --listen 127.0.0.1:7443 needs TLS"),
        (&[webhook, tls[0], tls[1], "--passthrough=self"], "--passthrough=self lets every caller act as kubefan"),
        (&[webhook, tls[0], tls[1], "--api-audiences=a"], "--api-audiences names audiences of kubefan's own"),
        (&["--client-ca-file=a"], "--client-ca-file has no effect with --authorization-mode=AlwaysAllow"),
        (
            &["--authentication-skip-lookup"],
            "--authentication-skip-lookup has no effect with --authorization-mode=AlwaysAllow",
        ),
        (&[webhook, "--listen=unix:/x", "--client-ca-file=a"], "--client-ca-file has no effect without TLS"),
        (&["--tls-min-version=VersionTLS13"], "--tls-min-version has no effect without TLS"),
        (
            &[
                tls[0],
                tls[1],
                "--tls-min-version=VersionTLS13",
                "--tls-cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
            ],
            "--tls-cipher-suites has no effect with --tls-min-version=VersionTLS13",
        ),
        (&["--anonymous-auth"], "--anonymous-auth has no effect with --authorization-mode=AlwaysAllow"),
        (&["--admin-authorization"], "--admin-authorization has no effect with --authorization-mode=AlwaysAllow"),
        (
            &[webhook, "--listen=unix:/x", "--admin-authorization"],
            "--admin-authorization needs TLS, because others could read the tokens",
        ),
        (&[webhook, tls[0], tls[1], "--service-account-jwks"], "--service-account-jwks is for tokens of kubefan's own"),
        (
            &[tls[0], tls[1], "--passthrough=impersonate", "--authorization-ignore-extra=a"],
            "--authorization-ignore-extra leaves extras out of what kubefan knows",
        ),
        (&["--listen-mode=0660"], "--listen-mode has no effect without --listen unix:PATH"),
        (&["--tls-cert-file=x.pem"], "--tls-cert-file needs --tls-private-key-file"),
        (&["--tls-private-key-file=x.pem"], "--tls-private-key-file needs --tls-cert-file"),
        (&["--listen=127.0.0.1:7444"], "--listen and --admin-listen are both 127.0.0.1:7444"),
        (&["--on-demand=false"], "nothing to serve: name what to cache with --resource"),
        (
            &["--on-demand=false", "--on-demand-objects-max=5"],
            "--on-demand-objects-max has no effect without --on-demand",
        ),
        (
            &["--listen=:7443", "--insecure", "--on-demand", "--passthrough=self"],
            "--passthrough=self with --listen [::]:7443",
        ),
        (
            &["--passthrough=off", "--consistent-reads=upstream"],
            "--consistent-reads=upstream needs a way upstream, and --passthrough=off leaves none",
        ),
        (&["--passthrough=off", "--passthrough-max=5"], "--passthrough-max has no effect with --passthrough=off"),
        (
            &["--passthrough=off", "--passthrough-upgrades"],
            "--passthrough-upgrades has no effect with --passthrough=off",
        ),
        (
            &["--passthrough=off", "--passthrough-insecure-upstream"],
            "--passthrough-insecure-upstream has no effect with --passthrough=off",
        ),
        (
            &["--passthrough=self", "--passthrough-insecure-upstream"],
            "--passthrough-insecure-upstream has no effect with --passthrough=self",
        ),
        (&["--cache-tables-bytes-max=1Mi"], "--cache-tables-bytes-max has no effect without --cache-tables"),
        (
            &["--protobuf=off", "--resource=nodes,pods=json+protobuf"],
            "--resource pods=protobuf has no effect with --protobuf=off",
        ),
        (&["--protobuf=off", "--protobuf-bytes-max=1Mi"], "--protobuf-bytes-max has no effect with --protobuf=off"),
        (
            &["--on-demand-idle-timeout=1m", "--on-demand=false", "--resource=pods"],
            "--on-demand-idle-timeout has no effect without --on-demand",
        ),
    ];
    for (flags, expected) in cases {
        let problem = problem(flags);
        assert!(problem.starts_with(expected), "{problem}");
    }
}

#[test]
fn a_value_that_cannot_be_used_is_named_with_its_flag() {
    let cases: [(&[&str], &str); 17] = [
        (&["--allowed-hosts=a,http://b"], "--allowed-hosts \"http://b\": no name of a host; write it like"),
        (
            &["--tls-cipher-suites=a"],
            "--tls-cipher-suites \"a\": no cipher suite that kubefan has; choose among TLS_ECDHE_",
        ),
        (
            &["--tls-cipher-suites=TLS_AES_128_GCM_SHA256"],
            "--tls-cipher-suites \"TLS_AES_128_GCM_SHA256\": a cipher suite of TLS 1.3; those are always on",
        ),
        (&["--resource=pods,Pods"], "--resource \"Pods\": given twice"),
        (&["--resource=pods,pods=protobuf"], "--resource \"pods\": given twice"),
        (
            &["--resource=pods=xml"],
            "--resource \"pods=xml\": \"xml\" is no medium; write pods=protobuf or pods=json+protobuf",
        ),
        (&["--resource=a..b"], "--resource \"a..b\": no name of a resource"),
        (
            &["--resource=pods nodes"],
            "--resource \"pods nodes\": no name of a resource; separate several by commas, without spaces",
        ),
        (
            &["--resource=nodes,pods/log"],
            "--resource \"pods/log\": no name of a resource; a subresource cannot be watched",
        ),
        (&["--namespace=Default"], "--namespace \"Default\": no name of a namespace"),
        (&["--page-size=0"], "--page-size \"0\": must be at least 1"),
        (&["--max-message-size=3"], "--max-message-size \"3\": must be at least 1Ki"),
        (&["--memory-max=1Mi"], "--memory-max \"1Mi\": must be at least 64Mi"),
        (&["--ring-age-max=10ms"], "--ring-age-max \"10ms\": must be from 1s to 24h"),
        (&["--max-staleness=2m"], "--max-staleness \"2m\": must be from 3m to 24h: a quiet resource"),
        (
            &["--upstream-field-selector=spec.nodeName"],
            "--upstream-field-selector \"spec.nodeName\": \"spec.nodeName\" is no term of a field selector",
        ),
        (
            &["--upstream-field-selector=spec.nodeName=a=b"],
            "--upstream-field-selector \"spec.nodeName=a=b\": invalid field selector: unescaped character",
        ),
    ];
    for (flags, expected) in cases {
        let problem = problem(flags);
        assert!(problem.starts_with(expected), "{problem}");
    }
    let config = validated(&["--max-staleness=3m", "--self-check-interval=0s"]);
    assert_eq!(config.serving.staleness_max, Some(time::Duration::from_secs(180)));
    assert_eq!(config.upstream.self_check_interval, None);
    let socket = ["--listen=unix:/run/k.sock", "--listen-mode=0660"];
    assert_eq!(validated(&socket).serving.listen_mode.to_string(), "0660");
}

#[test]
fn peers_need_certificates_and_certificates_peers() {
    let files = ["--peer-cert-file=f", "--peer-key-file=f", "--peer-ca-file=f"];
    assert_eq!(
        problem(&["--peers=p:1", "--peer-cert-file=f"]),
        "--peers needs --peer-key-file: peers speak over mutual TLS only"
    );
    assert!(problem(&["--peer-listen=0.0.0.0:7445"]).contains("needs --peer-cert-file"));
    assert_eq!(problem(&["--peer-ca-file=f"]), "--peer-ca-file has no effect without --peer-listen or --peers");
    assert!(problem(&["--peer-listen=unix:/x"]).starts_with("--peer-listen is for"));
    let both = [["--peers=p:1", "--peer-listen=0.0.0.0:7445"].as_slice(), &files].concat();
    assert_eq!(validated(&both).peer.peers, Some("p:1".parse().unwrap()));
    let cold = validated(&[both.as_slice(), &["--cold"]].concat()).peer;
    assert!(!cold.warm_start && cold.listen.is_some() && cold.files.is_some(), "it still serves peers");
    assert_eq!(cold.peers, Some("p:1".parse().unwrap()), "check still connects to them");
    let moves = |more: &[&'static str]| [both.as_slice(), &["--rebalance"], more].concat();
    assert!(validated(&both).peer.warm_start && !validated(&both).peer.rebalance);
    let moving = validated(&moves(&["--cold", "--rebalance-percent=5"])).peer;
    assert_eq!((moving.rebalance, moving.rebalance_percent), (true, 5));
    assert_eq!(validated(&moves(&[])).peer.rebalance_percent, 1);
    assert!(problem(&["--rebalance"]).starts_with("--rebalance needs --peers:"));
    let alone = [["--peers=p:1", "--rebalance"].as_slice(), &files].concat();
    assert!(problem(&alone).starts_with("--rebalance needs --peer-listen:"));
    let idle = [both.as_slice(), &["--rebalance-percent=2"]].concat();
    assert_eq!(problem(&idle), "--rebalance-percent has no effect without --rebalance");
    assert!(problem(&moves(&["--rebalance-percent=11"])).ends_with("must be from 1 to 10"));
    let same = [["--listen=127.0.0.1:1", "--peer-listen=127.0.0.1:1"].as_slice(), &files].concat();
    assert!(problem(&same).contains("are both 127.0.0.1:1"));
}
