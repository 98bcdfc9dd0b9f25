//! Formats numbers for people.

use std::time::Duration;

/// Shown if there is no number.
pub(super) const NOTHING: &str = "-";

/// `1,234,567`.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `512 B`, `36.1 MiB`.
pub(super) fn bytes(number: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = number;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// `850 µs`, `1.2 ms`, `3.4 s`.
pub(super) fn span(duration: Duration) -> String {
    match duration.as_micros() {
        micros @ ..1_000 => format!("{micros} µs"),
        micros @ 1_000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        micros => format!("{:.1} s", micros as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_for_people() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 1023.0, 1024.0, 37_854_000.0].map(bytes), ["0 B", "1023 B", "1.0 KiB", "36.1 MiB"]);
        let spans = [850, 1_240, 3_400_000].map(|micros| span(Duration::from_micros(micros)));
        assert_eq!(spans, ["850 µs", "1.2 ms", "3.4 s"]);
    }
}
