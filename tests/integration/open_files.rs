//! kubefan with few file descriptors: idle clients of one port must not use up those of the other.

use tokio::net::TcpStream;

use crate::harness::{
    kubefan::Kubefan,
    record::{Watch, connect},
    rig::target,
    simulated::Simulated,
    tests, wait,
};

tests! {
    local: idle_clients_of_one_port_do_not_close_the_other, the_limit_of_open_files_is_raised_to_its_maximum;
}

/// More than the descriptors that kubefan has.
const CROWD: usize = 300;

/// Starts kubefan with a limit of open files: arguments of the shell's `ulimit`.
async fn limited(simulated: &Simulated, limit: &str) -> Kubefan {
    let shell = format!("ulimit {limit}");
    let kubefan = Kubefan::spawn_after(&simulated.kubeconfig(), &shell, &["--resource=pods"]).await;
    kubefan.ready().await;
    kubefan
}

/// Connects without sending anything.
async fn crowd(address: std::net::SocketAddr) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    for _ in 0..CROWD {
        clients.push(TcpStream::connect(address).await.unwrap());
    }
    clients
}

async fn assert_alive(kubefan: &Kubefan) {
    let answer = wait::until("an answer of the admin port", wait::SOON, || kubefan.admin("/livez")).await;
    assert_eq!((answer.0.as_u16(), answer.1.as_str()), (200, "ok"));
}

async fn idle_clients_of_one_port_do_not_close_the_other() {
    let simulated = Simulated::start().await;
    let kubefan = limited(&simulated, "-n 256").await;
    let idle = crowd(kubefan.admin_addr).await;
    assert_alive(&kubefan).await;
    let mut watch = wait::until("a watch", wait::SOON, || async {
        Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.ok()
    })
    .await;
    watch.until_resumable().await;
    drop(idle);

    let idle = crowd(kubefan.grpc_addr).await;
    assert_alive(&kubefan).await;
    // The kernel completes the connections before kubefan accepts or refuses them.
    wait::until("refused connections, counted and logged", wait::SOON, || async {
        let refused = kubefan.metric(r#"kubefan_connections_finished_total{reason="refused"}"#).await?;
        (refused > 0.0 && kubefan.process.log().contains("too many connections")).then_some(())
    })
    .await;
    watch.until(simulated.stage("a", "later")).await;
    drop(idle);
}

async fn the_limit_of_open_files_is_raised_to_its_maximum() {
    let simulated = Simulated::start().await;
    let kubefan = limited(&simulated, "-S -n 256 && ulimit -H -n 512").await;
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    assert!(metrics.contains("process_max_fds 512\n"), "{metrics}");
    assert!(kubefan.process.log().contains("open_files=512"), "{}", kubefan.process.log());
}
