use clap::Parser;
use kubefan_upstream::passthrough::Credentials;

use super::*;
use crate::config::{file, settings};

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    options: ServeOptions,
}

/// Flags, and settings without flags such as `limits.readsMax=5`.
fn given(args: &[&str]) -> ServeOptions {
    let (in_file, flags): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| settings::is_setting(arg));
    let file = file::parse_at("kubefan.yaml".as_ref(), &settings::text_of(&in_file)).unwrap();
    Flags::parse_from(["serve"].into_iter().chain(flags)).options.overlay(file)
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
    let refused = ["limits.cacheTablesBytesMax", "listen_mode", "tls_min_version"];
    let prefixes = ["audit_log_", "limits.auditLog", "tuning.otlp", "tuning.tlsManaged"];
    let is_refused = |name: &str| refused.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix));
    let shown = default_texts().into_iter().filter(|(field, _)| !is_refused(field));
    let flags = shown.map(|(field, text)| format!("--{}={text}", field.replace('_', "-")));
    let in_file = key_default_texts().into_iter().filter(|(path, _)| !is_refused(path));
    let args: Vec<String> = flags.chain(in_file.map(|(path, text)| format!("{path}={text}"))).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    assert_eq!(validated(&args), default, "the defaults that are shown are those that apply");
}

