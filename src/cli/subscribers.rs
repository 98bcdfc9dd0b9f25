//! `kubefan subscribers`: the clients that watch through a running kubefan, and their lag.

use std::io::stdout;

use clap::{Args, ValueEnum};
use serde::Deserialize;
use serde_json::Value;

use super::{
    admin::{Admin, AdminArgs},
    error::CliError,
    table::Columns,
    visible::{print_json, print_notice, visible},
};
use kubefan_model::human_duration::human_duration;

/// The longest cell of a table, in characters, unless the output is wide.
const CELL_CHARS_MAX: usize = 48;

/// List the clients that watch through a running kubefan
///
/// LAG counts the events that wait to be handed to a client's connection, and shows how long the
/// first of them has waited. With a + some of them are no longer retained: the client gets each
/// change since once, or its stream ends. Events in the network and in the client itself are not
/// counted. `kubefan disconnect ID` ends a stream.
#[derive(Debug, Args)]
pub(super) struct SubscribersArgs {
    /// The order of the list
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t = SortBy::Lag)]
    sort_by: SortBy,

    /// Maximum number of subscribers to list, at most 10000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,

    /// The format
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Output>,

    /// Print no header
    #[arg(long)]
    no_headers: bool,

    #[command(flatten)]
    admin: AdminArgs,
}

/// The columns, unless the output is wide.
pub(super) const COLUMNS: [&str; 8] = ["ID", "IDENTITY", "RESOURCE", "NAMESPACE", "SELECTOR", "LAG", "SENT", "AGE"];

/// The order of a list of subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SortBy {
    /// The furthest behind
    Lag,
    /// The most bytes
    Bytes,
    /// The oldest
    Age,
    /// The name of the user
    Identity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// More columns
    Wide,
    /// JSON
    Json,
}

/// The answer of the admin port.
#[derive(Debug, Deserialize)]
pub(super) struct SubscriberList {
    pub(super) total: usize,
    pub(super) subscribers: Vec<Subscriber>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Subscriber {
    id: String,
    identity: String,
    user_agent: String,
    address: String,
    resource: String,
    namespace: String,
    cache_namespace: String,
    label_selector: String,
    field_selector: String,
    /// Older servers know none.
    #[serde(default)]
    shard_selector: String,
    protocol: String,
    encoding: String,
    resource_version: String,
    in_backlog: bool,
    lag_events: u64,
    lag_seconds: Option<f64>,
    is_expired: bool,
    bytes_sent: u64,
    started: String,
    age_seconds: f64,
}

pub(super) async fn run(args: SubscribersArgs) -> Result<(), CliError> {
    let admin = args.admin.connect().await.map_err(CliError::Plain)?;
    let text = list(&admin, args.sort_by, args.limit).await.map_err(CliError::Plain)?;
    let mut out = stdout().lock();
    if args.output == Some(Output::Json) {
        let value: Value = admin.parse(&text).map_err(CliError::Plain)?;
        return Ok(print_json(&mut out, &value)?);
    }
    let listed: SubscriberList = admin.parse(&text).map_err(CliError::Plain)?;
    let is_wide = args.output == Some(Output::Wide);
    let header = header(is_wide).map(str::to_owned).collect();
    let rows = listed.subscribers.iter().map(|subscriber| subscriber.row(is_wide));
    let rows: Vec<_> = (!args.no_headers).then_some(header).into_iter().chain(rows).collect();
    Columns::default().print(&mut out, &rows)?;
    match (listed.subscribers.len(), listed.total) {
        (0, 0) => print_notice("No subscribers found"),
        (shown, total) if shown < total => {
            print_notice(&format!("{shown} of {total} subscribers; --limit shows more"));
        }
        _ => {}
    }
    Ok(())
}

/// The answer of the admin port.
///
/// # Errors
/// The reason why there is no list.
pub(super) async fn list(admin: &Admin, sort: SortBy, limit: u32) -> Result<String, String> {
    let sort = match sort {
        SortBy::Lag => "lag",
        SortBy::Bytes => "bytes",
        SortBy::Age => "age",
        SortBy::Identity => "identity",
    };
    admin.get("/subscribers", &[("sort", sort.to_owned()), ("limit", limit.to_string())]).await
}

fn header(is_wide: bool) -> impl Iterator<Item = &'static str> {
    let wide: &[&str] = if is_wide { &["USER-AGENT", "ADDRESS", "ENCODING", "VERSION", "STARTED"] } else { &[] };
    COLUMNS.into_iter().chain(wide.iter().copied())
}

