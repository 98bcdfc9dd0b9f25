//! `kubefan auth can-i`: asks the admin port of a running kubefan what a user may read, and why.

use std::{io::stdout, path::PathBuf, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use reqwest::{Certificate, ClientBuilder, StatusCode, Url, redirect};
use serde::Deserialize;

use super::{
    error::CliError,
    select::{CredentialArgs, SelectArgs},
    table::Columns,
};
use kubefan_common::text::innermost;

/// A running kubefan answers within this time; a review may wait for its turn.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

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
/// It lists what it asks the apiserver, and says which verdicts were cached: those about exactly
/// this user, with its uid and all extras that kubefan does not ignore. Exit codes: 0 for yes, 1
/// for no, 2 if that cannot be determined.
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

#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
struct AdminArgs {
    /// The address of kubefan's admin port: HOST:PORT, https://HOST:PORT or unix:PATH
    #[arg(long = "admin", env = "KUBEFAN_ADMIN", value_name = "ADDRESS", default_value = "127.0.0.1:7444")]
    address: String,

    #[command(flatten)]
    credentials: CredentialArgs,
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
    let AdminArgs { address, .. } = &args.admin;
    let (client, base) = args.admin.client().await?;
    let mut url = base.join("/can-i").map_err(|error| format!("--admin {address}: {error}"))?;
    url.query_pairs_mut().extend_pairs(query);
    // Others could read a token on the way.
    let sends_token = url.scheme() == "https" || address.starts_with("unix:");
    let mut request = client.get(url);
    if let Some(token) = args.admin.token()?.filter(|_| sends_token) {
        request = request.bearer_auth(token);
    }
    let unreachable = |error: reqwest::Error| {
        let cause = innermost(&error);
        format!("cannot reach the admin port of kubefan at {address}: {cause}; is `kubefan serve` running?")
    };
    let answer = request.send().await.map_err(unreachable)?;
    let status = answer.status();
    let text = answer.text().await.map_err(unreachable)?;
    match status {
        StatusCode::OK => serde_json::from_str(&text)
            .map_err(|_| format!("{address} is not the admin port of a kubefan of this version (--admin)")),
        StatusCode::NOT_FOUND => Err(format!("{address} is not the admin port of a kubefan of this version (--admin)")),
        _ => Err(format!("{}: {}", status.as_u16(), text.trim_end())),
    }
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

impl AdminArgs {
    /// A client, and the URL of the port.
    async fn client(&self) -> Result<(reqwest::Client, Url), String> {
        let Self { address, credentials: CredentialArgs { ca_file, .. } } = self;
        // Fails if there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = ClientBuilder::new()
            .timeout(ANSWER_TIMEOUT)
            // A redirect would send the token to another host.
            .redirect(redirect::Policy::none())
            .no_proxy();
        if let Some(file) = ca_file {
            let bytes =
                tokio::fs::read(file).await.map_err(|error| format!("--ca-file {}: {error}", file.display()))?;
            let certificates =
                Certificate::from_pem_bundle(&bytes).ok().filter(|certificates| !certificates.is_empty());
            let certificates =
                certificates.ok_or(format!("--ca-file {}: it has no PEM certificate", file.display()))?;
            builder = builder.tls_certs_only(certificates);
        }
        let url = match address.strip_prefix("unix:") {
            Some(path) => {
                builder = builder.unix_socket(PathBuf::from(path));
                "http://localhost".to_owned()
            }
            None if address.contains("://") => address.clone(),
            None => format!("http://{address}"),
        };
        let url: Url =
            url.parse().map_err(|_| format!("--admin {address}: write it like 127.0.0.1:7444 or unix:PATH"))?;
        let client = builder.build().map_err(|error| innermost(&error).to_string())?;
        Ok((client, url))
    }

    fn token(&self) -> Result<Option<String>, String> {
        if let Some(file) = &self.credentials.token_file {
            let token =
                std::fs::read_to_string(file).map_err(|error| format!("--token-file {}: {error}", file.display()))?;
            return Ok(Some(token.trim().to_owned()));
        }
        let given = self.credentials.token.as_ref().map(|given| given.read(std::io::stdin()));
        given.transpose().map_err(|error| error.to_string())
    }
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

/// What a review is about, with kubectl's flags.
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
