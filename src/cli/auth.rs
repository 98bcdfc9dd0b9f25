//! `kubefan auth can-i`: asks the admin port of a running kubefan what a user may read, and why.

use std::io::stdout;

use clap::{Args, Subcommand, ValueEnum};
use serde::Deserialize;

use super::{admin::AdminArgs, error::CliError, select::SelectArgs, table::Columns};

/// Find out what callers may read
#[derive(Debug, Args)]
pub(super) struct AuthArgs {
    #[command(subcommand)]
    command: AuthCommand,
}

#[derive(Debug, Subcommand)]
enum AuthCommand {
    CanI(CanIArgs),
}

/// Ask a running kubefan what a user may read, and why
///
/// The command lists its questions to the apiserver, and the verdicts that were cached: those about
/// exactly this user, with its uid and all extras that kubefan does not ignore. Exit codes: 0 for
/// yes, 1 for no, 2 if that cannot be determined.
#[derive(Debug, Args)]
struct CanIArgs {
    /// The verb
    #[arg(value_enum)]
    verb: Verb,

    // Not a doc comment: rustdoc would take the brackets for a link.
    #[arg(
        required = true,
        num_args = 1..=2,
        value_name = "TYPE [NAME]",
        help = "TYPE, TYPE NAME or TYPE/NAME; a type by any name that kubectl accepts"
    )]
    what: Vec<String>,

    /// The user
    #[arg(long = "as", value_name = "USER", help_heading = "User")]
    user: String,

    /// A group of the user; repeat it for several. Without any, a service account is in its own
    /// groups
    #[arg(long = "as-group", value_name = "GROUP", help_heading = "User")]
    groups: Vec<String>,

    /// The uid of the user
    #[arg(long = "as-uid", value_name = "UID", default_value = "", hide_default_value = true, help_heading = "User")]
    uid: String,

    /// An extra of the user; repeat it for several
    #[arg(long = "as-user-extra", value_name = "KEY=VALUE", help_heading = "User")]
    extra: Vec<String>,

    /// Print nothing, only set the exit code
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    select: SelectArgs,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Verb {
    /// One object
    Get,
    /// A list
    List,
    /// A watch
    Watch,
}

impl Verb {
    fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

/// The answer of the admin port.
#[derive(Debug, Deserialize)]
struct Explanation {
    allowed: bool,
    reason: String,
    reviews: Vec<Review>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    verb: String,
    group: String,
    resource: String,
    namespace: String,
    name: String,
    label_selector: String,
    field_selector: String,
    allowed: bool,
    reason: String,
    cached: bool,
}

pub(super) async fn run(args: AuthArgs) -> Result<(), CliError> {
    let AuthCommand::CanI(args) = args.command;
    let explanation = ask(&args).await.map_err(|problem| CliError::Undetermined(Some(format!("error: {problem}"))))?;
    if !args.quiet {
        print(&explanation)?;
    }
    if explanation.allowed { Ok(()) } else { Err(CliError::Printed) }
}

async fn ask(args: &CanIArgs) -> Result<Explanation, String> {
    let query = query(args)?;
    let admin = args.admin.connect().await?;
    admin.parse(&admin.get("/can-i", &query).await?)
}

fn query(args: &CanIArgs) -> Result<Vec<(&'static str, String)>, String> {
    let selected = args.select.parse(&args.what).map_err(|error| error.to_string())?;
    let (resource, name) = match &*selected {
        [one] if one.names.len() <= 1 => (&one.resource, one.names.first()),
        _ => return Err("ask about one type, or about one object".to_owned()),
    };
    let target = args.select.target(resource, name.map(String::as_str));
    let one = |name, value: &String| (!value.is_empty()).then(|| (name, value.clone()));
    let single = [
        one("resource", &target.resource),
        one("namespace", &target.namespace),
        one("name", &target.name),
        one("labelSelector", &target.label_selector),
        one("fieldSelector", &target.field_selector),
        one("user", &args.user),
        one("uid", &args.uid),
    ];
    let mut query = vec![("verb", args.verb.as_str().to_owned())];
    query.extend(single.into_iter().flatten());
    query.extend(args.groups.iter().map(|group| ("group", group.clone())));
    query.extend(args.extra.iter().map(|extra| ("extra", extra.clone())));
    Ok(query)
}

fn print(explanation: &Explanation) -> Result<(), CliError> {
    let because = |reason: &str| if reason.is_empty() { String::new() } else { format!(" - {reason}") };
    let mut rows = vec![vec![format!("{}{}", yes_or_no(explanation.allowed), because(&explanation.reason))]];
    let mut out = stdout().lock();
    Columns::default().print(&mut out, &rows)?;
    if explanation.reviews.is_empty() {
        return Ok(());
    }
    rows = vec![["ASKED", "ANSWER", "CACHED", "REASON"].map(str::to_owned).to_vec()];
    rows.extend(explanation.reviews.iter().map(|review| {
        vec![
            asked(review),
            yes_or_no(review.allowed).to_owned(),
            yes_or_no(review.cached).to_owned(),
            review.reason.clone(),
        ]
    }));
    Ok(Columns::default().print(&mut out, &rows)?)
}

fn yes_or_no(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

/// Describes the subject of a review, with kubectl's flags.
fn asked(review: &Review) -> String {
    let Review { verb, group, resource, namespace, name, label_selector, field_selector, .. } = review;
    let mut text = format!("{verb} {resource}");
    let mut add = |before: &str, value: &str| {
        if !value.is_empty() {
            text += before;
            text += value;
        }
    };
    add(".", group);
    add(" ", name);
    add(" -n ", namespace);
    add(" -l ", label_selector);
    add(" --field-selector ", field_selector);
    if namespace.is_empty() {
        text += " -A";
    }
    text
}
