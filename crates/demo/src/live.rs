//! The demo's live view: a few lines that are redrawn below the prompt and removed at the end, so
//! that the scrollback stays intact.
//!
//! The terminal is in raw mode while the view is open. A program that exits in raw mode leaves an
//! unusable shell. Therefore the terminal is restored when the view is dropped and on every panic.

use std::{
    io::{self, Stdout, stdout},
    panic,
    time::Duration,
};

use ratatui::{
    Frame, Terminal, TerminalOptions, Viewport,
    backend::CrosstermBackend,
    crossterm::{
        cursor, event,
        event::{Event, KeyCode, KeyEventKind, KeyModifiers},
        execute, terminal,
    },
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    symbols::line,
    text::{Line, Span},
    widgets::{LineGauge, Paragraph, Sparkline, SparklineBar},
};

use super::{Activity, Meter, Phase, Route, Sample, text};

/// Height of the table of numbers, including its header line.
const NUMBERS: u16 = 8;
const LABEL_WIDTH: usize = 36;
const NUMBER_WIDTH: usize = 20;
/// Maximum number of input events read per call.
const KEYS_MAX: usize = 64;

/// The live view.
pub struct Live {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    hints: Vec<String>,
}

/// A command given by a key press.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// Stop the demo: ctrl-C or q.
    Stop,
}

impl Live {
    /// Opens the view and switches the terminal to raw mode. `hints` are the commands to try.
    ///
    /// # Errors
    /// If the terminal does not report its cursor position.
    pub fn open(hints: Vec<String>) -> io::Result<Self> {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
        }));
        terminal::enable_raw_mode()?;
        let height = 1 + 1 + 1 + NUMBERS + 3 + 2 + u16::try_from(hints.len()).unwrap_or(0);
        let options = TerminalOptions { viewport: Viewport::Inline(height) };
        match Terminal::with_options(CrosstermBackend::new(stdout()), options) {
            Ok(terminal) => Ok(Self { terminal, hints }),
            Err(error) => {
                restore();
                Err(error)
            }
        }
    }

    /// Draws the view.
    ///
    /// # Errors
    /// The terminal's I/O error.
    pub fn show(&mut self, meter: &Meter) -> io::Result<()> {
        let hints = &self.hints;
        self.terminal.draw(|frame| draw(frame, meter, hints)).map(|_| ())
    }

    /// Reads the key presses since the last call. In raw mode ctrl-C is a key press, not a signal.
    ///
    /// # Errors
    /// The terminal's I/O error.
    pub fn key(&mut self) -> io::Result<Option<Key>> {
        for _ in 0..KEYS_MAX {
            if !event::poll(Duration::ZERO)? {
                break;
            }
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
                && (key.code == KeyCode::Char('q')
                    || key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL))
            {
                return Ok(Some(Key::Stop));
            }
        }
        Ok(None)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // Later output goes where the view was.
        let top = self.terminal.get_frame().area().as_position();
        let _ = self.terminal.clear();
        let _ = self.terminal.set_cursor_position(top);
        restore();
    }
}

/// Restores the terminal's normal mode and cursor.
pub fn restore() {
    let _ = terminal::disable_raw_mode();
    let _ = execute!(stdout(), cursor::Show);
}

fn draw(frame: &mut Frame<'_>, meter: &Meter, hints: &[String]) {
    let rows = [1, 1, 1, NUMBERS, 3, 1, 1].map(Constraint::Length);
    let [title, phase, progress, numbers, sparkline, _, try_title, try_lines] =
        Layout::vertical(rows.into_iter().chain([Constraint::Fill(1)])).areas(frame.area());
    draw_title(frame, title, meter);
    frame.render_widget(phase_line(meter), phase);
    draw_progress(frame, progress, meter);
    frame.render_widget(Paragraph::new(number_lines(meter)), numbers);
    draw_sparkline(frame, sparkline, meter);
    let Phase { route, .. } = meter.phase();
    let when = if route == Route::Kubefan {
        "Try from another terminal:"
    } else {
        "Try from another terminal, once kubefan serves:"
    };
    frame.render_widget(Line::from(when).bold(), try_title);
    frame.render_widget(
        Paragraph::new(hints.iter().map(|hint| Line::from(format!("  {hint}"))).collect::<Vec<_>>()),
        try_lines,
    );
}

