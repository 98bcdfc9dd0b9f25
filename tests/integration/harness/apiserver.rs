//! A real control plane on loopback: etcd and kube-apiserver with TLS, RBAC, several users and a
//! signing key for service account tokens. It starts in about 4 seconds. Most tests share one
//! control plane and use their own namespaces. A test that kills, restarts or compacts it starts a
//! private one, so that no test can disturb another.

use std::{
    fs,
    io::Write,
    net::SocketAddr,
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
    pki::{self, Authority, IssuedPem},
    process::{Process, free_port},
    secrets, wait,
};

/// A user with all permissions. The helpers act as this user.
pub(crate) const ADMIN: &str = "admin";
/// A user without a role. Tests bind roles to it.
pub(crate) const READER: &str = "reader";
/// A user that never gets a role.
pub(crate) const NOBODY: &str = "nobody";

const READY_AT_MOST: Duration = Duration::from_secs(300);
/// The limit of one request to /readyz. Only the next one sees that a program has exited.
const ASKED_AT_MOST: Duration = Duration::from_secs(10);
const STOPPED_AT_MOST: Duration = Duration::from_secs(90);

/// Options for starting a control plane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    apiserver_flags: Vec<String>,
    /// kube-apiserver of another release.
    program: Option<PathBuf>,
}

impl Options {
    /// Adds a flag of kube-apiserver, such as `--feature-gates=WatchList=false`.
    pub(crate) fn flag(mut self, flag: &str) -> Options {
        self.apiserver_flags.push(flag.to_owned());
        self
    }

    /// Runs this kube-apiserver instead of the usual one.
    pub(crate) fn program(mut self, program: PathBuf) -> Options {
        self.program = Some(program);
        self
    }
}

/// A handle to a running control plane. A private control plane stops when its last handle is
/// dropped.
pub(crate) struct ApiServer {
    plane: Arc<ControlPlane>,
    pub(super) http: reqwest::Client,
}

static SHARED: tokio::sync::Mutex<Option<Result<Arc<ControlPlane>, String>>> = tokio::sync::Mutex::const_new(None);

/// Stops the shared control plane, after all tests have run.
pub(super) fn end_shared() {
    SHARED.blocking_lock().take();
}

impl ApiServer {
    /// Starts a control plane for the caller alone.
    pub(crate) async fn start(options: Options) -> ApiServer {
        ApiServer::with(Arc::new(ControlPlane::start(options, false).await.unwrap_or_else(|error| panic!("{error}"))))
    }

    /// The control plane that tests share. The first caller starts it. Create your own
    /// [`namespace`](Self::namespace) in it.
    pub(crate) async fn shared() -> ApiServer {
        let mut shared = SHARED.lock().await;
        if shared.is_none() {
            *shared = Some(ControlPlane::start(Options::default(), true).await.map(Arc::new));
        }
        match shared.as_ref().expect("the control plane was just started") {
            Ok(plane) => ApiServer::with(plane.clone()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Each handle has its own connections, because they end with the runtime of the test that made
    /// them.
    fn with(plane: Arc<ControlPlane>) -> ApiServer {
        let http = plane.client(&token_of(ADMIN));
        ApiServer { plane, http }
    }

    /// Another handle, with its own connections.
    pub(crate) fn handle(&self) -> ApiServer {
        ApiServer::with(self.plane.clone())
    }

    /// The URL, such as `https://127.0.0.1:20001`.
    pub(crate) fn url(&self) -> &str {
        &self.plane.url
    }

    /// The process ID of kube-apiserver.
    pub(crate) fn pid(&self) -> u32 {
        self.plane.apiserver.lock().unwrap().as_ref().expect("kube-apiserver is running").pid()
    }

    /// The file with the CA certificate that signed the apiserver's certificate.
    pub(crate) fn ca_pem_path(&self) -> PathBuf {
        self.plane.path("ca.pem")
    }

    /// The address behind [`Self::url`].
    pub(crate) fn addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.plane.port))
    }

    /// The authority whose client certificates the apiserver accepts.
    pub(crate) fn authority(&self) -> &Authority {
        &self.plane.authority
    }

    /// A server certificate for loopback, signed by the apiserver's CA, and its private key.
    pub(crate) fn server_certificate(&self) -> (PathBuf, PathBuf) {
        (self.plane.path("server.pem"), self.plane.path("server-key.pem"))
    }

    /// kubefan's flags for [`Self::server_certificate`].
    pub(crate) fn tls_flags(&self) -> [String; 2] {
        let (cert, key) = self.server_certificate();
        [format!("--tls-cert-file={}", cert.display()), format!("--tls-private-key-file={}", key.display())]
    }

