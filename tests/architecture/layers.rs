//! Packages depend only on those below them. `kubefan-upstream` and `kubefan-fanout` do not know
//! each other, and `kubefan-server` sees the caches only through `kubefan_fanout::Catalog`.

use crate::tree::Package;

/// A package, and those it may depend on.
type Layer = (&'static str, &'static [&'static str]);

/// The packages, from the bottom to the top.
pub(crate) const PACKAGES: &[Layer] = &[
    ("kubefan-common", &[]),
    ("kubefan-model", &["kubefan-common"]),
    ("kubefan-client", &["kubefan-common"]),
    ("kubefan-testkit", &[]),
    ("kubefan-telemetry", &["kubefan-common", "kubefan-model"]),
    ("kubefan-cache", &["kubefan-common", "kubefan-model"]),
    ("kubefan-admission", &["kubefan-cache", "kubefan-common", "kubefan-telemetry"]),
    (
        "kubefan-upstream",
        &["kubefan-cache", "kubefan-client", "kubefan-common", "kubefan-model", "kubefan-telemetry", "kubefan-testkit"],
    ),
    ("kubefan-fanout", &["kubefan-admission", "kubefan-cache", "kubefan-common", "kubefan-model", "kubefan-telemetry"]),
    ("kubefan-managed-tls", &["kubefan-common", "kubefan-telemetry", "kubefan-upstream"]),
    (
        "kubefan-peer",
        &[
            "kubefan-admission",
            "kubefan-cache",
            "kubefan-common",
            "kubefan-fanout",
            "kubefan-managed-tls",
            "kubefan-model",
            "kubefan-telemetry",
            "kubefan-upstream",
        ],
    ),
    (
        "kubefan-informers",
        &[
            "kubefan-admission",
            "kubefan-cache",
            "kubefan-common",
            "kubefan-fanout",
            "kubefan-model",
            "kubefan-peer",
            "kubefan-telemetry",
            "kubefan-upstream",
        ],
    ),
    (
        "kubefan-access",
        &[
            "kubefan-admission",
            "kubefan-cache",
            "kubefan-common",
            "kubefan-model",
            "kubefan-telemetry",
            "kubefan-testkit",
            "kubefan-upstream",
        ],
    ),
    ("kubefan-audit", &["kubefan-access", "kubefan-admission", "kubefan-common", "kubefan-telemetry"]),
    (
        "kubefan-server",
        &[
            "kubefan-access",
            "kubefan-admission",
            "kubefan-audit",
            "kubefan-cache",
            "kubefan-common",
            "kubefan-fanout",
            "kubefan-managed-tls",
            "kubefan-model",
            "kubefan-peer",
            "kubefan-telemetry",
            "kubefan-testkit",
            "kubefan-upstream",
        ],
    ),
    (
        "kubefan-app",
        &[
            "kubefan-access",
            "kubefan-admission",
            "kubefan-audit",
            "kubefan-cache",
            "kubefan-client",
            "kubefan-common",
            "kubefan-fanout",
            "kubefan-informers",
            "kubefan-managed-tls",
            "kubefan-model",
            "kubefan-peer",
            "kubefan-server",
            "kubefan-telemetry",
            "kubefan-upstream",
        ],
    ),
    ("kubefan-sim", &["kubefan-common", "kubefan-model"]),
    (
        "kubefan-demo",
        &[
            "kubefan-app",
            "kubefan-client",
            "kubefan-common",
            "kubefan-model",
            "kubefan-server",
            "kubefan-sim",
            "kubefan-telemetry",
            "kubefan-upstream",
        ],
    ),
    (
        "kubefan-bench",
        &["kubefan-common", "kubefan-model", "kubefan-server", "kubefan-sim", "kubefan-telemetry", "kubefan-upstream"],
    ),
    ("kubefan-examples", &["kubefan-client"]),
    ("kubefan-codegen", &[]),
    (
        "kubefan-benches",
        &[
            "kubefan-admission",
            "kubefan-cache",
            "kubefan-common",
            "kubefan-fanout",
            "kubefan-model",
            "kubefan-sim",
            "kubefan-telemetry",
            "kubefan-upstream",
        ],
    ),
    (
        "kubefan",
        &[
            "kubefan-access",
            "kubefan-app",
            "kubefan-bench",
            "kubefan-cache",
            "kubefan-client",
            "kubefan-common",
            "kubefan-demo",
            "kubefan-informers",
            "kubefan-managed-tls",
            "kubefan-model",
            "kubefan-peer",
            "kubefan-server",
            "kubefan-telemetry",
            "kubefan-upstream",
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

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
