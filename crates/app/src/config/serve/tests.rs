use clap::Parser;
use kubefan_upstream::passthrough::Credentials;

use super::*;
use crate::config::{AuthorizationMode, file, settings};

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
    // Refused without TLS, an audit log and a socket.
    const REFUSED: [&str; 3] = ["tls_min_version", "audit_log_mode", "listen_mode"];
    let shown = default_texts().into_iter().filter(|(field, _)| !REFUSED.contains(field));
    let flags = shown.map(|(field, text)| format!("--{}={text}", field.replace('_', "-")));
    let in_file = key_default_texts().into_iter();
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
    let access = |flags: &[&str]| validated(&[&["--resource=pods"], flags].concat()).access;
    let socket = "--listen=unix:/run/k.sock";
    let open: [&[&str]; 5] = [
        &[],
        &["--listen=[::1]:7443"],
        &[socket],
        &[socket, "--listen-mode=0600"],
        &["--admin-listen=unix:/run/a.sock", "--listen-mode=0666"],
    ];
    for flags in open {
        assert_eq!(access(flags), Access::Local, "{flags:?}");
        let authorized = [flags, &["--access=authorized", "--anonymous-auth"]].concat();
        assert_eq!(access(&authorized), Access::Authorized, "the given one wins: {flags:?}");
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
        assert_eq!(access(flags), Access::Authorized, "{flags:?}");
        let open = [flags, &["--access=local"]].concat();
        if flags.iter().any(|flag| flag.contains(":7443")) {
            assert!(problem(&open).contains("--access=insecure"), "{flags:?}");
        } else {
            assert_eq!(access(&open), Access::Local, "the given one wins: {flags:?}");
        }
    }
}

#[test]
fn other_machines_are_served_everything_only_if_insecure_and_choose_resources_only_with_on_demand() {
    let open = ["--listen=:7443", "--resource=pods", "--access=local"];
    let refused = problem(&open);
    assert!(refused.starts_with("--listen [::]:7443 can be reached by other machines, and with --access=local"));
    let insecure = ["--listen=:7443", "--resource=pods", "--access=insecure"];
    let config = validated(&insecure);
    assert_eq!((config.access.mode(), config.on_demand.is_on), (AuthorizationMode::AlwaysAllow, false));
    let config = validated(&[insecure.as_slice(), &["--on-demand"]].concat());
    assert_eq!(config.on_demand, ServeConfig::default().on_demand);
    assert!(given(&["--admin-listen=0.0.0.0:7444"]).validate().is_ok(), "health and metrics may be seen");
    let own = problem(&["--listen=:7443", "--on-demand", "--access=local-self"]);
    assert!(own.contains("would act as kubefan") && !own.contains("--access=insecure"), "{own}");
}

#[test]
fn an_address_of_other_machines_may_be_served_to_callers_that_are_reviewed() {
    let open = ["--listen=:7443", "--resource=pods", "--access=authorized"];
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let config = validated(&[&open[..], &tls].concat());
    assert_eq!(
        (config.access.mode(), config.access.credentials()),
        (AuthorizationMode::Webhook, Some(Credentials::Caller))
    );
    assert_eq!(config.callers.always_allow_groups, ["system:masters"]);
    assert!(problem(&open).contains("needs TLS"));
    validated(&["--listen=unix:/run/kubefan.sock", "--access=authorized"]);
    let own = ["--listen=:7443", "--resource=pods", "--api-audiences=kubefan", "--access=authorized-cache-only"];
    assert_eq!(validated(&[&own[..], &tls].concat()).callers.api_audiences, ["kubefan"]);
}

#[test]
fn each_profile_says_who_may_read_and_with_which_credentials_requests_are_forwarded() {
    use AuthorizationMode::{AlwaysAllow, Webhook};
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    for (profile, mode, credentials) in [
        ("authorized", Webhook, Some(Credentials::Caller)),
        ("authorized-impersonate", Webhook, Some(Credentials::Impersonate)),
        ("authorized-cache-only", Webhook, None),
        ("local", AlwaysAllow, Some(Credentials::Caller)),
        ("local-self", AlwaysAllow, Some(Credentials::Own)),
        ("local-cache-only", AlwaysAllow, None),
        ("insecure", AlwaysAllow, Some(Credentials::Caller)),
        ("insecure-cache-only", AlwaysAllow, None),
    ] {
        let profile = format!("--access={profile}");
        let config = validated(&[&tls[..], &[&*profile]].concat());
        assert_eq!((config.access.mode(), config.access.credentials()), (mode, credentials), "{profile}");
        let plain = given(&["--listen=:7443", "--resource=pods", &*profile]).validate();
        assert_eq!(plain.is_ok(), profile.contains("insecure"), "{profile}");
    }
}

