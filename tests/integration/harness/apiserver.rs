//! A real control plane on loopback: etcd and kube-apiserver with TLS, RBAC, several users and the key for service accounts'
//! tokens, up in about 4 seconds. Most tests share one, each in a namespace of its own; a test that kills, restarts or compacts
//! has one to itself, so that no test can disturb another.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use tempfile::{NamedTempFile, TempDir};

use super::{
    assets,
    pki::{self, Authority},
    process::{Process, free_port},
    wait,
};

/// The user that may do everything; the helpers act as this one.
pub(crate) const ADMIN: &str = "admin";
/// A user without any role of its own, for a test to bind one to.
pub(crate) const READER: &str = "reader";
/// A user that no test binds a role to.
pub(crate) const NOBODY: &str = "nobody";

const READY_AT_MOST: Duration = Duration::from_secs(90);

/// How a control plane is started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    apiserver_flags: Vec<String>,
}

impl Options {
    /// Adds a flag of kube-apiserver, such as `--feature-gates=WatchList=false`.
    pub(crate) fn flag(mut self, flag: &str) -> Options {
        self.apiserver_flags.push(flag.to_owned());
        self
    }
}

/// A handle to a running control plane. The last handle of a private one ends it.
pub(crate) struct ApiServer {
    plane: Arc<ControlPlane>,
    pub(super) http: reqwest::Client,
}

static SHARED: tokio::sync::Mutex<Option<Result<Arc<ControlPlane>, String>>> = tokio::sync::Mutex::const_new(None);

/// Ends the shared control plane; called when all tests have run.
pub(super) fn end_shared() {
    SHARED.blocking_lock().take();
}

impl ApiServer {
    /// Starts a control plane that the caller has to itself.
    pub(crate) async fn start(options: Options) -> ApiServer {
        ApiServer::with(Arc::new(ControlPlane::start(options, false).await.unwrap_or_else(|error| panic!("{error}"))))
    }