impl Subscriber {
    /// The cells below [`COLUMNS`], or those of the wide output.
    pub(super) fn row(&self, is_wide: bool) -> Vec<String> {
        let or = |text: &str, none: &str| if text.is_empty() { none.to_owned() } else { visible(text) };
        let selectors = [&*self.label_selector, &*self.field_selector, &*self.shard_selector];
        let selectors: Vec<_> = selectors.into_iter().filter(|selector| !selector.is_empty()).collect();
        let mut row = vec![
            self.id.clone(),
            or(&self.identity, "<any>"),
            visible(&self.resource),
            or(&self.namespace, "<all>"),
            or(&selectors.join(","), "<none>"),
            self.lag(),
            bytes(self.bytes_sent),
            human_duration(self.age_seconds as i64),
        ];
        if is_wide {
            row.extend([
                or(&self.user_agent, "<none>"),
                visible(&self.address),
                format!("{}/{}", self.protocol, self.encoding),
                or(&self.resource_version, "<none>"),
                self.started.clone(),
            ]);
        } else {
            for cell in &mut row {
                shorten(cell);
            }
        }
        row
    }

    /// The [key](cache_key) of the cache that it reads from.
    pub(super) fn cache(&self) -> String {
        let media = match (&*self.protocol, &*self.encoding) {
            (_, "protobuf") => "protobuf",
            ("grpc", _) => "json",
            (_, encoding) => encoding,
        };
        cache_key(&self.resource, &self.cache_namespace, media)
    }

    /// Formats how far it is behind.
    pub(super) fn lag(&self) -> String {
        let more = if self.is_expired { "+" } else { "" };
        let what = match (self.in_backlog, self.lag_events, self.lag_seconds) {
            (_, 0, _) => format!("0{more}"),
            (_, events, Some(seconds)) => format!("{events}{more} ({})", human_duration(seconds as i64)),
            (_, events, None) => format!("{events}{more}"),
        };
        if self.in_backlog { format!("{what}, catching up") } else { what }
    }
}

/// Tells a cache from the others of a kubefan.
pub(super) fn cache_key(resource: &str, namespace: &str, media: &str) -> String {
    [resource, namespace, media].join("/")
}

fn shorten(cell: &mut String) {
    if let Some((at, _)) = cell.char_indices().nth(CELL_CHARS_MAX) {
        cell.truncate(at);
        cell.push('…');
    }
}

/// `512`, `36Ki`, `1.2Mi`, as quantities of Kubernetes.
pub(super) fn bytes(number: u64) -> String {
    let units = ["", "Ki", "Mi", "Gi", "Ti"];
    let mut value = number as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 10.0);
    format!("{value:.digits$}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_says_how_many_since_when_and_whether_some_are_gone() {
        let of = |lag_events, lag_seconds, is_expired, in_backlog| {
            Subscriber { lag_events, lag_seconds, is_expired, in_backlog, ..Subscriber::default() }.lag()
        };
        assert_eq!(of(0, None, false, false), "0");
        assert_eq!(of(7, None, false, false), "7");
        assert_eq!(of(7, Some(3.9), false, false), "7 (3s)");
        assert_eq!(of(7, Some(300.0), true, true), "7+ (5m), catching up");
    }

    #[test]
    fn what_a_client_says_of_itself_cannot_control_the_terminal() {
        let hostile = Subscriber {
            user_agent: "\u{1b}[2J\u{9b}31m\u{202e}x".to_owned(),
            label_selector: "a\nb".to_owned(),
            ..Subscriber::default()
        };
        assert!(hostile.row(true).iter().all(|cell| !cell.contains(|c: char| c.is_control() || c == '\u{202e}')));
    }

    #[test]
    fn bytes_are_short() {
        assert_eq!([0, 1023, 1024, 1_258_291, 37_854_000].map(bytes), ["0", "1023", "1.0Ki", "1.2Mi", "36Mi"]);
    }
}
