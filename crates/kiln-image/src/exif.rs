//! The EXIF fields of generated images: `Software` names the writer, `MakerNote` holds the recipe, and `UserComment` the
//! description that A1111 writes there. Older files of Kiln have the recipe as their comment.

/// Start of the JPEG segment that holds EXIF.
pub(crate) const JPEG_TAG: &[u8] = b"Exif\0\0";
const SOFTWARE: u16 = 0x0131;
const EXIF_DIRECTORY: u16 = 0x8769;
const MAKER_NOTE: u16 = 0x927c;
const USER_COMMENT: u16 = 0x9286;
const UNICODE: &[u8] = b"UNICODE\0";
/// Start of the recipe's note, before its UTF-8.
const NOTE_TAG: &[u8] = b"kiln:";

/// Returns an EXIF block with `software` (ASCII), a recipe and a comment, if they are given.
///
/// It is big-endian: many programs read a UTF-16 comment as big-endian whatever the block says.
pub(crate) fn write(software: &str, recipe: Option<&str>, comment: Option<&str>) -> Vec<u8> {
    let software = [software.as_bytes(), &[0]].concat();
    let note = recipe.map(|recipe| (MAKER_NOTE, [NOTE_TAG, recipe.as_bytes()].concat()));
    let comment = comment.map(|comment| {
        let mut text = UNICODE.to_vec();
        text.extend(comment.encode_utf16().flat_map(u16::to_be_bytes));
        (USER_COMMENT, text)
    });
    // In the order of their tags.
    let fields: Vec<(u16, Vec<u8>)> = note.into_iter().chain(comment).collect();

    // Header, the first directory with two entries, the second with the fields, then the data of the entries.
    let (first, second) = (8u32, 8 + 2 + 2 * 12 + 4);
    let mut data = second + 2 + 12 * fields.len() as u32 + 4;
    let mut place = |bytes: &[u8]| {
        let at = data;
        data += bytes.len().next_multiple_of(2) as u32;
        at
    };
    let mut out = b"MM\0*".to_vec();
    out.extend(first.to_be_bytes());
    out.extend(2u16.to_be_bytes());
    entry(&mut out, SOFTWARE, 2, software.len() as u32, place(&software));
    entry(&mut out, EXIF_DIRECTORY, 4, 1, second);
    out.extend(0u32.to_be_bytes());
    out.extend((fields.len() as u16).to_be_bytes());
    for (tag, bytes) in &fields {
        entry(&mut out, *tag, 7, bytes.len() as u32, place(bytes));
    }
    out.extend(0u32.to_be_bytes());
    for bytes in std::iter::once(&software).chain(fields.iter().map(|(_, bytes)| bytes)) {
        out.extend(bytes);
        out.resize(out.len().next_multiple_of(2), 0);
    }
    out
}

fn entry(out: &mut Vec<u8>, tag: u16, kind: u16, count: u32, value: u32) {
    out.extend(tag.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(count.to_be_bytes());
    out.extend(value.to_be_bytes());
}

/// Returns the recipe of an EXIF block, if `software` wrote it.
pub(crate) fn read(exif: &[u8], software: &str) -> Option<String> {
    let exif = exif.strip_prefix(JPEG_TAG).unwrap_or(exif);
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
    let note = tiff.find(second, MAKER_NOTE).and_then(|entry| tiff.data(entry)?.strip_prefix(NOTE_TAG));
    if let Some(note) = note {
        return String::from_utf8(note.to_vec()).ok();
    }
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
    fn written_recipes_are_read_back() {
        for recipe in ["", "{}", "grüße 🌸"] {
            for (software, comment) in [("kiln", None), ("kiln 1.2.3", Some("a fox\nSteps: 4"))] {
                let block = write(software, Some(recipe), comment);
                assert_eq!(read(&block, "kiln").as_deref(), Some(recipe));
            }
        }
    }

    #[test]
    fn the_comment_is_big_endian_utf_16() {
        let block = write("kiln", None, Some("aé"));
        let expected = [UNICODE, &[0, b'a', 0, 0xe9]].concat();
        assert!(block.windows(expected.len()).any(|bytes| bytes == expected), "{block:?}");
    }

    #[test]
    fn a_comment_of_an_older_file_is_its_recipe() {
        assert_eq!(read(&write("kiln", None, Some("{\"seed\":1}")), "kiln").as_deref(), Some("{\"seed\":1}"));
    }

    #[test]
    fn recipes_of_other_programs_are_ignored() {
        assert_eq!(read(&write("camera", Some("{}"), None), "kiln"), None);
    }

    #[test]
    fn damaged_blocks_have_no_recipe_and_never_panic() {
        let whole = write("kiln", Some("{\"seed\":10}"), None);
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
