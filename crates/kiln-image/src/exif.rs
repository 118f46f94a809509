//! The EXIF fields that hold a recipe: `Software` names the writer, `UserComment` is the text.

const SOFTWARE: u16 = 0x0131;
const EXIF_DIRECTORY: u16 = 0x8769;
const USER_COMMENT: u16 = 0x9286;
const UNICODE: &[u8] = b"UNICODE\0";

/// Returns an EXIF block with `software` (ASCII) and `comment` (UTF-16, as the standard requires).
pub(crate) fn write(software: &str, comment: &str) -> Vec<u8> {
    let software = [software.as_bytes(), &[0]].concat();
    let mut text = UNICODE.to_vec();
    text.extend(comment.encode_utf16().flat_map(u16::to_le_bytes));

    // Header, the first directory with two entries, the second with one, then the data of the entries.
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

/// Returns the comment of an EXIF block, if `software` wrote it.
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

/// A TIFF structure, which EXIF blocks are.
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

    /// Returns the offset of the entry with `tag` in the directory at `directory`.
    fn find(&self, directory: usize, tag: u16) -> Option<usize> {
        let count = usize::from(self.u16(directory)?);
        (0..count).map(|i| directory + 2 + i * 12).find(|&at| self.u16(at) == Some(tag))
    }

    /// Returns the bytes of a byte-typed entry: inline if at most four, else at the offset it holds.
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
    fn written_comments_are_read_back() {
        for comment in ["", "{}", "grüße 🌸"] {
            for software in ["kiln", "kiln 1.2.3"] {
                assert_eq!(read(&write(software, comment), "kiln").as_deref(), Some(comment));
            }
        }
    }

    #[test]
    fn comments_of_other_programs_are_ignored() {
        assert_eq!(read(&write("camera", "{}"), "kiln"), None);
    }

    #[test]
    fn damaged_blocks_have_no_comment_and_never_panic() {
        let whole = write("kiln", "{\"seed\":1}");
        for cut in 0..whole.len() {
            assert_eq!(read(&whole[..cut], "kiln"), None, "cut at {cut}");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            // Any result is right, as long as it does not panic.
            let _ = read(&bytes, "kiln");
        }
    }
}