#[test]
fn an_option_that_is_given_above_wins_over_one_given_below() {
    let upper = given(&["--max-staleness=7m", "--resource=pods"]);
    let lower = given(&["--max-staleness=9m", "limits.ringEventsMax=11", "--resource=nodes,services"]);
    let config = upper.overlay(lower).validate().unwrap();
    let staleness = config.serving.staleness_max.map(|max| max.as_secs());
    assert_eq!((staleness, config.cache.ring_events_max), (Some(420), 11));
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
            &[tls[0], tls[1], "--passthrough=impersonate", "tuning.passthroughInsecureUpstream"],
            "tuning.passthroughInsecureUpstream has no effect with --passthrough=impersonate",
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
            &["tuning.authenticationSkipLookup"],
            "tuning.authenticationSkipLookup has no effect with --authorization-mode=AlwaysAllow",
        ),
        (&[webhook, "--listen=unix:/x", "--client-ca-file=a"], "--client-ca-file has no effect without TLS"),
        (&["--tls-min-version=VersionTLS13"], "--tls-min-version has no effect without TLS"),
        (
            &[
                tls[0],
                tls[1],
                "--tls-min-version=VersionTLS13",
                "tuning.tlsCipherSuites=[TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]",
            ],
            "tuning.tlsCipherSuites has no effect with --tls-min-version=VersionTLS13",
        ),
        (&["--anonymous-auth"], "--anonymous-auth has no effect with --authorization-mode=AlwaysAllow"),
        (&["--admin-authorization"], "--admin-authorization has no effect with --authorization-mode=AlwaysAllow"),
        (
            &[webhook, "--listen=unix:/x", "--admin-authorization"],
            "--admin-authorization needs TLS, because others could read the tokens",
        ),
        (
            &[webhook, tls[0], tls[1], "tuning.serviceAccountJwks"],
            "tuning.serviceAccountJwks is for tokens of kubefan's own",
        ),
        (
            &[tls[0], tls[1], "--passthrough=impersonate", "tuning.authorizationIgnoreExtra=[a]"],
            "tuning.authorizationIgnoreExtra leaves extras out of what kubefan knows",
        ),
        (&["--listen-mode=0660"], "--listen-mode has no effect without --listen unix:PATH"),
        (&["--tls-cert-file=x.pem"], "--tls-cert-file needs --tls-private-key-file"),
        (&["--tls-private-key-file=x.pem"], "--tls-private-key-file needs --tls-cert-file"),
        (&["--listen=127.0.0.1:7444"], "--listen and --admin-listen are both 127.0.0.1:7444"),
        (&["--on-demand=false"], "nothing to serve: name what to cache with --resource"),
        (
            &["--on-demand=false", "limits.onDemandObjectsMax=5"],
            "limits.onDemandObjectsMax has no effect without --on-demand",
        ),
        (
            &["--listen=:7443", "--insecure", "--on-demand", "--passthrough=self"],
            "--passthrough=self with --listen [::]:7443",
        ),
        (
            &["--passthrough=off", "tuning.consistentReads=upstream"],
            "tuning.consistentReads=upstream needs a way upstream, and --passthrough=off leaves none",
        ),
        (
            &["--passthrough=off", "limits.passthroughMax=5"],
            "limits.passthroughMax has no effect with --passthrough=off",
        ),
        (
            &["--passthrough=off", "tuning.passthroughUpgrades"],
            "tuning.passthroughUpgrades has no effect with --passthrough=off",
        ),
        (
            &["--passthrough=off", "tuning.passthroughInsecureUpstream"],
            "tuning.passthroughInsecureUpstream has no effect with --passthrough=off",
        ),
        (
            &["--passthrough=self", "tuning.passthroughInsecureUpstream"],
            "tuning.passthroughInsecureUpstream has no effect with --passthrough=self",
        ),
        (&["limits.cacheTablesBytesMax=1Mi"], "limits.cacheTablesBytesMax has no effect without --cache-tables"),
        (
            &["tuning.protobuf=off", "--resource=nodes,pods=json+protobuf"],
            "--resource pods=protobuf has no effect with tuning.protobuf=off",
        ),
        (
            &["tuning.protobuf=off", "limits.protobufBytesMax=1Mi"],
            "limits.protobufBytesMax has no effect with tuning.protobuf=off",
        ),
        (
            &["tuning.onDemandIdleTimeout=1m", "--on-demand=false", "--resource=pods"],
            "tuning.onDemandIdleTimeout has no effect without --on-demand",
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
            &["tuning.tlsCipherSuites=[a]"],
            "tuning.tlsCipherSuites \"a\": no cipher suite that kubefan has; choose among TLS_ECDHE_",
        ),
        (
            &["tuning.tlsCipherSuites=[TLS_AES_128_GCM_SHA256]"],
            "tuning.tlsCipherSuites \"TLS_AES_128_GCM_SHA256\": a cipher suite of TLS 1.3; those are always on",
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
        (&["tuning.pageSize=0"], "tuning.pageSize \"0\": must be at least 1"),
        (&["limits.maxMessageSize=3"], "limits.maxMessageSize \"3\": must be at least 1Ki"),
        (&["--memory-max=1Mi"], "--memory-max \"1Mi\": must be at least 64Mi"),
        (&["limits.ringAgeMax=10ms"], "limits.ringAgeMax \"10ms\": must be from 1s to 24h"),
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
    let config = validated(&["--max-staleness=3m", "tuning.selfCheckInterval=0s"]);
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
    let cold = validated(&[both.as_slice(), &["tuning.cold"]].concat()).peer;
    assert!(!cold.warm_start && cold.listen.is_some() && cold.files.is_some(), "it still serves peers");
    assert_eq!(cold.peers, Some("p:1".parse().unwrap()), "check still connects to them");
    let moves = |more: &[&'static str]| [both.as_slice(), &["--rebalance"], more].concat();
    assert!(validated(&both).peer.warm_start && !validated(&both).peer.rebalance);
    let moving = validated(&moves(&["tuning.cold", "tuning.rebalancePercent=5"])).peer;
    assert_eq!((moving.rebalance, moving.rebalance_percent), (true, 5));
    assert_eq!(validated(&moves(&[])).peer.rebalance_percent, 1);
    assert!(problem(&["--rebalance"]).starts_with("--rebalance needs --peers:"));
    let alone = [["--peers=p:1", "--rebalance"].as_slice(), &files].concat();
    assert!(problem(&alone).starts_with("--rebalance needs --peer-listen:"));
    let idle = [both.as_slice(), &["tuning.rebalancePercent=2"]].concat();
    assert_eq!(problem(&idle), "tuning.rebalancePercent has no effect without --rebalance");
    assert!(problem(&moves(&["tuning.rebalancePercent=11"])).ends_with("must be from 1 to 10"));
    let same = [["--listen=127.0.0.1:1", "--peer-listen=127.0.0.1:1"].as_slice(), &files].concat();
    assert!(problem(&same).contains("are both 127.0.0.1:1"));
}
