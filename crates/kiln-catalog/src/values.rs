//! Formatting of sizes and counts.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_formatted_with_a_unit() {
        assert_eq!([0, 999, 1024, 1 << 30].map(bytes), ["0 B", "999 B", "1.0 KiB", "1.0 GiB"]);
        assert_eq!(
            [7, 1234, 4_560_000, 3_880_000_000].map(count),
            ["7", "1,234", "4.56 million", "3.88 billion"]
        );
    }
}
