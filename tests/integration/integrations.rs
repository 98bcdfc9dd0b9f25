//! Third-party programs, as docs/integrations configures them: copies that read from the apiserver,
//! and copies that read through kubefan. Their views must be equal: when they have started, after
//! [`CHANGES`] changes, and when more copies have joined. The requests at the apiserver are counted
//! by sender, from its own audit log.
//!
//! kubefan runs with TLS and asks the apiserver for the rights of its callers, as the chart
//! installs it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;
use tempfile::TempDir;

use crate::{
    harness::{
        apiserver::ApiServer,
        audit::Audit,
        kubefan::Kubefan,
        rbac::{self, ServiceAccount},
        wait,
    },
    quiet::Table,
};
use counts::Counts;
use world::World;

mod counts;
pub(crate) mod kopf;
pub(crate) mod operator;
mod pages;
pub(crate) mod prometheus;
pub(crate) mod state_metrics;
mod world;

/// Number of changes that the programs follow.
const CHANGES: usize = 500;
/// Number of copies of a program that read from one server at the end.
const COPIES: usize = 3;

/// Time limit of steps that take seconds on an idle machine.
const SETTLED_AT_MOST: Duration = Duration::from_secs(120);

/// A program's view, as lines.
type View = BTreeSet<String>;

/// One server, and the service account that a program has there.
struct Server {
    /// The URL, such as `https://127.0.0.1:6443`.
    url: String,
    account: &'static str,
    token: String,
    token_file: PathBuf,
    ca_file: PathBuf,
    /// The kubeconfig of the pages, for this server.
    kubeconfig: PathBuf,
}

/// An apiserver with objects, and a kubefan in front of it.
struct Setting {
    world: World,
    audit: Audit,
    direct: Server,
    through: Server,
    kubefan: Kubefan,
    dir: TempDir,
}

impl Setting {
    /// Starts both. kubefan caches the resources of a page, and nothing on demand.
    async fn start(page: &str) -> Setting {
        let audit = Audit::of_all();
        let api = ApiServer::start(audit.options()).await;
        Setting::with(api, audit, page).await
    }

    /// Like [`Self::start`], with an apiserver that runs already.
    async fn with(api: ApiServer, audit: Audit, page: &str) -> Setting {
        let resources = &pages::resources(page);
        let world = World::create(api).await;
        let api = &world.api;
        let (certificate, key) = api.server_certificate();
        let paths = [certificate, key].map(|path| path.display().to_string());
        let args = ["--tls-cert-file", &paths[0], "--tls-private-key-file", &paths[1], "--resource", resources];
        // The tests count the lists of kubefan, and a self-check is one.
        let quiet = ["--access=authorized", "--on-demand=false", "tuning.selfCheckInterval=0s"];
        let args = [&args[..], &quiet].concat();
        let kubefan = Kubefan::start(api, &args).await;
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let direct = Server::of(api, api.url(), "direct", dir.path()).await;
        let through = Server::of(api, &format!("https://{}", kubefan.grpc_addr), "through", dir.path()).await;
        Setting { world, audit, direct, through, kubefan, dir }
    }

    async fn counts(&self) -> Counts {
        let requests = self.audit.requests("");
        // These are read after the requests that they excuse.
        let unproved = self.kubefan.unproved_resources().await;
        let restarts = self.kubefan.metric_sum("kubefan_upstream_watch_restarts_total", "").await;
        let restarts = restarts.expect("metrics are served") as usize;
        Counts { unproved, restarts, ..Counts::of(&requests, &self.direct, &self.through) }
    }

    /// A new file in the directory of this test.
    fn file(&self, prefix: &str) -> PathBuf {
        self.dir.path().join(self.world.api.unique(prefix))
    }
}

impl Server {
    async fn of(api: &ApiServer, url: &str, name: &'static str, dir: &Path) -> Server {
        let account = ServiceAccount::create(api, "default", name).await;
        let all = json!([{ "apiGroups": ["*"], "resources": ["*"], "verbs": ["*"] }]);
        rbac::grant(api, None, name, &all, &account.subject()).await;
        let [token_file, kubeconfig] = ["token", "kubeconfig"].map(|file| dir.join(format!("{name}-{file}")));
        let token = account.token().await;
        let ca_file = api.ca_pem_path();
        fs::write(&token_file, &token).unwrap();
        let server = Server { url: url.to_owned(), account: name, token, token_file, ca_file, kubeconfig };
        fs::write(&server.kubeconfig, server.configured(&pages::kubeconfig())).unwrap();
        server
    }