fn color(route: Route) -> Color {
    match route {
        Route::Direct => Color::Yellow,
        Route::Kubefan => Color::Green,
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, meter: &Meter) {
    let options = meter.options();
    let what = format!(
        "  {} pods, {} subscribers, {} changes/s",
        text::count(options.objects as u64),
        text::count(options.subscribers as u64),
        text::count(u64::from(options.rate)),
    );
    frame.render_widget(Line::from(vec![Span::from("kubefan demo").bold(), Span::from(what)]), area);
    frame.render_widget(Line::from("ctrl-C to stop".dim()).right_aligned(), area);
}

fn phase_line(meter: &Meter) -> Line<'static> {
    let Phase { route, activity, .. } = meter.phase();
    let ready = text::count(meter.ready() as u64);
    let subscribers = text::count(meter.options().subscribers as u64);
    let what = match (activity, route) {
        (Activity::Filling, _) => "0/2  creating the objects".to_owned(),
        (_, Route::Direct) => format!("1/2  direct: each of {subscribers} subscribers watches the apiserver itself"),
        (_, Route::Kubefan) => format!("2/2  through kubefan: the same {subscribers} subscribers watch kubefan"),
    };
    let now = match activity {
        Activity::Filling | Activity::Churning => String::new(),
        Activity::Connecting => format!(" ({ready} connected)"),
        Activity::Settling => " (waiting for the last deliveries)".to_owned(),
    };
    Line::from(what + &now).fg(color(route))
}

fn draw_progress(frame: &mut Frame<'_>, area: Rect, meter: &Meter) {
    let Phase { route, elapsed, .. } = meter.phase();
    let seconds = elapsed.as_secs();
    match meter.options().duration {
        None => frame.render_widget(Line::from(format!("{seconds}s")).dim(), area),
        Some(whole) => {
            let gauge = LineGauge::default()
                .ratio((elapsed.as_secs_f64() / whole.as_secs_f64()).clamp(0.0, 1.0))
                .label(format!("{:>3}s of {}s", seconds.min(whole.as_secs()), whole.as_secs()))
                .filled_symbol(line::THICK_HORIZONTAL)
                .unfilled_symbol(line::HORIZONTAL)
                .filled_style(Style::from(color(route)))
                .unfilled_style(Style::from(Color::DarkGray));
            frame.render_widget(gauge, area);
        }
    }
}

fn number_lines(meter: &Meter) -> Vec<Line<'static>> {
    let rate = |rate: f64| text::count(rate.round() as u64);
    let unknown = || text::NOTHING.to_owned();
    let row = |label: &str, cell: &dyn Fn(&Sample) -> String| {
        let cells = Route::ALL.map(|route| {
            let text = meter.sample_of(route).map_or_else(String::new, cell);
            let style = if route == meter.phase().route { Style::from(color(route)) } else { Style::default() };
            Span::styled(format!("{text:>NUMBER_WIDTH$}"), style)
        });
        Line::from([vec![Span::from(format!("{label:<LABEL_WIDTH$}"))], cells.to_vec()].concat())
    };
    let heads = Route::ALL.map(|route| format!("{:>NUMBER_WIDTH$}", route.as_str())).concat();
    vec![
        Line::styled(format!("{:LABEL_WIDTH$}{heads}", ""), Modifier::DIM),
        row("watches open at the apiserver", &|sample| text::count(sample.pod_watches)),
        row("changes/s", &|sample| rate(sample.changes)),
        row("events/s sent by the apiserver", &|sample| rate(sample.events)),
        row("bytes/s sent by the apiserver", &|sample| text::bytes(sample.bytes)),
        row("deliveries/s to subscribers", &|sample| rate(sample.deliveries)),
        row("lag from write to receipt, p50 / p99", &|sample| {
            sample.lag.map_or_else(unknown, |lag| format!("{} / {}", text::span(lag.p50), text::span(lag.p99)))
        }),
        row("memory of this process, in total", &|sample| {
            sample.resident_bytes.map_or_else(unknown, |bytes| text::bytes(bytes as f64))
        }),
    ]
}

fn draw_sparkline(frame: &mut Frame<'_>, area: Rect, meter: &Meter) {
    let [label, bars] = Layout::horizontal([Constraint::Length(14), Constraint::Fill(1)]).areas(area);
    let skip = meter.history().len().saturating_sub(usize::from(bars.width));
    let most = meter.history().skip(skip).map(|(_, rate)| rate).max().unwrap_or(0);
    let labels =
        vec![Line::from(""), Line::from("deliveries/s"), Line::from(format!("max {}", text::count(most))).dim()];
    frame.render_widget(Paragraph::new(labels), label);
    let data =
        meter.history().skip(skip).map(|(route, rate)| SparklineBar::from(rate).style(Style::from(color(route))));
    frame.render_widget(Sparkline::default().data(data.collect::<Vec<_>>()).max(most.max(1)), bars);
}
