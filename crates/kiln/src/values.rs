//! Parsing and formatting of sizes, counts and durations.

use std::time::Duration;

pub use kiln_base::parse_bytes;

/// Formats a number of bytes: `3.2 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats a count: `3.88 billion`, `12,345`.
pub fn count(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.2} billion", n as f64 / 1e9),
        1_000_000.. => format!("{:.2} million", n as f64 / 1e6),
        1000.. => format!("{},{:03}", n / 1000, n % 1000),
        _ => n.to_string(),
    }
}

/// Formats a count with its noun: `1 step`, `2 steps`.
pub fn plural(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Formats a duration with at most two units: `40s`, `3m 5s`, `2h 10m`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        _ => format!("{}h {}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_at_most_two_units() {
        let text = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!([text(0), text(59), text(61), text(7261)], ["0s", "59s", "1m 1s", "2h 1m"]);
    }

    #[test]
    fn amounts_are_formatted_with_a_unit() {
        assert_eq!([0, 999, 1024, 1 << 30].map(bytes), ["0 B", "999 B", "1.0 KiB", "1.0 GiB"]);
        assert_eq!(
            [7, 1234, 4_560_000, 3_880_000_000].map(count),
            ["7", "1,234", "4.56 million", "3.88 billion"]
        );
    }
}
