//! `kubefan top`: the current work of a running kubefan.

mod fitted_table;
mod sample;
mod screen;

use std::{
    io::{IsTerminal, Write, stdout},
    pin::pin,
    time::Duration,
};

use clap::{Args, ValueEnum};
use crossterm::event::{Event, EventStream, KeyCode, KeyEventKind, KeyModifiers};
use futures::StreamExt;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use self::{
    sample::{Sample, Shown},
    screen::View,
};
use super::{
    admin::{Admin, AdminArgs},
    error::CliError,
    subscribers::SortBy,
    table::Columns,
    visible::print_json,
};

/// The time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// A kubefan that takes longer to answer counts as gone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Show what a running kubefan does: caches, rates, subscribers, lag, memory
///
/// The table is refreshed every second. q quits, ? shows the other keys. If stdout is no terminal,
/// or with --once, kubefan prints one table; rates are those of one second.
#[derive(Debug, Args)]
pub(super) struct TopArgs {
    /// Print one table
    #[arg(long)]
    once: bool,

    /// The format; JSON is printed once
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Output>,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// The answer of the admin port (/status)
    Json,
}

pub(super) async fn run(args: TopArgs) -> Result<(), CliError> {
    let admin = args.admin.connect().await.map_err(CliError::Plain)?;
    if args.output == Some(Output::Json) {
        let status: Value =
            admin.get("/status", &[]).await.and_then(|text| admin.parse(&text)).map_err(CliError::Plain)?;
        return Ok(print_json(&mut stdout(), &status)?);
    }
    if args.once || !stdout().is_terminal() { once(&admin).await } else { follow(&admin).await }
}

/// Prints one table.
async fn once(admin: &Admin) -> Result<(), CliError> {
    let before = Sample::take(admin, SortBy::Lag).await.map_err(CliError::Plain)?;
    sleep(INTERVAL).await;
    let shown = Sample::take(admin, SortBy::Lag).await.map_err(CliError::Plain)?.since(Some(&before));
    let mut out = stdout().lock();
    for line in screen::lines(&shown.summary, usize::MAX) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    let rows: Vec<_> =
        std::iter::once(Shown::header()).chain(shown.caches.iter().map(|cache| cache.cells.clone())).collect();
    Ok(Columns::default().print(&mut out, &rows)?)
}

/// Shows the state until the user quits.
async fn follow(admin: &Admin) -> Result<(), CliError> {
    let mut terminal = ratatui::try_init()?;
    let shown = refresh(admin, &mut terminal).await;
    ratatui::try_restore()?;
    shown
}

async fn refresh(admin: &Admin, terminal: &mut ratatui::DefaultTerminal) -> Result<(), CliError> {
    let mut before: Option<Sample> = None;
    let mut shown: Option<Shown> = None;
    let mut problem: Option<String> = None;
    let mut view = View::default();
    let mut events = EventStream::new();
    loop {
        let mut taking = pin!(timeout(ANSWER_TIMEOUT, Sample::take(admin, view.sort)));
        let mut interval = pin!(sleep(INTERVAL));
        let mut is_taken = false;
        let mut is_over = false;
        while !(is_taken && is_over) {
            tokio::select! {
                biased;
                Some(event) = events.next() => if react(&mut view, &event?) == Some(Quit) {
                    return Ok(());
                },
                sample = &mut taking, if !is_taken => {
                    match sample.unwrap_or_else(|_| Err("kubefan does not answer".to_owned())) {
                        Ok(sample) => {
                            shown = Some(sample.since(before.as_ref()));
                            before = Some(sample);
                            problem = None;
                        }
                        // The rates of a kubefan that has restarted begin anew.
                        Err(why) => {
                            before = None;
                            problem = Some(why);
                        }
                    }
                    is_taken = true;
                }
                () = &mut interval, if !is_over => is_over = true,
            }
            terminal.draw(|frame| screen::draw(frame, shown.as_ref(), problem.as_deref(), &mut view))?;
        }
    }
}

/// The user wants to quit.
#[derive(Debug, PartialEq, Eq)]
struct Quit;

/// Reacts to the user. In raw mode ctrl-C is a key, not a signal.
fn react(view: &mut View, event: &Event) -> Option<Quit> {
    match event {
        Event::Key(key) if key.kind == KeyEventKind::Press => press(view, key.code, key.modifiers),
        _ => None,
    }
}

/// Changes the view as a key asks for, with the keys of `top`, `less` and vi.
fn press(view: &mut View, code: KeyCode, modifiers: KeyModifiers) -> Option<Quit> {
    let is_control = modifiers.contains(KeyModifiers::CONTROL);
    match code {
        KeyCode::Char('c') if is_control => return Some(Quit),
        // Esc leaves the help first.
        KeyCode::Esc if view.shows_help => view.shows_help = false,
        KeyCode::Char('q') | KeyCode::Esc | KeyCode::F(10) => return Some(Quit),
        KeyCode::Char('?' | 'h') | KeyCode::F(1) => view.shows_help = !view.shows_help,
        KeyCode::Down | KeyCode::Char('j') => view.scroll(1),
        KeyCode::Up | KeyCode::Char('k') => view.scroll(-1),
        KeyCode::PageDown | KeyCode::Char(' ') => view.scroll_page(1),
        KeyCode::PageUp => view.scroll_page(-1),
        KeyCode::Home | KeyCode::Char('g') => view.scroll(isize::MIN),
        KeyCode::End | KeyCode::Char('G') => view.scroll(isize::MAX),
        KeyCode::Char('l') => view.sort = SortBy::Lag,
        KeyCode::Char('b') => view.sort = SortBy::Bytes,
        KeyCode::Char('a') => view.sort = SortBy::Age,
        KeyCode::Char('i') => view.sort = SortBy::Identity,
        _ => {}
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_quit_sort_and_show_the_help() {
        let mut view = View::default();
        let mut pressed = |code| (press(&mut view, code, KeyModifiers::NONE), view.shows_help, view.sort);
        assert_eq!(pressed(KeyCode::Char('b')), (None, false, SortBy::Bytes));
        assert_eq!(pressed(KeyCode::Char('?')), (None, true, SortBy::Bytes));
        assert_eq!(pressed(KeyCode::Esc), (None, false, SortBy::Bytes), "Esc leaves the help");
        assert_eq!(pressed(KeyCode::Esc).0, Some(Quit));
        assert_eq!(pressed(KeyCode::Char('q')).0, Some(Quit));
        assert_eq!(pressed(KeyCode::Char('c')).0, None);
        assert_eq!(press(&mut View::default(), KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Quit));
    }
}