    /// A text of the pages, with this server, its CA and the token of the account.
    fn configured(&self, text: &str) -> String {
        let files = [(pages::CA_FILE, &self.ca_file), (pages::TOKEN_FILE, &self.token_file)];
        let text = text.replace(pages::SERVER, &self.url);
        let text = files.iter().fold(text, |text, (page, file)| text.replace(page, &file.display().to_string()));
        text.replace(pages::KUBECONFIG, &self.kubeconfig.display().to_string())
    }

    /// The name of the service account in the audit log.
    fn user(&self) -> String {
        format!("system:serviceaccount:default:{}", self.account)
    }
}

/// A running copy of a program.
trait Program {
    /// The current view; `None` if it has not started yet.
    async fn view(&self) -> Option<View>;

    /// The last change of each object in a view, as [`World::marks`] has them.
    fn marks(view: &View) -> View;

    /// Output of the program.
    fn log(&self) -> String;
}

/// Compares copies of a program at the three times. `kinds` are the kinds of objects that it shows.
/// Returns the requests before and after more copies joined.
async fn compare<C: Program>(
    program: &str,
    setting: &mut Setting,
    kinds: &[&str],
    start: impl AsyncFn(&Setting, &Server) -> C,
) -> [Counts; 2] {
    let title = format!("{program}: requests at the apiserver, and lines that it shows");
    let mut table = Table::new(title, &counts::COLUMNS);
    let mut copies = [vec![start(setting, &setting.direct).await], vec![start(setting, &setting.through).await]];
    let lines = settle(setting, kinds, &copies).await;
    setting.counts().await.rows(&mut table, "started", 1, lines);

    setting.world.change(CHANGES).await;
    let lines = settle(setting, kinds, &copies).await;
    let one = setting.counts().await;
    one.rows(&mut table, &format!("after {CHANGES} changes"), 1, lines);

    for _ in 1..COPIES {
        copies[0].push(start(setting, &setting.direct).await);
        copies[1].push(start(setting, &setting.through).await);
    }
    let lines = settle(setting, kinds, &copies).await;
    let all = setting.counts().await;
    all.rows(&mut table, "more copies started", COPIES, lines);
    println!("{table}");
    all.assert_only_direct_copies_cost(&one, &[]);
    [one, all]
}

/// Waits until all copies show the same, with the last change of each object. Returns the number of
/// lines.
async fn settle<C: Program>(setting: &Setting, kinds: &[&str], copies: &[Vec<C>; 2]) -> usize {
    let wanted = setting.world.marks(kinds);
    let equal = wait::try_until(SETTLED_AT_MOST, || async {
        let views = views(copies).await.into_iter().collect::<Option<Vec<_>>>()?;
        let first = &views[0];
        (views.iter().all(|view| view == first) && C::marks(first) == wanted).then_some(first.len())
    });
    if let Some(lines) = equal.await {
        return lines;
    }
    let last: Vec<View> = views(copies).await.into_iter().map(Option::unwrap_or_default).collect();
    for (view, copy) in last.iter().zip(copies.iter().flatten()) {
        let marks = C::marks(view);
        let first = &last[0];
        let log = copy.log();
        let end: Vec<_> = log.lines().rev().take(10).collect();
        println!(
            "{} lines\nwithout the changes {:?}\nunlike the first copy {:?}\nprinted {end:#?}",
            view.len(),
            wanted.symmetric_difference(&marks).take(5).collect::<Vec<_>>(),
            view.symmetric_difference(first).take(5).collect::<Vec<_>>(),
        );
    }
    panic!("the copies do not show the same");
}

async fn views<C: Program>(copies: &[Vec<C>; 2]) -> Vec<Option<View>> {
    let mut views = Vec::new();
    for copy in copies.iter().flatten() {
        views.push(copy.view().await);
    }
    views
}
