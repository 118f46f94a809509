//! Text files as the programs of every system write them.

use std::io::{self, ErrorKind};

/// Decodes a text file: UTF-8, or UTF-16 if it begins with a byte order mark, as Windows PowerShell's `>` and Notepad may write
/// it. The mark is no part of the text.
///
/// ```
/// assert_eq!(kiln_base::decode_text(b"\xef\xbb\xbfa fox".into()).unwrap(), "a fox");
/// assert_eq!(kiln_base::decode_text(b"\xff\xfea\0".into()).unwrap(), "a");
/// ```
pub fn decode_text(mut bytes: Vec<u8>) -> io::Result<String> {
    match &bytes[..] {
        [0xff, 0xfe, rest @ ..] => return decode_utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => return decode_utf16(rest, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, ..] => drop(bytes.drain(..3)),
        _ => {}
    }
    String::from_utf8(bytes)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error.utf8_error().to_string()))
}

fn decode_utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> io::Result<String> {
    let (units, rest) = bytes.as_chunks();
    let units: Vec<u16> = units.iter().copied().map(unit).collect();
    let text = String::from_utf16(&units).ok().filter(|_| rest.is_empty());
    text.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "it begins as UTF-16 and is none"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_every_editor_are_read() {
        let text = "ein Käfer, 🐞\r\n";
        let utf16 = |mark: u16, bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            std::iter::once(mark).chain(text.encode_utf16()).flat_map(bytes).collect()
        };
        for bytes in [
            text.into(),
            [b"\xef\xbb\xbf", text.as_bytes()].concat(),
            utf16(0xfeff, u16::to_le_bytes),
            utf16(0xfeff, u16::to_be_bytes),
        ] {
            assert_eq!(decode_text(bytes).unwrap(), text);
        }
        assert_eq!(decode_text(Vec::new()).unwrap(), "");
    }

    #[test]
    fn what_is_no_text_is_an_error() {
        for bytes in [&b"K\x84fer"[..], b"\xff\xfea", b"\xff\xfe\0\xd8", b"\xef\xbb\xbf\xff"] {
            assert_eq!(decode_text(bytes.into()).unwrap_err().kind(), ErrorKind::InvalidData);
        }
    }
}