/// A rule about options that contradict each other, with options that break it and the beginning of
/// the error.
type Rule<'a> = &'a [(&'a [&'a str], &'a str)];

#[test]
fn each_contradiction_names_its_options() {
    const TLS: [&str; 2] = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let on_socket = ["--access=authorized", "--listen=unix:/x"];
    let rules: [Rule; 15] = [
        // A profile for this machine is not for other machines.
        &[(
            &["--listen=:7443", "--on-demand", "--access=local-self"],
            "--listen [::]:7443 can be reached by other machines, and with --access=local-self every client",
        )],
        // Callers that show tokens need TLS.
        &[
            (
                &["--access=authorized-impersonate"],
                "--access=authorized-impersonate with --listen 127.0.0.1:7443 needs TLS",
            ),
            (
                &["--listen=:7443", "--resource=pods"],
                "--listen [::]:7443 can be reached by other machines, so callers are",
            ),
        ],
        // A restriction of callers needs callers that differ.
        &[
            (
                &["--client-ca-file=a"],
                "--client-ca-file would restrict nobody with --access=local, which does not distinguish callers; leave \
                 --client-ca-file out, or choose --access=authorized or",
            ),
            (
                &["--api-audiences=a"],
                "--api-audiences would restrict nobody with --access=local, which does not distinguish callers; leave \
                 --api-audiences out, or choose --access=authorized-impersonate or --access=authorized-cache-only",
            ),
            (&["--admin-authorization"], "--admin-authorization would restrict nobody with --access=local"),
            (
                &["tuning.authorizationAlwaysAllowGroups=[a]"],
                "tuning.authorizationAlwaysAllowGroups would restrict nobody with --access=local",
            ),
        ],
        // Tokens of kubefan's own audiences cannot be forwarded.
        &[(
            &["--access=authorized", TLS[0], TLS[1], "--api-audiences=a"],
            "--api-audiences names audiences of kubefan's own, and --access=authorized would forward their tokens to the \
             apiserver, which refuses them; leave --api-audiences out, or choose --access=authorized-impersonate or \
             --access=authorized-cache-only",
        )],
        // These options need TLS.
        &[
            (&[on_socket[0], on_socket[1], "--client-ca-file=a"], "--client-ca-file needs TLS"),
            (&[on_socket[0], on_socket[1], "--admin-authorization"], "--admin-authorization needs TLS"),
            (&["--tls-min-version=VersionTLS13"], "--tls-min-version needs TLS"),
        ],
        // The certificate is one choice, and complete.
        &[
            (&[TLS[0]], "--tls-cert-file needs --tls-private-key-file: the certificate is either in"),
            (&[TLS[1]], "--tls-private-key-file needs --tls-cert-file"),
            (&["--tls-managed-secret=a/b"], "--tls-managed-secret needs --tls-managed-dns-names"),
            (&["--tls-managed-copies=a/b"], "--tls-managed-copies needs --tls-managed-secret"),
            (&[TLS[0], TLS[1], "--tls-managed-copies=a/b"], "--tls-managed-copies excludes --tls-cert-file"),
        ],
        // A copy of the managed certificate is without the CA's key.
        &[(
            &["--tls-managed-secret=a/b", "--tls-managed-dns-names=c", "--tls-managed-copies=a/b"],
            "--tls-managed-copies \"a/b\": the Secret of --tls-managed-secret",
        )],
        // The managed CA outlives the certificates.
        &[(
            &["--tls-managed-secret=a/b", "--tls-managed-dns-names=c", "tuning.tlsManagedCaLifetime=1h"],
            "tuning.tlsManagedCaLifetime \"1h\": too short",
        )],
        // These options need TLS to another kubefan.
        &[
            (&["--upstream-ca-file=a"], "--upstream-ca-file needs a gRPC address with TLS as --upstream"),
            (&["--upstream=file", "--upstream-server-name=a"], "--upstream-server-name needs a gRPC address with TLS"),
            (&["--upstream=127.0.0.1:1", "--upstream-token-file=a"], "--upstream-token-file needs a gRPC address"),
        ],
        // Peers speak over mutual TLS.
        &[(&["--peers=p:1"], "--peers needs --peer-cert-file"), (&["--peer-listen=:1"], "--peer-listen needs --peer-")],
        // Nothing is forwarded with a profile that refuses requests.
        &[
            (
                &["--access=local-cache-only", "tuning.consistentReads=upstream"],
                "tuning.consistentReads: upstream needs requests to be forwarded to the apiserver",
            ),
            (
                &["--access=local-cache-only", "tuning.passthroughOnAlarm=true"],
                "tuning.passthroughOnAlarm needs requests to be forwarded to the apiserver",
            ),
        ],
        // A record needs a file.
        &[(&["--audit-log-mode=blocking-strict"], "--audit-log-mode needs --audit-log-path")],
        // The rights of a socket need a socket.
        &[(&["--listen-mode=0600"], "--listen-mode needs --listen or --admin-listen unix:PATH")],
        // Something is cached.
        &[(&["--on-demand=false"], "nothing to serve: name what to cache with --resource")],
        // A quiet resource is not stale.
        &[(&["--max-staleness=2m"], "--max-staleness \"2m\": must be from 3m to 24h")],
    ];
    for (flags, expected) in rules.iter().copied().flatten() {
        let problem = problem(flags);
        assert!(problem.starts_with(expected), "{problem}");
    }
}

#[test]
fn an_option_that_loses_its_effect_and_restricts_nothing_is_a_warning() {
    let authorized = ["--access=authorized", "--listen=unix:/x"];
    let grpc = "--upstream=https://h:1";
    let cases: [(&[&str], &str); 10] = [
        (
            &["--anonymous-auth"],
            "--anonymous-auth has no effect with --access=local, which does not distinguish callers",
        ),
        (&["tuning.authenticationSkipLookup"], "tuning.authenticationSkipLookup has no effect with --access=local"),
        (&["tuning.serviceAccountJwks"], "tuning.serviceAccountJwks has no effect with --access=local"),
        (
            &[authorized[0], authorized[1], "tuning.serviceAccountJwks"],
            "tuning.serviceAccountJwks has no effect without --api-audiences",
        ),
        (
            &["--access=authorized-impersonate", authorized[1], "tuning.authorizationIgnoreExtra=[a]"],
            "tuning.authorizationIgnoreExtra has no effect with --access=authorized-impersonate",
        ),
        (&[grpc, "--resource=pods=protobuf"], "--resource pods=protobuf has no effect with a gRPC address"),
        (&[grpc, "--cache-tables"], "--cache-tables has no effect with a gRPC address"),
        (
            &[grpc, "--upstream-cert-file=a", "--upstream-token-file=b"],
            "--upstream-token-file has no effect with --upstream-cert-file",
        ),
        (&[grpc, "--upstream-key-file=a"], "--upstream-key-file has no effect without --upstream-cert-file"),
        (&["--rebalance"], "--rebalance has no effect without --peers and --peer-listen"),
    ];
    for (flags, expected) in cases {
        let warnings = validated(flags).without_effect;
        assert!(matches!(warnings.as_slice(), [warning] if warning.starts_with(expected)), "{flags:?}: {warnings:?}");
    }
    assert_eq!(ServeConfig::default().without_effect, Vec::<String>::new());
    let kubeconfig =
        validated(&["--upstream=file", "--resource=pods=protobuf", "--cache-tables", "tuning.protobuf=off"]);
    assert_eq!(kubeconfig.without_effect, Vec::<String>::new(), "a kubeconfig leads to every encoding");
}

#[test]
fn an_option_without_effect_is_off() {
    let callers = |flags: &[&str]| validated(&[&["--listen=unix:/x"], flags].concat()).callers;
    let extra = "tuning.authorizationIgnoreExtra=[a]";
    assert_eq!(callers(&["--access=authorized", extra]).ignored_extra, ["a"]);
    let acting = callers(&["--access=authorized-impersonate", extra]);
    assert_eq!(acting.ignored_extra, Vec::<String>::new(), "users would act without the extra");
    let jwks = ["--access=authorized-cache-only", "tuning.serviceAccountJwks"];
    assert!(!callers(&jwks).service_account_jwks, "tokens for the apiserver are reviewed");
    assert!(callers(&[&jwks[..], &["--api-audiences=a"]].concat()).service_account_jwks);
    let over_grpc = validated(&["--upstream=https://h:1", "--resource=pods=protobuf,nodes=json+protobuf"]);
    assert_eq!(over_grpc.cache.resources, ["pods", "nodes"].map(Into::into), "only JSON is read over gRPC");
}

#[test]
fn a_limit_of_what_is_off_changes_nothing() {
    for setting in ["limits.cacheTablesBytesMax=1Mi", "limits.auditLogMaxsize=5", "tuning.otlpSamplingRatio=0.5"] {
        assert!(given(&[setting]).validate().is_ok(), "{setting}");
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
        "--peers needs --peer-key-file: peers speak over mutual TLS only; or give --tls-managed-secret and none of the files"
    );
    assert!(problem(&["--peer-listen=0.0.0.0:7445"]).contains("needs --peer-cert-file"));
    assert_eq!(validated(&["--peer-ca-file=f"]).peer.files, None);
    assert!(problem(&["--peer-listen=unix:/x"]).contains("other machines connect to it"));
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
    let alone = [["--peers=p:1", "--rebalance"].as_slice(), &files].concat();
    assert!(!validated(&alone).peer.rebalance, "the others would not learn its load");
    assert!(problem(&moves(&["tuning.rebalancePercent=11"])).ends_with("must be from 1 to 10"));
}

#[test]
fn every_second_variable_is_of_a_flag() {
    let command = <ServeOptions as clap::Args>::augment_args(clap::Command::new("serve"));
    for names in second_variables() {
        assert!(command.get_arguments().any(|arg| arg.get_id() == names.field), "{}", names.second);
    }
}
