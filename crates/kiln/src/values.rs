//! Parsing and formatting of sizes, counts and durations.

use std::time::Duration;

pub use kiln_base::{parse_bytes, plural};
pub use kiln_catalog::values::bytes;

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
}
