//! A row of a scenario's table.

use crate::figures::Figures;

/// The parameters of one row of a scenario's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    /// The distinguishing name of the row; empty if the scenario has only one kind.
    pub(crate) name: &'static str,
    pub(crate) subscribers: usize,
    /// Changes per burst; `None` if the load has no bursts.
    pub(crate) batch: Option<usize>,
}

/// One row and its figures in one run.
pub(crate) type Sample = (Variant, Figures);
