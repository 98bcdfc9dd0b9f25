//! A table that leaves out columns where the terminal is too narrow for all, so that no name is cut
//! beside its neighbour.

use ratatui::{
    layout::{Alignment, Constraint},
    style::Style,
    text::{Line, Text},
    widgets::{Row, Table},
};

/// The space between two columns.
const SPACING: u16 = 2;

/// A table whose columns go one after the other where the terminal is too narrow for all. Columns
/// are named by their place in the header.
pub(super) struct Fitted {
    pub(super) header: &'static [&'static str],
    /// Numbers.
    pub(super) right: &'static [usize],
    /// A column that changes its width all the time.
    pub(super) varying: usize,
    /// The least width of that column.
    pub(super) width_min: usize,
    /// Columns that go before all others if every row has the same value there.
    pub(super) uniform: &'static [usize],
    /// Columns that go then, in this order.
    pub(super) dropped_first: &'static [usize],
}

impl Fitted {
    /// The columns that fit, and their widths.
    fn columns(&self, rows: &[Vec<String>], width: u16) -> Vec<(usize, u16)> {
        let width_of = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| Line::from(&**cell).width());
            let least = if column == self.varying { self.width_min } else { 0 };
            cells.chain([self.header[column].len(), least]).max().unwrap_or(0) as u16
        };
        let mut columns: Vec<_> = (0..self.header.len()).map(|column| (column, width_of(column))).collect();
        let is_uniform = |column: &&usize| rows.windows(2).all(|two| two[0].get(**column) == two[1].get(**column));
        let dropped = self.uniform.iter().filter(is_uniform).chain(self.dropped_first);
        for column in dropped {
            let needed: usize = columns.iter().map(|(_, width)| usize::from(*width)).sum();
            if needed + usize::from(SPACING) * columns.len().saturating_sub(1) <= usize::from(width) {
                break;
            }
            columns.retain(|(kept, _)| kept != column);
        }
        columns
    }

    /// The table. `styles` has one for each row.
    pub(super) fn table<'a>(
        &self,
        rows: &'a [Vec<String>],
        styles: impl Iterator<Item = Style>,
        width: u16,
    ) -> Table<'a> {
        let columns = self.columns(rows, width);
        let cell = |column: usize, text: &'a str| {
            let alignment = if self.right.contains(&column) { Alignment::Right } else { Alignment::Left };
            Text::from(text).alignment(alignment)
        };
        let header = Row::new(columns.iter().map(|(column, _)| cell(*column, self.header[*column])));
        let shown = rows.iter().zip(styles).map(|(row, style)| {
            let cells = columns.iter().map(|(column, _)| cell(*column, row.get(*column).map_or("", |text| text)));
            Row::new(cells.collect::<Vec<_>>()).style(style)
        });
        let widths: Vec<_> = columns.iter().map(|(_, width)| Constraint::Length(*width)).collect();
        Table::new(shown.collect::<Vec<_>>(), widths)
            .header(header.style(Style::new().bold().reversed()))
            .column_spacing(SPACING)
    }
}
