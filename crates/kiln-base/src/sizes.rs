//! Sizes and counts as people write them.

/// Formats a count with its noun: `1 step`, `2 steps`.
pub fn plural(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// The verb of a count.
pub fn is_or_are(n: usize) -> &'static str {
    if n == 1 { "is" } else { "are" }
}

/// Parses a number of bytes: `500M`, `5G`, `2GiB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let invalid = || format!("`{text}` is not a size such as 500M or 5G");
    let upper = text.to_uppercase();
    let number = upper.trim_end_matches("IB").trim_end_matches('B');
    let (digits, shift) = match UNITS.iter().find(|(unit, _)| number.ends_with(*unit)) {
        Some((unit, shift)) => (number.trim_end_matches(*unit), *shift),
        None => (number, 0),
    };
    let count: u64 = digits.trim().parse().map_err(|_| invalid())?;
    count.checked_mul(1 << shift).filter(|n| *n > 0).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_a_unit_are_bytes() {
        let sizes = ["6G", "6g", "6GiB", "6144M", "6442450944"].map(|text| parse_bytes(text).unwrap());
        assert_eq!(sizes, [6 << 30; 5]);
        for invalid in ["", "0", "0G", "-1G", "six", "6X", "99999999999999999999", "99999999999T"] {
            assert!(parse_bytes(invalid).unwrap_err().contains("such as 500M or 5G"), "{invalid}");
        }
    }
}
