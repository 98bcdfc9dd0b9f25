//! Label and field selectors, in kubectl's syntax.
