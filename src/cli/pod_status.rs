//! The STATUS column of a pod. It shows more than the phase, such as `CrashLoopBackOff`, `Init:1/2`
//! or `Terminating`.

use serde_json::Value;

/// The status as the apiserver prints it (`printPod` in Kubernetes' `pkg/printers`).
pub(super) fn pod_status(pod: &Value) -> String {
    let status = &pod["status"];
    let mut reason = text(&status["phase"]).to_owned();
    if !text(&status["reason"]).is_empty() {
        reason = text(&status["reason"]).to_owned();
    }
    if list(&status["conditions"])
        .any(|condition| condition["type"] == "PodScheduled" && condition["reason"] == "SchedulingGated")
    {
        reason = "SchedulingGated".to_owned();
    }
    let initializing = initializing(pod);
    let initialized = has_condition(status, "Initialized");
    match initializing {
        Some(init) if !initialized => reason = init,
        init => reason = of_containers(status, init.unwrap_or(reason)),
    }
    if pod["metadata"]["deletionTimestamp"].is_string() {
        if text(&status["reason"]) == "NodeLost" {
            return "Unknown".to_owned();
        }
        if !matches!(text(&status["phase"]), "Succeeded" | "Failed") {
            return "Terminating".to_owned();
        }
    }
    reason
}

/// The status of the first unfinished init container.
fn initializing(pod: &Value) -> Option<String> {
    let specs = &pod["spec"]["initContainers"];
    let restartable = |name: &Value| list(specs).any(|spec| spec["name"] == *name && spec["restartPolicy"] == "Always");
    for (index, container) in list(&pod["status"]["initContainerStatuses"]).enumerate() {
        let terminated = &container["state"]["terminated"];
        let waiting = text(&container["state"]["waiting"]["reason"]);
        if terminated["exitCode"] == 0 || restartable(&container["name"]) && container["started"] == true {
            continue;
        }
        return Some(match ended(terminated) {
            Some(ended) => format!("Init:{ended}"),
            None if !waiting.is_empty() && waiting != "PodInitializing" => format!("Init:{waiting}"),
            None => format!("Init:{index}/{}", list(specs).count()),
        });
    }
    None
}

fn of_containers(status: &Value, mut reason: String) -> String {
    let mut running = false;
    let mut failed = None;
    let statuses: Vec<&Value> = list(&status["containerStatuses"]).collect();
    for container in statuses.into_iter().rev() {
        let state = &container["state"];
        let waiting = text(&state["waiting"]["reason"]);
        if !waiting.is_empty() {
            reason = waiting.to_owned();
        } else if let Some(ended) = ended(&state["terminated"]) {
            if state["terminated"]["exitCode"] != 0 {
                failed = Some(ended.clone());
            }
            reason = ended;
        } else if container["ready"] == true && state["running"].is_object() {
            running = true;
        }
    }
    if reason != "Completed" {
        return reason;
    }
    match failed {
        _ if running && has_condition(status, "Ready") => "Running".to_owned(),
        Some(failed) => failed,
        None if running => "NotReady".to_owned(),
        None => reason,
    }
}

fn ended(terminated: &Value) -> Option<String> {
    terminated.as_object()?;
    let signal = terminated["signal"].as_i64().unwrap_or(0);
    Some(match text(&terminated["reason"]) {
        "" if signal != 0 => format!("Signal:{signal}"),
        "" => format!("ExitCode:{}", terminated["exitCode"].as_i64().unwrap_or(0)),
        reason => reason.to_owned(),
    })
}

fn has_condition(status: &Value, name: &str) -> bool {
    list(&status["conditions"]).any(|condition| condition["type"] == name && condition["status"] == "True")
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_status_is_the_same_as_in_kubectl() {
        let running = json!({"ready": true, "state": {"running": {}}});
        let crash = json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}});
        let done = json!({"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}});
        let cases = [
            (json!({"status": {"phase": "Running", "containerStatuses": [running]}}), "Running"),
            (json!({"status": {"phase": "Pending"}}), "Pending"),
            (json!({}), ""),
            (json!({"status": {"phase": "Failed", "reason": "Evicted"}}), "Evicted"),
            (json!({"status": {"phase": "Running", "containerStatuses": [crash, running]}}), "CrashLoopBackOff"),
            (json!({"status": {"phase": "Succeeded", "containerStatuses": [done]}}), "Completed"),
            (json!({"status": {"phase": "Running", "containerStatuses": [done, running]}}), "NotReady"),
            (
                json!({"status": {"phase": "Running", "containerStatuses": [done, running], "conditions": [{"type": "Ready", "status": "True"}]}}),
                "Running",
            ),
            (
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"}}),
                "Terminating",
            ),
            (
                json!({"spec": {"initContainers": [{"name": "a"}, {"name": "b"}]}, "status": {"phase": "Pending", "initContainerStatuses": [
                    {"name": "a", "state": {"terminated": {"exitCode": 0}}}, {"name": "b", "state": {"running": {}}}]}}),
                "Init:1/2",
            ),
            (
                json!({"status": {"phase": "Pending", "initContainerStatuses": [{"state": {"terminated": {"exitCode": 3}}}]}}),
                "Init:ExitCode:3",
            ),
            (
                json!({"status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "reason": "SchedulingGated"}]}}),
                "SchedulingGated",
            ),
        ];
        for (pod, expected) in cases {
            assert_eq!(pod_status(&pod), expected, "{pod}");
        }
    }
}