    /// The control plane that tests share, started by the first that asks. Make a [`namespace`](Self::namespace) of your own.
    pub(crate) async fn shared() -> ApiServer {
        let mut shared = SHARED.lock().await;
        if shared.is_none() {
            *shared = Some(ControlPlane::start(Options::default(), true).await.map(Arc::new));
        }
        match shared.as_ref().expect("it was just set") {
            Ok(plane) => ApiServer::with(plane.clone()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Each handle has connections of its own: they end with the runtime of the test that made them.
    fn with(plane: Arc<ControlPlane>) -> ApiServer {
        let http = plane.client(&token_of(ADMIN));
        ApiServer { plane, http }
    }

    /// Another handle, with connections of its own.
    pub(crate) fn handle(&self) -> ApiServer {
        ApiServer::with(self.plane.clone())
    }

    /// Such as `https://127.0.0.1:20001`.
    pub(crate) fn url(&self) -> &str {
        &self.plane.url
    }

    /// Of kube-apiserver.
    pub(crate) fn pid(&self) -> u32 {
        self.plane.apiserver.lock().unwrap().as_ref().expect("it runs").pid()
    }

    /// The file with the certificate of the authority that signed the apiserver's one.
    pub(crate) fn ca_pem_path(&self) -> PathBuf {
        self.plane.path("ca.pem")
    }

    /// A certificate for a server on loopback that whoever trusts the apiserver trusts too, and its private key.
    pub(crate) fn server_certificate(&self) -> (PathBuf, PathBuf) {
        (self.plane.path("server.pem"), self.plane.path("server-key.pem"))
    }

    /// The bearer token of the administrator.
    pub(crate) fn admin_token(&self) -> String {
        token_of(ADMIN)
    }

    /// An HTTP client that trusts the apiserver and is the administrator.
    pub(crate) fn client(&self) -> reqwest::Client {
        self.http.clone()
    }

    /// The same for another user.
    pub(crate) fn client_as(&self, user: &str) -> reqwest::Client {
        self.plane.client(&token_of(user))
    }

    /// The same with any bearer token, such as a service account's.
    pub(crate) fn client_with_token(&self, token: &str) -> reqwest::Client {
        self.plane.client(token)
    }

    /// A kubeconfig of the administrator.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig_for(ADMIN)
    }

    /// A kubeconfig of one of the users, by token.
    pub(crate) fn kubeconfig_for(&self, user: &str) -> PathBuf {
        self.kubeconfig_with_token(user, &token_of(user))
    }

    /// A kubeconfig with any bearer token, such as a service account's.
    pub(crate) fn kubeconfig_with_token(&self, user: &str, token: &str) -> PathBuf {
        self.plane.write_kubeconfig(user, &format!("{{ token: {token} }}"))
    }

    /// A kubeconfig of the administrator, by token, for another server that has the certificate above.
    pub(crate) fn kubeconfig_to(&self, server: &str) -> PathBuf {
        let name = self.unique("elsewhere");
        self.plane.write_kubeconfig_to(server, &name, &format!("{{ token: {} }}", token_of(ADMIN)))
    }

    /// A kubeconfig with a client certificate that the apiserver reads as this user and group.
    pub(crate) fn kubeconfig_with_certificate(&self, user: &str, group: &str) -> PathBuf {
        let (certificate, key) = self.plane.authority.client(user, group);
        let (certificate_path, key_path) =
            (self.plane.path(&format!("{user}.pem")), self.plane.path(&format!("{user}-key.pem")));
        fs::write(&certificate_path, certificate).expect("the certificate is written");
        fs::write(&key_path, key).expect("the key is written");
        let entry =
            format!("{{ client-certificate: {}, client-key: {} }}", certificate_path.display(), key_path.display());
        self.plane.write_kubeconfig(&format!("{user}-certificate"), &entry)
    }

    /// Kills kube-apiserver with SIGKILL; etcd keeps the data.
    pub(crate) fn kill9(&self) {
        self.plane.assert_private("kill9");
        self.plane.apiserver.lock().unwrap().take();
    }

    /// Starts kube-apiserver again at the same address, with the same data, and waits until it is ready.
    pub(crate) async fn restart(&self) {
        self.plane.assert_private("restart");
        // The guard is not held across the wait, and the old process has to be gone before its port is free.
        self.plane.apiserver.lock().unwrap().take();
        let apiserver = self.plane.spawn_apiserver();
        *self.plane.apiserver.lock().unwrap() = Some(apiserver);
        self.plane.ready().await.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Makes etcd forget every version below `revision` (a resourceVersion is etcd's revision).
    pub(crate) async fn compact_etcd(&self, revision: u64) {
        self.plane.assert_private("compact_etcd");
        let url = format!("http://127.0.0.1:{}/v3/kv/compaction", self.plane.etcd_port);
        let body = format!(r#"{{"revision":"{revision}","physical":true}}"#);
        let response = reqwest::Client::new().post(url).body(body).send().await.expect("etcd answers");
        let status = response.status();
        assert!(status.is_success(), "etcd compacts: {status} {}", response.text().await.unwrap_or_default());
    }

    /// Runs kubectl as the administrator and returns what it printed; panics when it fails.
    pub(crate) async fn kubectl(&self, args: &[&str]) -> String {
        let (ok, stdout, stderr) = self.try_kubectl(&self.kubeconfig(), args).await;
        assert!(ok, "kubectl {}: {stderr}{stdout}", args.join(" "));
        stdout
    }

    /// Runs kubectl with a kubeconfig: (whether it succeeded, stdout, stderr).
    pub(crate) async fn try_kubectl(&self, kubeconfig: &Path, args: &[&str]) -> (bool, String, String) {
        let output = tokio::process::Command::new(&assets::get().expect("kubectl is there").kubectl)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--cache-dir", self.plane.path("kubectl-cache").to_str().expect("the path is text")])
            .args(args)
            .kill_on_drop(true)
            .output()
            .await
            .expect("kubectl starts");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (output.status.success(), text(output.stdout), text(output.stderr))
    }

    /// A name that no other test uses: `prefix` and a number.
    pub(crate) fn unique(&self, prefix: &str) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        format!("{prefix}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The processes and files behind the handles.
struct ControlPlane {
    // Dropped in this order: the apiserver before its etcd, the directory last.
    apiserver: Mutex<Option<Process>>,
    _etcd: Process,
    shared: bool,
    url: String,
    port: u16,
    etcd_port: u16,
    options: Options,
    authority: Authority,
    dir: TempDir,
}

impl ControlPlane {
    async fn start(options: Options, shared: bool) -> Result<ControlPlane, String> {
        let dir = tempfile::Builder::new()
            .prefix("control-plane-")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))
            .map_err(|error| format!("{} takes no directory: {error}", env!("CARGO_TARGET_TMPDIR")))?;
        let authority = Authority::new();
        pki::write_server_files(&authority, dir.path());
        let users = [(ADMIN, "system:masters"), (READER, "readers"), (NOBODY, "nobodies")]
            .map(|(user, group)| format!("{},{user},{user},\"{group}\"\n", token_of(user)));
        fs::write(dir.path().join("users.csv"), users.concat()).map_err(|error| error.to_string())?;

        let (etcd_port, port) = (free_port(), free_port());
        let plane = ControlPlane {
            apiserver: Mutex::new(None),
            _etcd: spawn_etcd(dir.path(), etcd_port)?,
            shared,
            url: format!("https://127.0.0.1:{port}"),
            port,
            etcd_port,
            options,
            authority,
            dir,
        };
        // kube-apiserver waits for its etcd by itself.
        *plane.apiserver.lock().unwrap() = Some(plane.spawn_apiserver());
        plane.ready().await?;
        Ok(plane)
    }

    fn spawn_apiserver(&self) -> Process {
        let file = |flag: &str, name: &str| format!("--{flag}={}", self.path(name).display());
        let mut command = Command::new(&assets::get().expect("the programs were found before").kube_apiserver);
        command
            .args([
                format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
                format!("--secure-port={}", self.port),
                file("cert-dir", "certs"),
                file("client-ca-file", "ca.pem"),
                file("tls-cert-file", "server.pem"),
                file("tls-private-key-file", "server-key.pem"),
                file("token-auth-file", "users.csv"),
                file("service-account-key-file", "service-account.pub"),
                file("service-account-signing-key-file", "service-account.key"),
            ])
            .args([
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.0.0.0/24",
                // No controller makes the default service account, without which this plugin admits no pod.
                "--disable-admission-plugins=ServiceAccount",
            ])
            .args(&self.options.apiserver_flags);
        Process::spawn("kube-apiserver", &mut command, &self.path("kube-apiserver.log"))
    }

    async fn ready(&self) -> Result<(), String> {
        let client = self.client(&token_of(ADMIN));
        let url = format!("{}/readyz", self.url);
        let ended = || self.apiserver.lock().unwrap().as_mut().and_then(Process::exited);
        let outcome = wait::try_until(READY_AT_MOST, || async {
            if let Some(status) = ended() {
                return Some(Err(format!("ended with {status}")));
            }
            let response = client.get(&url).send().await.ok()?;
            response.status().is_success().then_some(Ok(()))
        })
        .await
        .unwrap_or_else(|| Err(format!("was not ready after {} s", READY_AT_MOST.as_secs())));
        outcome.map_err(|why| {
            let log = fs::read_to_string(self.path("kube-apiserver.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            format!("kube-apiserver {why}; the end of its log:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
        })
    }

    fn client(&self, token: &str) -> reqwest::Client {
        let ca = reqwest::Certificate::from_pem(self.authority.ca_pem.as_bytes()).expect("the authority is PEM");
        let mut bearer = HeaderValue::try_from(format!("Bearer {token}")).expect("a token is ASCII");
        bearer.set_sensitive(true);
        reqwest::Client::builder()
            .tls_certs_only([ca])
            .no_proxy()
            .default_headers(HeaderMap::from_iter([(AUTHORIZATION, bearer)]))
            .build()
            .expect("a client is built")
    }

    fn write_kubeconfig(&self, name: &str, user: &str) -> PathBuf {
        self.write_kubeconfig_to(&self.url, name, user)
    }

    fn write_kubeconfig_to(&self, server: &str, name: &str, user: &str) -> PathBuf {
        let path = self.path(&format!("{name}.kubeconfig"));
        let ca = self.path("ca.pem");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters: [{{ name: test, cluster: {{ server: '{server}', certificate-authority: '{}' }} }}]\n\
             contexts: [{{ name: test, context: {{ cluster: test, user: {name} }} }}]\n\
             users: [{{ name: {name}, user: {user} }}]\n",
            ca.display()
        );
        // In one step: another test's kubectl may be reading the file of the same name.
        let mut file = NamedTempFile::new_in(self.dir.path()).expect("a file is made");
        file.write_all(text.as_bytes()).expect("the kubeconfig is written");
        file.persist(&path).expect("the kubeconfig is put in place");
        path
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn assert_private(&self, what: &str) {
        assert!(!self.shared, "{what} would disturb the other tests: start a control plane of your own");
    }
}

fn spawn_etcd(dir: &Path, port: u16) -> Result<Process, String> {
    let client_url = format!("http://127.0.0.1:{port}");
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let mut command = Command::new(&assets::get()?.etcd);
    command.args([
        format!("--data-dir={}", dir.join("etcd").display()),
        format!("--listen-client-urls={client_url}"),
        format!("--advertise-client-urls={client_url}"),
        format!("--listen-peer-urls={peer_url}"),
        format!("--initial-advertise-peer-urls={peer_url}"),
        format!("--initial-cluster=default={peer_url}"),
        // The data need not survive the machine.
        "--unsafe-no-fsync".to_owned(),
        "--log-level=warn".to_owned(),
    ]);
    Ok(Process::spawn("etcd", &mut command, &dir.join("etcd.log")))
}

fn token_of(user: &str) -> String {
    format!("token-of-{user}")
}
