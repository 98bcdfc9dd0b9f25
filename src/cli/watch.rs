//! `kubefan watch`: prints one line per change until it is stopped. It reconnects by itself.
//! Notices about the connection go to stderr, so that stdout has nothing but changes.

use std::{
    io::{self, BufWriter, Stdout, Write, stdout},
    pin::pin,
    task::Poll,
    time::Duration,
};

use clap::{Args, ValueEnum};
use futures::poll;
use serde::Deserialize;
use serde_json::json;

use super::{
    error::CliError,
    projection::ProjectionArgs,
    select::{SelectArgs, Selected, ServerArgs, is_cluster_scoped},
    shutdown::stop_signal,
    table::{Columns, PodColumns, pod_value, type_name},
    visible::{EscapedJson, print_notice, visible},
};
use kubefan_client::{
    ClientError, Encoding, Event, EventType, OnExpired, OnLag, ResolvedResource, WatchItem, WatchOptions,
};
use kubefan_common::proto::v1alpha1::DeleteReason;

/// Width of the first column: `MODIFIED` is the longest type, but not in the first line.
const TYPE_WIDTH: usize = 11;

/// The longest delay before the next try while kubefan has not read the resource yet: a user waits.
pub(super) const NOT_SYNCED_DELAY_MAX: Duration = Duration::from_secs(3);

/// Print every change of the objects of one type
#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    /// TYPE, TYPE NAME or TYPE/NAME; a type by any name that kubectl accepts
    #[arg(required = true, value_name = "TYPE [NAME]", num_args = 1..=2)]
    what: Vec<String>,

    /// Output format of a change [default: one line of text]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    /// Start after this version instead of with the current state; it is an error if history cannot
    /// resume from it, unless --on-expired=restart
    #[arg(long, value_name = "VERSION", default_value = "", hide_default_value = true)]
    resource_version: String,

    /// Reaction if history cannot resume from a version [default: restart; with --resource-version:
    /// fail]
    #[arg(long, value_enum, value_name = "ACTION")]
    on_expired: Option<OnExpired>,

    /// Reaction if this watch falls behind the events that kubefan retains
    #[arg(long, value_enum, value_name = "ACTION", default_value_t)]
    on_lag: OnLag,

    /// End after this time, such as 30s or 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout)]
    timeout: Option<Duration>,

    /// The encoding between kubefan and this command; the output is the same
    #[arg(long, value_enum, value_name = "ENCODING", default_value_t = Encoding::Json, hide_default_value = true)]
    encoding: Encoding,

    #[command(flatten)]
    projection: ProjectionArgs,

    #[command(flatten)]
    select: SelectArgs,

    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// {"type":…,"object":…}, one per line, as the Kubernetes API streams it
    Json,
    /// TYPE/NAME
    Name,
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    let duration = text.parse::<jiff::SignedDuration>().ok().and_then(|duration| Duration::try_from(duration).ok());
    duration
        .filter(|duration| *duration >= Duration::from_secs(1))
        .ok_or_else(|| "write it like 30s or 5m; at least 1s".to_owned())
}

