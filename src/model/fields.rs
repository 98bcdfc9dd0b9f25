//! The fields that selectors may name, per resource: one table.
