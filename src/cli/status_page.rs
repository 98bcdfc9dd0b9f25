//! `kubefan status-page`: serves the status page of a running kubefan on loopback, with the
//! caller's credentials. A browser sends no token, and the admin port of a cluster wants one.

use std::{
    io::{Write, stdout},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use clap::Args;
use tokio::net::TcpListener;

use super::{
    admin::{Admin, AdminArgs},
    error::CliError,
};

/// Serve the status page of a running kubefan for a browser on this machine
///
/// Forwards GET requests to the admin port, with your credentials. Other users of this machine can
/// open the page too, as with `kubectl proxy`. Ends with ctrl-C.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  # A replica in a cluster whose admin port authorizes its callers
  kubectl -n kubefan port-forward POD 7444 &
  kubefan status-page --admin https://127.0.0.1:7444 --ca-file ca.crt --tls-server-name kubefan.kubefan.svc --token-file token")]
pub(super) struct StatusPageArgs {
    /// The port on 127.0.0.1; with 0 the system chooses one
    #[arg(short, long, value_name = "PORT", default_value_t = 7446)]
    port: u16,

    #[command(flatten)]
    admin: AdminArgs,
}

pub(super) async fn run(args: StatusPageArgs) -> Result<(), CliError> {
    let admin = args.admin.connect().await.map_err(CliError::Plain)?;
    // A wrong address or token ends the command here. The page would stay empty.
    admin.get("/", &[]).await.map_err(CliError::Plain)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    let unusable = |error| CliError::Plain(format!("--port {}: {error}", args.port));
    let listener = TcpListener::bind(address).await.map_err(unusable)?;
    let port = listener.local_addr()?.port();
    writeln!(stdout(), "http://127.0.0.1:{port}/ shows the status page, until ctrl-C")?;
    let forward = Arc::new(Forward { admin, hosts: ["127.0.0.1", "localhost"].map(|host| format!("{host}:{port}")) });
    let routes = Router::new().fallback(answer).with_state(forward);
    Ok(axum::serve(listener, routes).await?)
}

struct Forward {
    admin: Admin,
    /// The names of this server. A page whose own name was made to lead here has another one.
    hosts: [String; 2],
}

async fn answer(State(forward): State<Arc<Forward>>, request: Request) -> Response {
    if request.method() != Method::GET {
        return (StatusCode::METHOD_NOT_ALLOWED, "only GET\n").into_response();
    }
    if !forward.knows(request.headers()) {
        let [name, _] = &forward.hosts;
        return (StatusCode::FORBIDDEN, format!("open http://{name}/\n")).into_response();
    }
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    match forward.admin.fetch(target).await {
        Ok(answer) => {
            let kept = [header::CONTENT_TYPE, header::CONTENT_SECURITY_POLICY, header::CACHE_CONTROL];
            let mut response = Response::builder().status(answer.status());
            for name in kept {
                if let Some(value) = answer.headers().get(&name) {
                    response = response.header(name, value);
                }
            }
            let body = Body::from_stream(answer.bytes_stream());
            response.body(body).unwrap_or_else(|_| StatusCode::BAD_GATEWAY.into_response())
        }
        Err(problem) => (StatusCode::BAD_GATEWAY, problem + "\n").into_response(),
    }
}

impl Forward {
    fn knows(&self, headers: &HeaderMap) -> bool {
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        host.is_some_and(|host| self.hosts.iter().any(|own| own == host))
    }
}
