//! Draws what `kubefan top` shows.

use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Style, Stylize},
    text::Line,
    widgets::{Paragraph, Row, Table},
};

use super::sample::Shown;

/// The least width of each column of [`Shown::header`].
const WIDTHS: [u16; 10] = [24, 12, 9, 10, 9, 9, 11, 12, 9, 7];

/// Draws the state, or the problem that keeps it from being current. The first `scrolled` caches
/// are left out.
pub(super) fn draw(frame: &mut Frame<'_>, shown: Option<&Shown>, problem: Option<&str>, scrolled: usize) {
    let summary = shown.map_or(0, |shown| shown.summary.len() as u16);
    let rows = [Constraint::Length(summary), Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)];
    let [top, gap, middle, bottom] = Layout::vertical(rows).areas(frame.area());
    if let Some(problem) = problem {
        frame.render_widget(Line::from(format!("{problem}; trying again")).fg(Color::Red).bold(), gap);
    }
    frame.render_widget(Line::from("q quits, up and down scroll".dim()), bottom);
    let Some(shown) = shown else { return };
    frame.render_widget(Paragraph::new(shown.summary.iter().map(|line| Line::from(&**line)).collect::<Vec<_>>()), top);
    let rows = shown.caches.iter().skip(scrolled).map(|cache| {
        let row = Row::new(cache.cells.iter().map(|cell| &**cell));
        if cache.is_synced { row } else { row.style(Style::from(Color::Yellow)) }
    });
    let header = Row::new(Shown::header()).style(Style::new().bold().reversed());
    let table = Table::new(rows, WIDTHS.map(Constraint::Min)).header(header).column_spacing(1);
    frame.render_widget(if problem.is_some() { table.dim() } else { table }, middle);
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::cli::top::sample::CacheRow;

    fn screen(problem: Option<&str>, scrolled: usize) -> String {
        let cells = |name: &str| vec![name.to_owned(), "<all>".to_owned(), "json".to_owned(), "synced".to_owned()];
        let caches = ["nodes", "pods"].map(|name| CacheRow { cells: cells(name), is_synced: true });
        let shown = Shown { summary: vec!["kubefan 1".to_owned()], caches: caches.into() };
        let mut terminal = Terminal::new(TestBackend::new(100, 8)).unwrap();
        terminal.draw(|frame| draw(frame, Some(&shown), problem, scrolled)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_server_that_went_away_is_named_above_the_last_state() {
        let shown = screen(Some("cannot reach it"), 0);
        assert!(shown.contains("cannot reach it; trying again") && shown.contains("pods"), "{shown}");
        assert!(!screen(None, 0).contains("trying again"));
    }

    #[test]
    fn scrolling_leaves_out_the_first() {
        assert!(screen(None, 0).contains("nodes") && !screen(None, 1).contains("nodes"));
        assert!(screen(None, 1).contains("pods"));
    }
}