    /// The administrator's bearer token.
    pub(crate) fn admin_token(&self) -> String {
        token_of(ADMIN)
    }

    /// An HTTP client that trusts the apiserver and authenticates as the administrator.
    pub(crate) fn client(&self) -> reqwest::Client {
        self.http.clone()
    }

    /// An HTTP client that authenticates as another user.
    pub(crate) fn client_as(&self, user: &str) -> reqwest::Client {
        self.plane.client(&token_of(user))
    }

    /// An HTTP client with any bearer token, such as a service account's.
    pub(crate) fn client_with_token(&self, token: &str) -> reqwest::Client {
        self.plane.client(token)
    }

    /// The administrator's kubeconfig.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig_for(ADMIN)
    }

    /// A kubeconfig for one of the users, by token.
    pub(crate) fn kubeconfig_for(&self, user: &str) -> PathBuf {
        self.kubeconfig_with_token(user, &token_of(user))
    }

    /// A kubeconfig with any bearer token, such as a service account's.
    pub(crate) fn kubeconfig_with_token(&self, user: &str, token: &str) -> PathBuf {
        self.plane.write_kubeconfig(user, &format!("{{ token: {token} }}"))
    }

    /// The administrator's kubeconfig, by token, for another server with
    /// [`Self::server_certificate`].
    pub(crate) fn kubeconfig_to(&self, server: &str) -> PathBuf {
        self.kubeconfig_to_with_token(server, &token_of(ADMIN))
    }

    /// Like [`Self::kubeconfig_to`], with any bearer token.
    pub(crate) fn kubeconfig_to_with_token(&self, server: &str, token: &str) -> PathBuf {
        self.plane.write_kubeconfig_to(server, &self.unique("elsewhere"), &format!("{{ token: {token} }}"))
    }

    /// A kubeconfig with a client certificate for this user and group.
    pub(crate) fn kubeconfig_with_certificate(&self, user: &str, group: &str) -> PathBuf {
        let IssuedPem { certificate, key } = self.plane.authority.client(user, group);
        let certificate_path = self.plane.path(&format!("{user}.pem"));
        let key_path = self.plane.path(&format!("{user}-key.pem"));
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

    /// Starts kube-apiserver again at the same address with the same data, and waits until it is
    /// ready.
    pub(crate) async fn restart(&self) {
        self.plane.assert_private("restart");
        // The lock must not be held across the wait. Dropping the old process first frees its port.
        self.plane.apiserver.lock().unwrap().take();
        let apiserver = self.plane.spawn_apiserver(&self.plane.program(), self.plane.port);
        *self.plane.apiserver.lock().unwrap() = Some(apiserver);
        self.plane.ready().await.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Stops kube-apiserver as an upgrade does, and starts another release at the same address with
    /// the same data. Waits until it is ready.
    pub(crate) async fn upgrade(&self, program: &Path) {
        self.plane.assert_private("upgrade");
        self.terminate().await;
        let apiserver = self.plane.spawn_apiserver(program, self.plane.port);
        *self.plane.apiserver.lock().unwrap() = Some(apiserver);
        self.plane.ready().await.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Starts another kube-apiserver beside this one, with the same data and at its own address.
    /// Waits until it is ready.
    pub(crate) async fn start_beside(&self, program: &Path) -> Beside {
        self.plane.assert_private("start_beside");
        let port = free_port();
        let beside = Beside {
            _process: self.plane.spawn_apiserver(program, port),
            addr: SocketAddr::from(([127, 0, 0, 1], port)),
        };
        let url = format!("https://{}", beside.addr);
        let ready = wait::try_until(READY_AT_MOST, || is_ready(&self.http, &url)).await;
        assert!(ready.is_some(), "kube-apiserver at {} was not ready in time", beside.addr);
        beside
    }

    /// Stops kube-apiserver as an upgrade does.
    pub(crate) async fn terminate(&self) {
        self.plane.assert_private("terminate");
        let old = self.plane.apiserver.lock().unwrap().take();
        if let Some(mut old) = old {
            old.terminate();
            old.ended(STOPPED_AT_MOST).await;
        }
    }

    /// Compacts etcd at `revision`: versions below it are gone. A resourceVersion is an etcd
    /// revision.
    pub(crate) async fn compact_etcd(&self, revision: u64) {
        self.plane.assert_private("compact_etcd");
        let url = format!("http://127.0.0.1:{}/v3/kv/compaction", self.plane.etcd_port);
        let body = format!(r#"{{"revision":"{revision}","physical":true}}"#);
        let response = reqwest::Client::new().post(url).body(body).send().await.expect("etcd answers");
        let status = response.status();
        assert!(status.is_success(), "etcd compacts: {status} {}", response.text().await.unwrap_or_default());
    }

    /// Runs kubectl as the administrator and returns its output. Panics if it fails.
    pub(crate) async fn kubectl(&self, args: &[&str]) -> String {
        let (ok, stdout, stderr) = self.try_kubectl(&self.kubeconfig(), args).await;
        assert!(ok, "kubectl {}: {stderr}{stdout}", args.join(" "));
        if args.starts_with(&["create", "token"]) {
            secrets::remember_token(stdout.trim());
        }
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

/// A second kube-apiserver of a control plane. It stops when dropped.
pub(crate) struct Beside {
    _process: Process,
    /// The address it listens on.
    pub(crate) addr: SocketAddr,
}

/// The processes and files behind the handles.
struct ControlPlane {
    // Fields drop in this order: the apiserver before etcd, the directory last.
    apiserver: Mutex<Option<Process>>,
    etcd: Mutex<Process>,
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
            .map_err(|error| format!("cannot create a directory in {}: {error}", env!("CARGO_TARGET_TMPDIR")))?;
        let authority = Authority::new();
        pki::write_server_files(&authority, dir.path());
        let users = [(ADMIN, "system:masters"), (READER, "readers"), (NOBODY, "nobodies")]
            .map(|(user, group)| format!("{},{user},{user},\"{group}\"\n", token_of(user)));
        fs::write(dir.path().join("users.csv"), users.concat()).map_err(|error| error.to_string())?;

        let etcd_port = free_port();
        let port = free_port();
        let plane = ControlPlane {
            apiserver: Mutex::new(None),
            etcd: Mutex::new(spawn_etcd(dir.path(), etcd_port)?),
            shared,
            url: format!("https://127.0.0.1:{port}"),
            port,
            etcd_port,
            options,
            authority,
            dir,
        };
        // kube-apiserver itself waits for etcd.
        *plane.apiserver.lock().unwrap() = Some(plane.spawn_apiserver(&plane.program(), port));
        plane.ready().await?;
        Ok(plane)
    }

    /// The kube-apiserver that the control plane starts with.
    fn program(&self) -> PathBuf {
        let usual = || assets::get().expect("the programs were found before").kube_apiserver.clone();
        self.options.program.clone().unwrap_or_else(usual)
    }

    fn spawn_apiserver(&self, program: &Path, port: u16) -> Process {
        // kube-apiserver takes either of the two flags.
        let is_configured = self.options.apiserver_flags.iter().any(|flag| flag.starts_with("--authorization-config"));
        let file = |flag: &str, name: &str| format!("--{flag}={}", self.path(name).display());
        let mut command = Command::new(program);
        command
            .args([
                format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
                format!("--secure-port={port}"),
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
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.0.0.0/24",
                // No controller creates the default service account, and this plugin rejects pods
                // without it.
                "--disable-admission-plugins=ServiceAccount",
            ])
            .args((!is_configured).then_some("--authorization-mode=RBAC"))
            .args(&self.options.apiserver_flags);
        Process::spawn("kube-apiserver", &mut command, &self.path("kube-apiserver.log"))
    }

    async fn ready(&self) -> Result<(), String> {
        let client = self.client(&token_of(ADMIN));
        let ended = || self.apiserver.lock().unwrap().as_mut().and_then(Process::exited);
        let outcome = wait::try_until(READY_AT_MOST, || async {
            if let Some(status) = ended() {
                return Some(Err(format!("ended with {status}")));
            }
            if let Some(status) = self.etcd.lock().unwrap().exited() {
                let log = fs::read_to_string(self.path("etcd.log")).unwrap_or_default();
                return Some(Err(format!("has no etcd, which ended with {status}: {log}")));
            }
            is_ready(&client, &self.url).await.map(Ok)
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
        // Replaced atomically: another test's kubectl may be reading the file of the same name.
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

async fn is_ready(client: &reqwest::Client, url: &str) -> Option<()> {
    let response = client.get(format!("{url}/readyz")).timeout(ASKED_AT_MOST).send().await.ok()?;
    response.status().is_success().then_some(())
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
        // The data need not survive a crash of the machine.
        "--unsafe-no-fsync".to_owned(),
        "--log-level=warn".to_owned(),
    ]);
    Ok(Process::spawn("etcd", &mut command, &dir.join("etcd.log")))
}

fn token_of(user: &str) -> String {
    format!("token-of-{user}")
}
