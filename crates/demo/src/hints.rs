//! Commands to try from another terminal while the demo runs. They can be pasted without changes.

use std::{env, path::Path};

use kubefan_app::config::ServeConfig;
use kubefan_server::transport::listen::Bound;

/// The commands for a kubefan that listens on these addresses.
pub fn lines(program: &str, data: &Bound, admin: &Bound) -> Vec<String> {
    let server = if data.to_string() == ServeConfig::default().serving.listen.to_string() {
        String::new()
    } else {
        format!(" -s {data}")
    };
    let mut lines = vec![
        format!("{program} get pods -A -l app=web-1{server}"),
        format!("{program} watch pods -A -l app=web-1{server}"),
    ];
    match admin {
        Bound::Tcp(address) => {
            lines.push(format!("curl -s {address}/metrics"));
            lines.push(format!("http://{address}/ (the status page)"));
        }
        Bound::Unix(path) => lines.push(format!("curl -s --unix-socket {} http://localhost/metrics", path.display())),
    }
    lines
}

/// The shortest command that runs this program from the current directory.
pub fn program() -> String {
    let name = || "kubefan".to_owned();
    let Ok(program) = env::current_exe() else { return name() };
    let on_path = |dir: &Path| dir.join("kubefan") == program;
    if env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| on_path(&dir))) {
        return name();
    }
    let below = env::current_dir().ok().and_then(|dir| Some(program.strip_prefix(dir).ok()?.to_owned()));
    match below {
        Some(path) if path.components().count() > 1 => path.display().to_string(),
        Some(path) => format!("./{}", path.display()),
        None => program.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_port_needs_no_server_flag() {
        let tcp = |port| Bound::Tcp(([127, 0, 0, 1], port).into());
        let default = lines("kubefan", &tcp(7443), &tcp(7444));
        assert_eq!(
            default,
            [
                "kubefan get pods -A -l app=web-1",
                "kubefan watch pods -A -l app=web-1",
                "curl -s 127.0.0.1:7444/metrics",
                "http://127.0.0.1:7444/ (the status page)",
            ]
        );
        let other =
            lines("target/release/kubefan", &Bound::Unix("/tmp/k.sock".into()), &Bound::Unix("/tmp/a.sock".into()));
        assert_eq!(
            other,
            [
                "target/release/kubefan get pods -A -l app=web-1 -s unix:/tmp/k.sock",
                "target/release/kubefan watch pods -A -l app=web-1 -s unix:/tmp/k.sock",
                "curl -s --unix-socket /tmp/a.sock http://localhost/metrics",
            ]
        );
    }
}