pub(super) async fn run(args: WatchArgs) -> Result<(), CliError> {
    let selected = args.select.parse(&args.what)?;
    let [Selected { resource, names }] = selected.as_slice() else {
        return Err(CliError::Plain("watch takes a single type".to_owned()));
    };
    if names.len() > 1 {
        return Err(CliError::Plain("watch takes a single name; to watch several objects use a selector".to_owned()));
    }
    let mut target = args.select.target(resource, names.first().map(String::as_str));
    let options = WatchOptions {
        resource_version: args.resource_version.clone(),
        timeout: args.timeout,
        projection: args.projection.projection(),
        only_changes: args.projection.only_changes,
        encoding: args.encoding,
        // A user who gives a version wants the changes after it, not a snapshot.
        on_expired: args.on_expired.unwrap_or(if args.resource_version.is_empty() {
            OnExpired::Restart
        } else {
            OnExpired::Fail
        }),
        on_lag: args.on_lag,
        not_synced_delay_max: Some(NOT_SYNCED_DELAY_MAX),
        ..WatchOptions::default()
    };
    let mut signal = pin!(stop_signal()?);
    let client = tokio::select! {
        client = args.server.connect() => client?,
        signal = &mut signal => return Err(CliError::Interrupted(signal)),
    };
    let mut watch = client.watch(target.clone(), options.clone());
    let mut printer = Printer {
        format: args.output,
        resource: ResolvedResource { resource: resource.clone(), ..ResolvedResource::default() },
        columns: Columns::starting_with(TYPE_WIDTH),
        pods: PodColumns::of(&args.projection),
        out: BufWriter::new(stdout()),
    };
    let mut notices = Notices::default();
    let result = loop {
        let item = {
            let mut next = pin!(watch.next());
            match poll!(&mut next) {
                Poll::Ready(item) => item,
                // Flushes only when no further item is ready, so that a burst of lines is written
                // together.
                Poll::Pending => {
                    printer.out.flush()?;
                    tokio::select! {
                        item = next => item,
                        signal = &mut signal => break Err(CliError::Interrupted(signal)),
                    }
                }
            }
        };
        match item {
            None => break Ok(()),
            Some(Ok(WatchItem::Event(event))) => printer.print(&event)?,
            Some(Ok(item)) => {
                if let Some(line) = notices.line(resource, &item) {
                    print_notice(&line);
                }
                if let WatchItem::SnapshotBegin { resource: Some(resource), .. } = item {
                    printer.resource = resource;
                }
            }
            Some(Err(error)) if is_cluster_scoped(&error, &target) => {
                target.namespace.clear();
                watch = client.watch(target.clone(), options.clone());
            }
            Some(Err(error)) if error.is_expired() => {
                break Err(CliError::Expired(error));
            }
            Some(Err(error)) => break Err(error.into()),
        }
    };
    printer.out.flush()?;
    if !watch.resume_version().is_empty() && matches!(result, Ok(()) | Err(CliError::Interrupted(_))) {
        print_notice(&format!("to continue from here: --resource-version={}", watch.resume_version()));
    }
    result
}

/// Tells why a command does not answer yet.
pub(super) fn waiting_for(resource: &str, error: &ClientError) -> String {
    format!("waiting for {resource}: {error}; retrying")
}

/// Reports of a watch about itself. While it waits for kubefan's first list it says so once.
#[derive(Debug, Default)]
pub(super) struct Notices {
    is_waiting: bool,
}

impl Notices {
    /// The notice for the user about an item that is not an event.
    pub(super) fn line(&mut self, resource: &str, item: &WatchItem) -> Option<String> {
        let was_waiting = self.is_waiting;
        self.is_waiting = match item {
            WatchItem::Disconnected { error, .. } => error.is_not_synced(),
            // A stream that is open may still be refused.
            WatchItem::Reconnected { .. } => was_waiting,
            _ => false,
        };
        match item {
            WatchItem::Disconnected { error, .. } if self.is_waiting => {
                (!was_waiting).then(|| waiting_for(resource, error))
            }
            WatchItem::Reconnected { from } if was_waiting && from.is_empty() => None,
            other => notice(other),
        }
    }
}

fn notice(item: &WatchItem) -> Option<String> {
    match item {
        WatchItem::Disconnected { error, retry_in } => {
            // An error with a reason is kubefan's own answer, so the connection works.
            let what = if error.reason().is_empty() { "connection lost" } else { "watch refused" };
            Some(format!("{what} ({error}); trying again in {:.1}s", retry_in.as_secs_f64()))
        }
        WatchItem::Reconnected { from } if from.is_empty() => Some("reconnected; starting over".to_owned()),
        // If changes were lost, the next item is a mark, which has its own notice.
        WatchItem::Reconnected { from } => Some(format!("reconnected; continuing from version {from}")),
        WatchItem::Restarted { error } => {
            Some(format!("starting over with a snapshot, because the missed changes are no longer retained: {error}"))
        }
        WatchItem::GapBegin { resource_version, reason } => Some(format!(
            "kubefan had to relist ({reason}): for changes after version {resource_version} only the latest state follows"
        )),
        WatchItem::CatchUpBegin { resource_version } => {
            Some(format!("too far behind: for changes after version {resource_version} only the latest state follows"))
        }
        WatchItem::GapEnd | WatchItem::CatchUpEnd => Some("from here on every change follows".to_owned()),
        WatchItem::SnapshotBegin { restarted_from, .. } if !restarted_from.is_empty() => {
            Some(format!("starting over with a snapshot, because history cannot resume from version {restarted_from}"))
        }
        WatchItem::SnapshotBegin { .. } | WatchItem::SnapshotEnd { .. } | WatchItem::Event(_) | WatchItem::Bookmark => {
            None
        }
    }
}

