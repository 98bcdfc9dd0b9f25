//! Ages as kubectl and the apiserver print them.

/// An age in seconds, formatted like `HumanDuration` in apimachinery's `util/duration`.
pub fn human_duration(seconds: i64) -> String {
    let two = |big: i64, unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{unit}"),
        small => format!("{big}{unit}{small}{small_unit}"),
    };
    let minutes = seconds / 60;
    let hours = seconds / 3600;
    let days = hours / 24;
    let years = hours / 24 / 365;
    match seconds {
        // Clocks may differ by a second; a larger difference is an error.
        ..-1 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        0..120 => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, "m", seconds % 60, "s"),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, "h", minutes % 60, "m"),
        _ if hours < 48 => format!("{hours}h"),
        _ if hours < 24 * 8 => two(days, "d", hours % 24, "h"),
        _ if hours < 24 * 365 * 2 => format!("{days}d"),
        _ if hours < 24 * 365 * 8 => two(years, "y", days % 365, "d"),
        _ => format!("{years}y"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_formatted_like_those_of_kubectl() {
        const DAY: i64 = 86_400;
        let cases = [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (150, "2m30s"),
            (600, "10m"),
            (179 * 60, "179m"),
            (3 * 3600, "3h"),
            (5 * 3600 + 60, "5h1m"),
            (47 * 3600, "47h"),
            (3 * DAY + 4 * 3600, "3d4h"),
            (8 * DAY, "8d"),
            (729 * DAY, "729d"),
            (730 * DAY, "2y"),
            (800 * DAY, "2y70d"),
            (9 * 365 * DAY, "9y"),
        ];
        for (seconds, text) in cases {
            assert_eq!(human_duration(seconds), text, "{seconds}");
        }
    }
}
