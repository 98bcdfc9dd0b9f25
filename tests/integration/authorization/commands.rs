//! Commands that send tokens.

use super::{
    identities::Who::{Lister, Own, Stranger},
    world::World,
};
use crate::harness::{
    apiserver::ApiServer,
    kubefan::{run, run_with},
    tests,
};

tests! {
    apiserver full: the_commands_read_with_a_token;
}

async fn the_commands_read_with_a_token() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = |who| {
        let path = dir.path().join(format!("{who:?}"));
        std::fs::write(&path, world.token(who).unwrap()).unwrap();
        format!("--token-file={}", path.display())
    };
    let (server, ca) =
        (format!("--server={}", world.url("")), format!("--ca-file={}", world.api.ca_pem_path().display()));
    let kubeconfig = format!("--kubeconfig={}", world.api.kubeconfig().display());
    let (by_file, namespace) = (file(Lister), format!("--namespace={}", world.own));
    let reads = [
        vec!["get", "configmaps", "one", &*namespace],
        vec!["get", "configmaps", &*namespace],
        vec!["watch", "configmaps", "--timeout=1s", "-o=name", &*namespace],
        vec!["verify", "configmaps", &*namespace, &*kubeconfig],
    ];
    let run_as = |read: &[&str], more: &[&str]| {
        let args: Vec<String> = [read, &[&*server, &*ca], more].concat().iter().map(ToString::to_string).collect();
        async move { run(&args.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    for read in &reads[1..] {
        let ran = run_as(read, &[&by_file]).await;
        assert!(ran.code == Some(0) && !ran.stdout.is_empty(), "{ran:?}");
        // Without a token, with a bad one, and with one that has no right.
        for (more, said) in [
            (vec![], "(Unauthorized): kubefan serves known callers only"),
            (vec!["--token=no-such-token"], "(Unauthorized): the apiserver does not accept this token"),
            (vec![&*file(Stranger)], "is forbidden: User \"nobody\" cannot"),
        ] {
            let ran = run_as(read, &more).await;
            let text = format!("{}{}", ran.stdout, ran.stderr);
            assert!(ran.code != Some(0) && text.contains(said), "{said}: {ran:?}");
            assert!(!said.contains("Unauthorized") || text.contains("--token-file"), "{ran:?}");
        }
    }
    let ran = run_as(&reads[0], &[&by_file]).await;
    assert!(ran.stderr.contains("(Forbidden)"), "it may list and not get: {ran:?}");
    let token = world.token(Own).unwrap();
    let ran = run_as(&reads[0], &["--token", token]).await;
    assert!(ran.code == Some(0) && ran.stdout.contains("one"), "{ran:?}");
    let by_variable = |name: &'static str, value: String| {
        let args: Vec<String> = [&reads[0][..], &[&*server, &*ca]].concat().iter().map(ToString::to_string).collect();
        async move {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            run_with(&args, |command| _ = command.env(name, value)).await
        }
    };
    let own = file(Own).trim_start_matches("--token-file=").to_owned();
    for ran in [by_variable("KUBEFAN_TOKEN", token.to_owned()).await, by_variable("KUBEFAN_TOKEN_FILE", own).await] {
        assert!(ran.code == Some(0) && ran.stdout.contains("one"), "{ran:?}");
    }
    // Not even to kubefan's own machine, because the port may be another program's.
    let plain = format!("--server={}", world.kubefan.grpc_addr);
    let ran = run(&["get", "configmaps", &plain, &by_file]).await;
    crate::bad_input::assert_line("plaintext", &ran, 1, &["over TLS or to a Unix socket", "use https://127.0.0.1:"]);
    let ran = run_as(&reads[1], &["--token-file=/does/not/exist"]).await;
    crate::bad_input::assert_line("no file", &ran, 1, &["token file /does/not/exist: No such file"]);
}