struct Printer {
    format: Option<Format>,
    /// As requested, until a snapshot names the resolved resource.
    resource: ResolvedResource,
    columns: Columns,
    pods: PodColumns,
    out: BufWriter<Stdout>,
}

impl Printer {
    fn resource_of(&self, event: &Event) -> ResolvedResource {
        match type_of(&event.object) {
            resource if resource.kind.is_empty() => self.resource.clone(),
            resource => resource,
        }
    }

    fn print(&mut self, event: &Event) -> io::Result<()> {
        match self.format {
            Some(Format::Json) => print_json(&mut self.out, event),
            Some(Format::Name) => {
                let name = format!("{}/{}", type_name(&self.resource_of(event)), event.name);
                writeln!(self.out, "{}", visible(&name))
            }
            None => self.columns.print(&mut self.out, &[cells(event, self.pods)]),
        }
    }
}

/// The columns TYPE, VERSION and KEY, and for a pod STATUS and NODE.
fn cells(event: &Event, pods: PodColumns) -> Vec<String> {
    let key =
        if event.namespace.is_empty() { event.name.clone() } else { format!("{}/{}", event.namespace, event.name) };
    let mut cells = vec![type_text(event).to_owned(), event.resource_version.clone(), key];
    let resource = type_of(&event.object);
    if resource.kind == "Pod" && resource.group.is_empty() {
        cells.extend(pods.cells(&pod_value(&event.object)));
    }
    match event.delete_reason() {
        DeleteReason::LeftSelector => cells.push("(left the selector)".to_owned()),
        DeleteReason::FinalStateUnknown => cells.push("(final state unknown)".to_owned()),
        DeleteReason::ObjectDeleted | DeleteReason::Unspecified => {}
    }
    cells
}

fn print_json(out: &mut impl Write, event: &Event) -> io::Result<()> {
    write!(out, "{{\"type\":\"{}\",\"object\":", type_text(event))?;
    if event.object.is_empty() {
        // For an object deleted inside a gap, possibly only its key and uid are known.
        let metadata = json!({"namespace": event.namespace, "name": event.name, "uid": event.uid});
        serde_json::to_writer(EscapedJson(&mut *out), &json!({"metadata": metadata}))?;
    } else {
        EscapedJson(&mut *out).write_all(event.object.trim_ascii_end())?;
    }
    writeln!(out, "}}")
}

fn type_text(event: &Event) -> &'static str {
    match event.r#type() {
        EventType::Added => "ADDED",
        EventType::Modified => "MODIFIED",
        EventType::Deleted => "DELETED",
        EventType::Unspecified => "UNKNOWN",
    }
}

/// The type of an object, however deep the rest of it is.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct TypeMeta {
    kind: String,
    api_version: String,
}

/// The type named in the object itself, because a resumed watch gets no `SnapshotBegin`. Empty if
/// the projection leaves it out.
fn type_of(object: &[u8]) -> ResolvedResource {
    let TypeMeta { kind, api_version } = serde_json::from_slice(object).unwrap_or_default();
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    match kind.as_str() {
        "PartialObjectMetadata" => ResolvedResource::default(),
        kind => ResolvedResource { group: group.to_owned(), kind: kind.to_owned(), ..ResolvedResource::default() },
    }
}

#[cfg(test)]
mod tests {
    use kubefan_client::ServerStatus;
    use serde_json::Value;

    use super::*;
    use crate::cli::table::tests::ALL;

