//! The group "ports": whether each address can be bound. TCP addresses are bound for a moment;
//! files of Unix sockets are only looked at.

use std::{io, net::SocketAddr, path::Path};

use tokio::net::UnixStream;

use kubefan_app::config::{ListenAddress, ServeConfig};
use kubefan_server::transport::listen::listen_tcp;

use super::{
    report::{Finding, Report},
    socket_owner::{Owner, of_port},
};

/// Checks the addresses that `serve` would listen on.
pub(super) async fn check(config: &ServeConfig, report: &mut Report) {
    report.group("ports");
    let data = &config.serving.listen;
    let admin = &config.serving.admin_listen;
    let all =
        [("--listen", Some(data)), ("--admin-listen", Some(admin)), ("--peer-listen", config.peer.listen.as_ref())];
    let given: Vec<_> = all.into_iter().filter_map(|(flag, address)| Some((flag, address?))).collect();
    for (index, (flag, address)) in given.iter().copied().enumerate() {
        if let Some((other, _)) = given[..index].iter().find(|(_, other)| *other == address && !is_any_port(address)) {
            report.add(Finding::error(flag, format!("{address} is the address of {other}"), "choose another address"));
            continue;
        }
        report.add(match address {
            ListenAddress::Tcp(tcp) => judge_tcp(flag, *tcp, listen_tcp(*tcp).map(|_| ()), of_port(tcp.port())),
            ListenAddress::Unix(path) => judge_unix(flag, path, UnixStream::connect(path).await.is_ok()),
        });
    }
}

/// Whether the system chooses the port.
fn is_any_port(address: &ListenAddress) -> bool {
    matches!(address, ListenAddress::Tcp(tcp) if tcp.port() == 0)
}

/// Judges a port. `bound` is the attempt to bind, `owner` the process that has the port.
fn judge_tcp(flag: &str, address: SocketAddr, bound: io::Result<()>, owner: Option<Owner>) -> Finding {
    let error = match bound {
        Ok(()) => return Finding::ok(flag, format!("{address} can be bound")),
        Err(error) => error,
    };
    match (error.kind(), owner) {
        (io::ErrorKind::AddrInUse, Some(Owner { name, pid })) if name == "kubefan" => Finding::warning(
            flag,
            format!("{address} is in use by a kubefan that runs (process {pid})"),
            "nothing to do if this configuration is to take its place, otherwise choose another address",
        ),
        (io::ErrorKind::AddrInUse, Some(Owner { name, pid })) => {
            Finding::error(flag, format!("{address} is in use by {name} (process {pid})"), "choose another address")
        }
        (io::ErrorKind::AddrInUse, None) => {
            Finding::error(flag, format!("{address} is in use by another process"), "choose another address")
        }
        (io::ErrorKind::AddrNotAvailable, _) => Finding::error(
            flag,
            format!("this machine does not have the address {}", address.ip()),
            format!("listen on one that it has, or on all (:{})", address.port()),
        ),
        (io::ErrorKind::PermissionDenied, _) => {
            Finding::error(flag, format!("{address} needs a privilege"), "choose a port above 1023")
        }
        _ => Finding::error(flag, format!("{address} cannot be bound: {error}"), "choose another address"),
    }
}

/// `is_served`: a process listens on the socket.
fn judge_unix(flag: &str, path: &Path, is_served: bool) -> Finding {
    let shown = format!("unix:{}", path.display());
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if is_served {
        let remedy =
            "nothing to do if this configuration is to take the place of that process, otherwise choose another path";
        return Finding::warning(flag, format!("another process listens on {shown}"), remedy);
    }
    match directory.metadata() {
        Ok(found) if !found.is_dir() => {
            Finding::error(flag, format!("{} is no directory", directory.display()), "choose another path")
        }
        Ok(found) if found.permissions().readonly() => Finding::error(
            flag,
            format!("{} cannot be written", directory.display()),
            "choose a directory that kubefan may write to",
        ),
        Ok(_) => Finding::ok(flag, format!("{shown} can be created")),
        Err(error) => Finding::error(
            flag,
            format!("the directory {} cannot be used: {error}", directory.display()),
            "create it first",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::*;

    #[test]
    fn a_port_in_use_names_who_has_it() {
        let address = "127.0.0.1:7443".parse().unwrap();
        let judged = |error: Option<io::ErrorKind>, owner: Option<&str>| {
            let owner = owner.map(|name| Owner { name: name.to_owned(), pid: 7 });
            judge_tcp("--listen", address, error.map_or(Ok(()), |kind| Err(kind.into())), owner)
        };
        let in_use = Some(io::ErrorKind::AddrInUse);
        let cases = [
            (judged(None, None), Outcome::Ok, "can be bound"),
            (judged(in_use, Some("kubefan")), Outcome::Warning, "in use by a kubefan that runs (process 7)"),
            (judged(in_use, Some("nginx")), Outcome::Error, "in use by nginx (process 7)"),
            (judged(in_use, None), Outcome::Error, "in use by another process"),
            (
                judged(Some(io::ErrorKind::AddrNotAvailable), None),
                Outcome::Error,
                "does not have the address 127.0.0.1",
            ),
            (judged(Some(io::ErrorKind::PermissionDenied), None), Outcome::Error, "needs a privilege"),
        ];
        for (finding, outcome, text) in cases {
            assert_eq!(finding.result, outcome, "{finding:?}");
            assert!(finding.message.contains(text), "{finding:?}");
        }
    }

    #[test]
    fn a_socket_needs_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubefan.sock");
        assert_eq!(judge_unix("--listen", &path, false).result, Outcome::Ok);
        assert_eq!(judge_unix("--listen", &path, true).result, Outcome::Warning);
        let missing = judge_unix("--listen", &dir.path().join("none/kubefan.sock"), false);
        assert_eq!((missing.result, missing.remedy.as_str()), (Outcome::Error, "create it first"));
    }
}
