//! Calls with a token, against a server that accepts one token at a time.

use std::path::Path;

use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;

use super::*;

/// Like [`serve`], on a Unix socket in `dir`, and with the token file there.
async fn serve_in(dir: &Path, scripts: Vec<Vec<Step>>) -> (Scripted, Client) {
    let server = Scripted { scripts: Arc::new(Mutex::new(scripts.into())), ..Scripted::default() };
    rotate(&server, dir, "first");
    let path = dir.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let service = WatchServiceServer::new(server.clone());
    tokio::spawn(
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(UnixListenerStream::new(listener)),
    );
    let options = ClientOptions { token_file: Some(dir.join("token")), ..ClientOptions::default() };
    (server, Client::connect(&format!("unix:{}", path.display()), &options).await.unwrap())
}

/// The server accepts only `token`, which is now in the file.
fn rotate(server: &Scripted, dir: &Path, token: &str) {
    std::fs::write(dir.join("token"), token).unwrap();
    *server.token.lock().unwrap() = Some(token.to_owned());
}

fn reauthenticate() -> Step {
    let details = ErrorDetails::with_error_info(ErrorReason::Reauthenticate.as_str(), ERROR_DOMAIN, []);
    Err(Status::with_error_details(Code::Unavailable, "the token has expired", details))
}

/// Reads up to the event `name`, and returns the items before it in short form.
async fn up_to(watch: &mut WatchStream, name: &str) -> Vec<String> {
    let mut before = Vec::new();
    loop {
        match watch.next().await.unwrap().unwrap() {
            WatchItem::Event(event) if event.name == name => return before,
            WatchItem::Event(event) => before.push(event.name),
            WatchItem::Disconnected { error, .. } => before.push(format!("{:?}", error.code())),
            WatchItem::Reconnected { from } => before.push(format!("from {from}")),
            other => before.push(format!("{other:?}")),
        }
    }
}

#[tokio::test]
async fn a_watch_resumes_with_the_token_that_the_file_has_by_then() {
    let dir = tempfile::tempdir().unwrap();
    let refused = || Err(Status::unauthenticated("the token has expired"));
    let scripts = vec![
        vec![event("6", "a"), reauthenticate()],
        vec![event("7", "b"), refused()],
        vec![event("8", "c"), drained()],
        vec![event("9", "d")],
    ];
    let (server, client) = serve_in(dir.path(), scripts).await;
    let mut watch = client.watch(Target::default(), options());
    assert!(up_to(&mut watch, "a").await.is_empty());
    rotate(&server, dir.path(), "second");
    assert_eq!(up_to(&mut watch, "b").await, ["Unavailable", "from 6"]);
    rotate(&server, dir.path(), "third");
    assert_eq!(up_to(&mut watch, "c").await, ["Unauthenticated", "from 7"], "in the stream");
    rotate(&server, dir.path(), "fourth");
    assert_eq!(up_to(&mut watch, "d").await, ["Unavailable", "from 8"], "the old token is refused at first");
    assert_eq!(requested(&server), ["", "6", "7", "8"]);
    assert!(!format!("{watch:?} {client:?}").contains("fourth"));
}

#[tokio::test]
async fn a_watch_waits_for_the_next_token_only_if_the_last_one_was_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let (server, client) =
        serve_in(dir.path(), vec![vec![event("6", "a"), reauthenticate()], vec![event("7", "b")]]).await;
    let mut watch = client.watch(Target::default(), options());
    up_to(&mut watch, "a").await;
    *server.token.lock().unwrap() = Some("second".to_owned());
    for code in [Code::Unavailable, Code::Unauthenticated, Code::Unauthenticated] {
        let item = watch.next().await.unwrap().unwrap();
        assert!(matches!(&item, WatchItem::Disconnected { error, .. } if error.code() == code), "{item:?}");
    }
    rotate(&server, dir.path(), "second");
    assert_eq!(up_to(&mut watch, "b").await.last().unwrap(), "from 6");

    *server.token.lock().unwrap() = Some("third".to_owned());
    assert_eq!(received(client.watch(Target::default(), options())).await, ["Unauthenticated"]);
}

#[tokio::test]
async fn a_watch_that_is_forbidden_ends_and_is_not_requested_again() {
    let dir = tempfile::tempdir().unwrap();
    let forbidden = || Err(Status::permission_denied("pods is forbidden"));
    let (server, client) = serve_in(dir.path(), vec![vec![event("6", "a"), forbidden()], vec![forbidden()]]).await;
    assert_eq!(received(client.watch(Target::default(), options())).await, ["a", "PermissionDenied"]);
    assert_eq!(requested(&server).len(), 1);
}

#[tokio::test]
async fn a_call_is_sent_once_more_if_the_file_has_another_token() {
    let dir = tempfile::tempdir().unwrap();
    let (server, client) = serve_in(dir.path(), Vec::new()).await;
    assert_eq!(client.list(Target::default(), "").await.unwrap().objects.len(), 3);
    rotate(&server, dir.path(), "second");
    assert_eq!(client.list(Target::default(), "").await.unwrap().objects.len(), 3);
    *server.token.lock().unwrap() = Some("third".to_owned());
    assert_eq!(client.list(Target::default(), "").await.unwrap_err().code(), Code::Unauthenticated);
}

#[tokio::test]
async fn no_token_is_sent_where_others_could_read_it() {
    let token = ClientOptions { token: Some("very-secret".to_owned()), ..ClientOptions::default() };
    let file = ClientOptions { token_file: Some("/does/not/exist".into()), ..ClientOptions::default() };
    for address in ["127.0.0.1:7443", "http://127.0.0.1:7443", "dns:127.0.0.1:7443"] {
        for options in [&token, &file] {
            let error = Client::connect_lazy(address, options).await.unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, ClientError::Address { .. }) && !text.contains("secret"), "{text}");
            assert!(text.contains("use https://127.0.0.1:7443 (kubefan serve --tls-cert-file)"), "{text}");
        }
    }
    for address in ["https://127.0.0.1:7443", "unix:/run/kubefan.sock"] {
        let client = Client::connect_lazy(address, &token).await.unwrap();
        assert!(!format!("{client:?} {token:?}").contains("secret"));
    }
    let error = Client::connect("unix:/run/kubefan.sock", &file).await.unwrap_err().to_string();
    assert!(error.contains("token file /does/not/exist: No such file"), "{error}");
}
