//! No import goes upwards: neither between packages, nor between the rooms of the proxy.

use std::collections::{BTreeMap, BTreeSet};

use crate::{modules::Crate, tree::Package};

/// A package or a room, and those it may import.
type Layer = (&'static str, &'static [&'static str]);

/// The packages, from the bottom to the top.
pub(crate) const PACKAGES: &[Layer] = &[
    ("kubefan-common", &[]),
    ("kubefan-model", &["kubefan-common"]),
    ("kubefan-client", &["kubefan-common"]),
    ("kubefan-testkit", &[]),
    ("kubefan-proxy", &["kubefan-client", "kubefan-common", "kubefan-model", "kubefan-testkit"]),
    ("kubefan-sim", &["kubefan-common", "kubefan-model"]),
    ("kubefan-demo", &["kubefan-client", "kubefan-common", "kubefan-model", "kubefan-proxy", "kubefan-sim"]),
    ("kubefan-bench", &["kubefan-client", "kubefan-common", "kubefan-model", "kubefan-proxy", "kubefan-sim"]),
    ("kubefan-examples", &["kubefan-client"]),
    ("kubefan-codegen", &[]),
    ("kubefan-benches", &["kubefan-common", "kubefan-model", "kubefan-proxy", "kubefan-sim"]),
    (
        "kubefan",
        &["kubefan-bench", "kubefan-client", "kubefan-common", "kubefan-demo", "kubefan-model", "kubefan-proxy"],
    ),
];

/// The rooms of `crates/proxy/src`, from the bottom to the top. Upstream and fan-out do not know
/// each other, and the server sees the caches only through the trait `fanout::Catalog`.
pub(crate) const ROOMS: &[Layer] = &[
    ("telemetry", &[]),
    ("cache", &[]),
    ("kube_encoding", &[]),
    ("admission", &["cache", "telemetry"]),
    ("upstream", &["cache", "telemetry"]),
    ("fanout", &["admission", "cache", "kube_encoding", "telemetry"]),
    ("managed_tls", &["telemetry", "upstream"]),
    ("peer", &["admission", "cache", "fanout", "managed_tls", "telemetry", "upstream"]),
    ("informers", &["admission", "cache", "fanout", "peer", "telemetry", "upstream"]),
    ("access", &["admission", "cache", "telemetry", "upstream"]),
    ("audit", &["access", "telemetry"]),
    (
        "server",
        &[
            "access",
            "admission",
            "audit",
            "cache",
            "fanout",
            "kube_encoding",
            "managed_tls",
            "peer",
            "telemetry",
            "upstream",
        ],
    ),
    ("config", &["access", "cache", "fanout", "informers", "managed_tls", "server", "telemetry", "upstream"]),
    (
        "app",
        &[
            "access",
            "admission",
            "audit",
            "cache",
            "config",
            "fanout",
            "informers",
            "managed_tls",
            "peer",
            "server",
            "telemetry",
            "upstream",
        ],
    ),
];

/// The dependencies that a package's manifest names and `layers` does not allow.
pub(crate) fn packages_upwards(packages: &[Package], layers: &[Layer]) -> Vec<String> {
    let mut found = Vec::new();
    for package in packages {
        let Some((_, allowed)) = layers.iter().find(|(name, _)| *name == package.name) else {
            found.push(format!("{}: a package that tests/architecture/layers.rs does not name", package.name));
            continue;
        };
        let upwards = package.dependencies.iter().filter(|name| !allowed.contains(&name.as_str()));
        found.extend(upwards.map(|name| format!("{} depends on {name}", package.name)));
    }
    found
}

/// The uses between rooms that `layers` does not allow: the file, both rooms and the paths.
pub(crate) fn rooms_upwards(proxy: &Crate, layers: &[Layer]) -> Vec<String> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in proxy.files() {
        let room = proxy.module_of(file).and_then(|module| module.first());
        if let Some(room) = room.filter(|room| !layers.iter().any(|(name, _)| name == room)) {
            let problem = format!("{room}: a room that tests/architecture/layers.rs does not name");
            found.entry(problem).or_default();
        }
    }
    for (file, target, path) in proxy.module_uses() {
        let (Some(from), Some(to)) = (proxy.module_of(file).and_then(|module| module.first()), target.first()) else {
            continue;
        };
        let Some((_, allowed)) = layers.iter().find(|(name, _)| name == from) else { continue };
        if from != to && !allowed.contains(&to.as_str()) {
            found.entry(format!("{}: {from} imports {to}: ", file.display())).or_default().insert(path);
        }
    }
    let line = |(problem, paths): (String, BTreeSet<String>)| problem + &Vec::from_iter(paths).join(", ");
    found.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::modules::tests::planted;

    #[test]
    fn a_planted_import_upwards_is_found() {
        let proxy = planted(&[
            ("src/lib.rs", "mod low; mod high; mod new;"),
            ("src/low.rs", "pub use crate::high::High; fn f() { super::high::g() }"),
            ("src/high.rs", "pub struct High; use crate::low::Low;"),
            ("src/new.rs", ""),
        ]);
        let found = rooms_upwards(&proxy, &[("low", &[]), ("high", &["low"])]);
        assert_eq!(
            found,
            [
                "new: a room that tests/architecture/layers.rs does not name",
                "src/low.rs: low imports high: crate::high::High, super::high::g",
            ]
        );
    }

    #[test]
    fn a_planted_dependency_upwards_is_found() {
        let package = |name: &str, dependencies: &[&str]| Package {
            name: name.to_owned(),
            folder: PathBuf::new(),
            dependencies: dependencies.iter().map(|name| (*name).to_owned()).collect(),
        };
        let packages = [package("low", &["high"]), package("high", &["low"]), package("new", &[])];
        let found = packages_upwards(&packages, &[("low", &[]), ("high", &["low"])]);
        assert_eq!(found, ["low depends on high", "new: a package that tests/architecture/layers.rs does not name"]);
    }
}
