//! Draws the screen of `kubefan top`: the process, the caches, and the subscribers below them.
//! Lines that do not fit into the terminal are left out.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Style, Stylize},
    text::Line,
    widgets::{Clear, Paragraph},
};

use super::sample::{CACHES, SUBSCRIBER_COLUMNS, Shown};
use crate::cli::{subscribers::SortBy, visible::visible};

/// Width of the names in the summary.
const NAME_WIDTH: usize = 11;
/// The least lines of the caches, with their header, where there are as many caches.
const CACHE_LINES_MIN: u16 = 4;
/// The least lines of the subscribers, with title and header. With fewer they are left out.
const SUBSCRIBER_LINES_MIN: u16 = 4;

const KEYS: &str = "q quit  ? help  ↑↓ scroll  l lag  b bytes  a age  i identity";
/// No line is longer than a narrow terminal.
const HELP: [&str; 15] = [
    "q, Esc, ctrl-C    quit",
    "↑ ↓, k j          scroll the caches by one",
    "PgUp PgDn, space  by a page",
    "Home End, g G     to the first, to the last",
    "l b a i           subscribers by lag, bytes, age, identity",
    "?, h              this help",
    "",
    "EVENTS/S  received from the apiserver, once for all",
    "LAG       events that wait for the client furthest behind,",
    "          and since when; + if some are no longer retained",
    "PROVED    when the apiserver last proved the state",
    "",
    "A narrow terminal has fewer columns;",
    "kubefan top --once has all.",
    "kubefan disconnect ID ends a stream.",
];

/// The user's choices.
#[derive(Debug)]
pub(super) struct View {
    /// The order of the subscribers.
    pub(super) sort: SortBy,
    /// Whether the keys are explained.
    pub(super) shows_help: bool,
    /// The caches above the first that is shown.
    scrolled: usize,
    /// The caches that fit, as last drawn.
    page: usize,
}

impl Default for View {
    fn default() -> Self {
        Self { sort: SortBy::Lag, shows_help: false, scrolled: 0, page: 1 }
    }
}

impl View {
    /// Scrolls down by this many caches.
    pub(super) fn scroll(&mut self, caches: isize) {
        self.scrolled = self.scrolled.saturating_add_signed(caches);
    }

    /// Scrolls down by this many pages.
    pub(super) fn scroll_page(&mut self, pages: isize) {
        self.scroll(pages.saturating_mul(self.page as isize));
    }
}

