//! Computes when a pod's containers last restarted, by the rule of the apiserver's printer
//! (`printPod` in `pkg/printers/internalversion`).
//!
//! The Restarts column shows an age that is not the age of the object. Only this one of all such
//! columns is worth the effort, because pods are printed most.

use std::borrow::Cow;

use jiff::Timestamp;
use serde::Deserialize;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Pod<'a> {
    #[serde(borrow)]
    spec: Spec<'a>,
    #[serde(borrow)]
    status: Status<'a>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec<'a> {
    #[serde(borrow)]
    init_containers: Vec<InitContainer<'a>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct InitContainer<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    restart_policy: Option<Cow<'a, str>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Status<'a> {
    #[serde(borrow)]
    conditions: Vec<Condition<'a>>,
    #[serde(borrow)]
    init_container_statuses: Vec<Container<'a>>,
    #[serde(borrow)]
    container_statuses: Vec<Container<'a>>,
}

#[derive(Deserialize)]
struct Condition<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    status: Cow<'a, str>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Container<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    last_state: ContainerState<'a>,
    #[serde(borrow)]
    state: ContainerState<'a>,
    started: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ContainerState<'a> {
    #[serde(borrow)]
    terminated: Option<Terminated<'a>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Terminated<'a> {
    exit_code: i64,
    #[serde(borrow)]
    finished_at: Option<Cow<'a, str>>,
}

impl Container<'_> {
    fn last_restart(&self) -> Option<Timestamp> {
        self.last_state.terminated.as_ref()?.finished_at.as_ref()?.parse().ok()
    }
}

/// The time of the last restart as RFC 3339; `None` if no container has restarted.
pub(super) fn last(pod: &str) -> Option<String> {
    let Pod { spec, status } = serde_json::from_str(pod).ok()?;
    let always = |container: &&Container<'_>| {
        let named = spec.init_containers.iter().rfind(|init| init.name == container.name);
        named.is_some_and(|init| init.restart_policy.as_deref() == Some("Always"))
    };
    // The pod waits for the first init container that has not succeeded. A sidecar (an init
    // container that always restarts) only has to be started.
    let is_done = |container: &Container<'_>| {
        let succeeded = container.state.terminated.as_ref().is_some_and(|terminated| terminated.exit_code == 0);
        succeeded || (always(&container) && container.started == Some(true))
    };
    let waits_for = status.init_container_statuses.iter().position(|container| !is_done(container));
    // The printer ignores the init containers after it.
    let looked_at =
        &status.init_container_statuses[..waits_for.map_or(status.init_container_statuses.len(), |at| at + 1)];
    let initialized = status.conditions.iter().find(|condition| condition.kind == "Initialized");
    let is_initializing = waits_for.is_some() && initialized.is_none_or(|condition| condition.status != "True");
    let last = if is_initializing {
        looked_at.iter().filter_map(Container::last_restart).max()
    } else {
        let inits = looked_at.iter().filter(always);
        inits.chain(&status.container_statuses).filter_map(Container::last_restart).max()
    };
    last.map(|time| time.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn container(name: &str, restarted: &str, done: bool) -> serde_json::Value {
        let state = if done { json!({"terminated": {"exitCode": 0}}) } else { json!({"running": {}}) };
        let last_state = match restarted {
            "" => json!({}),
            at => json!({"terminated": {"exitCode": 1, "finishedAt": at}}),
        };
        json!({"name": name, "state": state, "lastState": last_state, "started": !done})
    }

    #[test]
    fn the_last_restart_considers_the_containers_that_the_printer_considers() {
        let pod = |inits: Vec<serde_json::Value>, initialized: &str, containers: Vec<serde_json::Value>| {
            let pod = json!({
                "spec": {"initContainers": [{"name": "setup"}, {"name": "sidecar", "restartPolicy": "Always"}]},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True"}, {"type": "Initialized", "status": initialized}],
                    "initContainerStatuses": inits,
                    "containerStatuses": containers,
                }
            });
            last(&pod.to_string())
        };
        let at = |minute: u32| format!("2026-01-01T00:{minute:02}:00Z");
        let main = |minute| vec![container("a", &at(minute), false), container("b", "", false)];
        assert_eq!(pod(vec![], "True", main(5)), Some(at(5)));
        assert_eq!(pod(vec![], "True", vec![container("a", "", false)]), None);
        let setup = container("setup", &at(9), true);
        assert_eq!(pod(vec![setup.clone()], "True", main(5)), Some(at(5)), "a finished init container does not count");
        let sidecar = container("sidecar", &at(7), false);
        assert_eq!(pod(vec![setup.clone(), sidecar.clone()], "True", main(5)), Some(at(7)), "a sidecar counts");
        let waits = container("setup", &at(3), false);
        assert_eq!(
            pod(vec![waits.clone(), sidecar], "False", main(5)),
            Some(at(3)),
            "the pod waits for this init container"
        );
        assert_eq!(pod(vec![waits], "True", main(5)), Some(at(5)));
        assert_eq!(last(r#"{"spec":{},"status":{}}"#), None);
        assert_eq!(last("7"), None);
    }
}
