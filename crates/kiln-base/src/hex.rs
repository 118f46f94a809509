use std::fmt::Write;

/// Bytes in lower-case hex, two digits each.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_two_digits() {
        assert_eq!(hex([0x00, 0x0f, 0xa0, 0xff]), "000fa0ff");
        assert_eq!(hex([]), "");
    }
}
