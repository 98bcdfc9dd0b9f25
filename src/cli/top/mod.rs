//! `kubefan top`: what a running kubefan does now.

mod sample;
mod screen;

use std::{
    io::{IsTerminal, Write, stdout},
    time::Duration,
};

use clap::{Args, ValueEnum};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::sample::{Sample, Shown};
use super::{
    admin::{Admin, AdminArgs},
    error::CliError,
    table::Columns,
};

/// The time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// A kubefan that takes longer to answer counts as gone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often keys are looked at.
const KEYS_INTERVAL: Duration = Duration::from_millis(50);

/// Input events that are read at a time.
const KEYS_MAX: usize = 64;

/// Show what a running kubefan does: caches, rates, subscribers, memory
///
/// It is refreshed every second. q quits. If stdout is no terminal, or with --once, it prints one
/// table; rates are those of one second.
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
    /// The state as the admin port tells it (/status)
    Json,
}

pub(super) async fn run(args: TopArgs) -> Result<(), CliError> {
    let admin = args.admin.connect().await.map_err(CliError::Plain)?;
    if args.output == Some(Output::Json) {
        let status: Value =
            admin.get("/status", &[]).await.and_then(|text| admin.parse(&text)).map_err(CliError::Plain)?;
        return Ok(writeln!(stdout(), "{status:#}")?);
    }
    match args.once || !stdout().is_terminal() {
        true => once(&admin).await,
        false => follow(&admin).await,
    }
}

/// Prints one table.
async fn once(admin: &Admin) -> Result<(), CliError> {
    let before = Sample::take(admin).await.map_err(CliError::Plain)?;
    sleep(INTERVAL).await;
    let shown = Sample::take(admin).await.map_err(CliError::Plain)?.since(Some(&before));
    let mut out = stdout().lock();
    for line in &shown.summary {
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
    let (mut before, mut shown, mut problem): (Option<Sample>, Option<Shown>, Option<String>) = (None, None, None);
    let mut scrolled = 0;
    loop {
        let next = Instant::now() + INTERVAL;
        let mut taking = Box::pin(timeout(ANSWER_TIMEOUT, Sample::take(admin)));
        let mut taken = None;
        while taken.is_none() || Instant::now() < next {
            tokio::select! {
                biased;
                sample = &mut taking, if taken.is_none() => {
                    match sample.unwrap_or_else(|_| Err("kubefan does not answer".to_owned())) {
                        Ok(sample) => {
                            shown = Some(sample.since(before.as_ref()));
                            (before, problem) = (Some(sample), None);
                        }
                        // The rates of a kubefan that has restarted begin anew.
                        Err(why) => (before, problem) = (None, Some(why)),
                    }
                    taken = Some(());
                }
                () = sleep_until((Instant::now() + KEYS_INTERVAL).min(next.max(Instant::now() + Duration::from_millis(1)))) => {}
            }
            match command()? {
                Some(Command::Quit) => return Ok(()),
                Some(Command::Down) => scrolled += 1,
                Some(Command::Up) => scrolled = usize::saturating_sub(scrolled, 1),
                None => {}
            }
            let most = shown.as_ref().map_or(0, |shown| shown.caches.len().saturating_sub(1));
            scrolled = scrolled.min(most);
            terminal.draw(|frame| screen::draw(frame, shown.as_ref(), problem.as_deref(), scrolled))?;
        }
    }
}

enum Command {
    Quit,
    Up,
    Down,
}

/// What the user wants, of the keys since the last call. In raw mode ctrl-C is a key, not a signal.
fn command() -> std::io::Result<Option<Command>> {
    for _ in 0..KEYS_MAX {
        if !event::poll(Duration::ZERO)? {
            break;
        }
        let Event::Key(key) = event::read()? else { continue };
        if key.kind != KeyEventKind::Press {
            continue;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Ok(Some(Command::Quit)),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(Some(Command::Quit)),
            KeyCode::Down | KeyCode::Char('j') => return Ok(Some(Command::Down)),
            KeyCode::Up | KeyCode::Char('k') => return Ok(Some(Command::Up)),
            _ => {}
        }
    }
    Ok(None)
}