    fn event(kind: EventType, reason: DeleteReason, object: &str) -> Event {
        Event {
            r#type: kind.into(),
            delete_reason: reason.into(),
            namespace: "default".into(),
            name: "web-1".into(),
            uid: "u".into(),
            resource_version: "42".into(),
            object: object.to_owned().into(),
            ..Event::default()
        }
    }

    const POD: &str = r#"{"kind":"Pod","apiVersion":"v1","spec":{"nodeName":"n1"},"status":{"phase":"Running"}}"#;

    #[test]
    fn a_line_shows_the_type_of_change_and_the_object() {
        let mut out = Vec::new();
        let rows = [
            cells(&event(EventType::Added, DeleteReason::Unspecified, POD), ALL),
            cells(&event(EventType::Deleted, DeleteReason::LeftSelector, POD), ALL),
            cells(&event(EventType::Deleted, DeleteReason::FinalStateUnknown, ""), ALL),
        ];
        let mut columns = Columns::starting_with(TYPE_WIDTH);
        for row in rows {
            columns.print(&mut out, &[row]).unwrap();
        }
        let expected = "\
ADDED      42    default/web-1   Running   n1
DELETED    42    default/web-1   Running   n1    (left the selector)
DELETED    42    default/web-1   (final state unknown)
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn an_object_without_a_type_is_named_by_the_requested_type() {
        let printer = |resource: &str| Printer {
            format: None,
            resource: ResolvedResource { resource: resource.to_owned(), ..ResolvedResource::default() },
            columns: Columns::default(),
            pods: ALL,
            out: BufWriter::new(stdout()),
        };
        let named = |object: &str| {
            type_name(&printer("po").resource_of(&event(EventType::Added, DeleteReason::Unspecified, object)))
        };
        assert_eq!(named(r#"{"kind":"Deployment","apiVersion":"apps/v1"}"#), "deployment.apps");
        assert_eq!(named(r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1"}"#), "po");
        assert_eq!(named("{}"), "po");
    }

    #[test]
    fn json_lines_have_the_format_of_the_kubernetes_api() {
        let mut out = Vec::new();
        print_json(&mut out, &event(EventType::Modified, DeleteReason::Unspecified, POD)).unwrap();
        print_json(&mut out, &event(EventType::Deleted, DeleteReason::FinalStateUnknown, "")).unwrap();
        let text = String::from_utf8(out).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next().unwrap(), format!("{{\"type\":\"MODIFIED\",\"object\":{POD}}}"));
        let unknown: Value = serde_json::from_str(lines.next().unwrap()).unwrap();
        assert_eq!(unknown["object"]["metadata"]["name"], "web-1");
    }

    #[test]
    fn a_watch_says_once_that_it_waits_for_the_first_list() {
        let lost = |reason: &str, message: &str| WatchItem::Disconnected {
            error: ClientError::Status(Box::new(ServerStatus {
                code: tonic::Code::Unavailable,
                reason: reason.to_owned(),
                metadata: Default::default(),
                message: message.to_owned(),
                field: String::new(),
                retry_after: None,
            })),
            retry_in: Duration::from_secs(3),
        };
        let not_synced = |why: &str| lost("NOT_SYNCED", &format!("pods is not synced: {why}"));
        let back = || WatchItem::Reconnected { from: String::new() };
        let mut notices = Notices::default();
        let mut line = |item: WatchItem| notices.line("po", &item).unwrap_or_default();
        assert_eq!(line(not_synced("listing")), "waiting for po: pods is not synced: listing; retrying");
        assert_eq!([line(not_synced("refused")), line(back()), line(not_synced("refused"))], ["", "", ""]);
        assert_eq!(line(lost("DRAINING", "draining")), "watch refused (draining); trying again in 3.0s");
        assert_eq!(line(back()), "reconnected; starting over");
        assert_eq!(line(WatchItem::Bookmark), "");
        assert_eq!(line(not_synced("again")), "waiting for po: pods is not synced: again; retrying");
    }

    #[test]
    fn a_timeout_is_a_duration_of_at_least_one_second() {
        assert_eq!(parse_timeout("1m30s"), Ok(Duration::from_secs(90)));
        for text in ["0s", "10", "-5s", "soon", ""] {
            assert!(parse_timeout(text).is_err(), "{text}");
        }
    }
}
