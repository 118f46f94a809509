//! The few EXIF fields a recipe travels in: `Software` says who wrote it, `UserComment` holds the text.

const SOFTWARE: u16 = 0x0131;
const EXIF_DIRECTORY: u16 = 0x8769;
const USER_COMMENT: u16 = 0x9286;
const UNICODE: &[u8] = b"UNICODE\0";

/// An EXIF block with `software` (ASCII) and `comment`, the latter in UTF-16 as the standard wants it.
pub(crate) fn write(software: &str, comment: &str) -> Vec<u8> {
    let software = [software.as_bytes(), &[0]].concat();
    let mut text = UNICODE.to_vec();
    text.extend(comment.encode_utf16().flat_map(u16::to_le_bytes));

    // Header, the first directory with two entries, the second with one, then what the entries point at.
    let (first, second) = (8u32, 8 + 2 + 2 * 12 + 4);
    let data = second + 2 + 12 + 4;
    let padded = software.len().next_multiple_of(2);
    let mut out = b"II*\0".to_vec();
    out.extend(first.to_le_bytes());
    out.extend(2u16.to_le_bytes());
    entry(&mut out, SOFTWARE, 2, software.len() as u32, data);
    entry(&mut out, EXIF_DIRECTORY, 4, 1, second);
    out.extend(0u32.to_le_bytes());
    out.extend(1u16.to_le_bytes());
    entry(&mut out, USER_COMMENT, 7, text.len() as u32, data + padded as u32);
    out.extend(0u32.to_le_bytes());
    out.extend(&software);
    out.resize(data as usize + padded, 0);
    out.extend(text);
    out
}

fn entry(out: &mut Vec<u8>, tag: u16, kind: u16, count: u32, value: u32) {
    out.extend(tag.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(value.to_le_bytes());
}

/// The comment of an EXIF block that `software` wrote, if this is one.
pub(crate) fn read(exif: &[u8], software: &str) -> Option<String> {
    let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let tiff = match exif.get(..4)? {
        b"II*\0" => Tiff { bytes: exif, big_endian: false },
        b"MM\0*" => Tiff { bytes: exif, big_endian: true },
        _ => return None,
    };
    let first = tiff.u32(4)?;
    let writer = tiff.data(tiff.find(first, SOFTWARE)?)?;
    if !writer.starts_with(software.as_bytes()) {
        return None;
    }
    let second = tiff.u32(tiff.find(first, EXIF_DIRECTORY)? + 8)?;
    let text = tiff.data(tiff.find(second, USER_COMMENT)?)?.strip_prefix(UNICODE)?;
    let units = text.as_chunks::<2>().0.iter().map(|&pair| tiff.word(pair));
    char::decode_utf16(units).collect::<Result<_, _>>().ok()
}

struct Tiff<'a> {
    bytes: &'a [u8],
    big_endian: bool,
}

impl<'a> Tiff<'a> {
    fn word(&self, bytes: [u8; 2]) -> u16 {
        if self.big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) }
    }

    fn u16(&self, at: usize) -> Option<u16> {
        Some(self.word(*self.bytes.get(at..)?.first_chunk()?))
    }

    fn u32(&self, at: usize) -> Option<usize> {
        let bytes = *self.bytes.get(at..)?.first_chunk()?;
        Some(if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) } as usize)
    }

    /// Where the entry with `tag` starts in the directory at `directory`.
    fn find(&self, directory: usize, tag: u16) -> Option<usize> {
        let count = usize::from(self.u16(directory)?);
        (0..count).map(|i| directory + 2 + i * 12).find(|&at| self.u16(at) == Some(tag))
    }

    /// The bytes of an entry of single bytes: inside it where they fit, else where it points.
    fn data(&self, entry: usize) -> Option<&'a [u8]> {
        let count = self.u32(entry + 4)?;
        let at = if count <= 4 { entry + 8 } else { self.u32(entry + 8)? };
        self.bytes.get(at..at.checked_add(count)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for comment in ["", "{}", "grüße 🌸"] {
            for software in ["kiln", "kiln 1.2.3"] {
                assert_eq!(read(&write(software, comment), "kiln").as_deref(), Some(comment));
            }
        }
    }

    #[test]
    fn the_comment_of_another_program_is_not_ours() {
        assert_eq!(read(&write("camera", "{}"), "kiln"), None);
    }

    #[test]
    fn damaged_blocks_hold_no_comment() {
        let whole = write("kiln", "{\"seed\":1}");
        for cut in 0..whole.len() {
            assert_eq!(read(&whole[..cut], "kiln"), None, "cut at {cut}");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            // No result is wrong here, only a panic would be.
            let _ = read(&bytes, "kiln");
        }
    }
}