/// The summary in lines of at most this width, broken between figures.
pub(super) fn lines(summary: &[(&'static str, Vec<String>)], width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, figures) in summary {
        let indent = if name.is_empty() { 0 } else { NAME_WIDTH };
        let mut line = format!("{name:<indent$}");
        let mut is_first = true;
        for figure in figures {
            if !is_first && line.chars().count() + 2 + figure.chars().count() >= width {
                lines.push(format!("{line},"));
                line = " ".repeat(indent);
                is_first = true;
            }
            line = if is_first { line + figure } else { format!("{line}, {figure}") };
            is_first = false;
        }
        lines.push(line);
    }
    lines
}

/// Draws the state, or the problem that keeps it from being current.
pub(super) fn draw(frame: &mut Frame<'_>, shown: Option<&Shown>, problem: Option<&str>, view: &mut View) {
    let width = frame.area().width;
    let summary = shown.map(|shown| lines(&shown.summary, width.into())).unwrap_or_default();
    let rows = [summary.len() as u16, 1].map(Constraint::Length);
    let [top, gap, middle, bottom] =
        Layout::vertical([rows[0], rows[1], Constraint::Fill(1), Constraint::Length(1)]).areas(frame.area());
    if let Some(problem) = problem {
        frame.render_widget(Line::from(visible(&format!("{problem}; trying again"))).fg(Color::Red).bold(), gap);
    }
    frame.render_widget(Line::from(KEYS.dim()), bottom);
    if let Some(shown) = shown {
        let summary: Vec<_> = summary.into_iter().map(Line::from).collect();
        frame.render_widget(Paragraph::new(summary), top);
        draw_tables(frame, middle, shown, problem.is_some(), view);
    }
    if view.shows_help {
        frame.render_widget(Clear, middle);
        frame.render_widget(Paragraph::new(HELP.map(Line::from).to_vec()), middle);
    }
}

fn draw_tables(frame: &mut Frame<'_>, area: Rect, shown: &Shown, is_old: bool, view: &mut View) {
    let wanted = shown.caches.len() as u16 + 1;
    // The caches get the lines they need, but at most half if the subscribers need lines too.
    let most = if area.height >= CACHE_LINES_MIN + SUBSCRIBER_LINES_MIN {
        (area.height / 2).max(CACHE_LINES_MIN).min(area.height - SUBSCRIBER_LINES_MIN)
    } else {
        area.height
    };
    let [upper, lower] = Layout::vertical([Constraint::Length(wanted.min(most)), Constraint::Fill(1)]).areas(area);
    view.page = usize::from(upper.height.saturating_sub(1)).max(1);
    view.scrolled = view.scrolled.min(shown.caches.len().saturating_sub(view.page));
    let caches: Vec<_> = shown.caches.iter().skip(view.scrolled).take(view.page).collect();
    let cells: Vec<_> = caches.iter().map(|cache| cache.cells.clone()).collect();
    let style_of = |is_synced| if is_synced { Style::new() } else { Style::from(Color::Yellow) };
    let table = CACHES.table(&cells, caches.iter().map(|cache| style_of(cache.is_synced)), area.width);
    frame.render_widget(if is_old { table.dim() } else { table }, upper);
    if lower.height < SUBSCRIBER_LINES_MIN {
        return;
    }
    let [gap, title, list] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Fill(1)]).areas(lower);
    let below = shown.caches.len() - view.scrolled - caches.len();
    if view.scrolled + below > 0 {
        let more = format!("{} caches above, {below} below: scroll with ↑↓", view.scrolled);
        frame.render_widget(Line::from(more.dim()), gap);
    }
    let order = match view.sort {
        SortBy::Lag => "the furthest behind first",
        SortBy::Bytes => "those that were sent the most first",
        SortBy::Age => "the oldest first",
        SortBy::Identity => "by identity",
    };
    frame.render_widget(Line::from(format!("Subscribers, {order}").bold()), title);
    match &shown.subscribers {
        Ok(rows) if rows.is_empty() => frame.render_widget(Line::from("none"), list),
        Ok(rows) => {
            let rows = &rows[..rows.len().min(list.height.into())];
            let table = SUBSCRIBER_COLUMNS.table(rows, std::iter::repeat(Style::new()), area.width);
            frame.render_widget(if is_old { table.dim() } else { table }, list);
        }
        Err(why) => frame.render_widget(Line::from(visible(&format!("not shown: {why}"))).fg(Color::Yellow), list),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::cli::top::sample::CacheRow;

    const CELLS: [&str; 10] = ["", "<all>", "json", "synced", "2000", "40", "60", "3 (0s)", "1.2Mi", "0s"];

    fn cache(name: &str, namespace: &str) -> CacheRow {
        let mut cells = CELLS.map(str::to_owned);
        [cells[0], cells[1]] = [name.to_owned(), namespace.to_owned()];
        CacheRow { cells: cells.into(), is_synced: true }
    }

    fn shown(caches: Vec<CacheRow>) -> Shown {
        let figures = ["10 subscribers", "34 connections", "10.0 deliveries/s"].map(str::to_owned);
        let subscriber = ["1a2b3c4d", "alice", "pods", "<all>", "app=web", "3 (0s)", "12Mi", "32s"];
        Shown {
            summary: vec![("", vec!["kubefan 1".to_owned()]), ("clients", figures.into())],
            caches,
            subscribers: Ok(vec![subscriber.map(str::to_owned).into()]),
        }
    }

    fn screen(width: u16, height: u16, shown: &Shown, problem: Option<&str>, view: &mut View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, Some(shown), problem, view)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_server_that_went_away_is_named_above_the_last_state() {
        let shown = shown(vec![cache("pods", "<all>")]);
        let with = |problem| screen(80, 24, &shown, problem, &mut View::default());
        let problem = with(Some("cannot reach it"));
        assert!(problem.contains("cannot reach it; trying again") && problem.contains("pods"), "{problem}");
        assert!(!with(None).contains("trying again"));
    }

    #[test]
    fn a_narrow_terminal_shows_fewer_columns_and_cuts_none() {
        let caches = || vec![cache("deployments.apps", "<all>"), cache("pods", "<all>")];
        let wide = screen(120, 24, &shown(caches()), None, &mut View::default());
        assert!(CACHES.header.iter().all(|name| wide.contains(name)), "{wide}");
        for (width, gone) in [(80, "ENCODING"), (60, "MEMORY")] {
            let narrow = screen(width, 24, &shown(caches()), None, &mut View::default());
            assert!(narrow.contains("deployments.apps") && narrow.contains("SUBSCRIBERS "), "{narrow}");
            assert!(narrow.contains("synced"), "{narrow}");
            assert!(!narrow.contains(gone), "{narrow}");
        }
        let named = screen(80, 24, &shown(vec![cache("pods", "a"), cache("pods", "b")]), None, &mut View::default());
        assert!(named.contains("NAMESPACE"), "it tells two caches apart: {named}");
    }

    #[test]
    fn the_help_fits_into_a_narrow_terminal() {
        assert!(HELP.iter().chain([&KEYS]).all(|line| line.chars().count() <= 60));
    }

    #[test]
    fn figures_are_not_cut_but_continue_in_the_next_line() {
        let lines = lines(&shown(vec![]).summary, 40);
        let expected =
            ["kubefan 1", "clients    10 subscribers,", "           34 connections,", "           10.0 deliveries/s"];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_view_scrolls_as_far_as_there_are_caches() {
        let shown = shown((0..30).map(|number| cache(&format!("kind-{number}."), "<all>")).collect());
        let mut view = View::default();
        let mut after = |caches| {
            view.scroll(caches);
            screen(80, 24, &shown, None, &mut view)
        };
        assert!(after(0).contains("kind-0.") && !after(0).contains("kind-29."));
        assert!(!after(1).contains("kind-0."));
        assert!(after(isize::MAX).contains("kind-29."));
        assert!(!after(-1).contains("kind-29."), "one page is not left");
        assert!(after(isize::MIN).contains("kind-0."));
    }

    #[test]
    fn any_size_is_drawn() {
        let shown = shown((0..5).map(|number| cache(&format!("kind-{number}"), "<all>")).collect());
        for (width, height) in [(1, 1), (10, 3), (20, 8), (200, 100)] {
            screen(width, height, &shown, Some("gone"), &mut View { shows_help: width == 20, ..View::default() });
        }
    }

    #[test]
    fn who_may_not_see_the_subscribers_reads_why() {
        let shown = Shown { subscribers: Err("403: forbidden".to_owned()), ..shown(vec![cache("pods", "<all>")]) };
        assert!(screen(80, 24, &shown, None, &mut View::default()).contains("not shown: 403: forbidden"));
    }
}
