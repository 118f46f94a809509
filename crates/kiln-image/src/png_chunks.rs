//! The chunks of a PNG file: what the decoder gets to see of them, and the texts in them.
//!
//! The decoder inflates colour profiles while it reads the header, before the memory of an image is known. Nothing here
//! needs them, so they are left out, and so are texts, which are read here with a limit.

use std::borrow::Cow;

use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";
/// Chunks that decide the pixels.
const PIXELS: [&[u8; 4]; 5] = [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"];
/// The keyword of metadata that may hold the orientation.
const XMP: &[u8] = b"XML:com.adobe.xmp\0";
/// Length, name and checksum of a chunk.
const FRAME: usize = 12;

/// A chunk of a file.
pub(crate) struct Chunk<'a> {
    pub kind: [u8; 4],
    pub data: &'a [u8],
    /// Data and frame. Shorter than it should be at the end of a truncated file.
    whole: &'a [u8],
}

impl Chunk<'_> {
    fn is_sound(&self) -> bool {
        self.whole.len() == self.data.len() + FRAME
            && self.whole.last_chunk::<4>() == Some(&crc(&self.whole[4..self.whole.len() - 4]).to_be_bytes())
    }
}

/// Iterates over the chunks, to the end of the image or of the file.
pub(crate) fn chunks(bytes: &[u8]) -> impl Iterator<Item = Chunk<'_>> {
    let mut rest = bytes.strip_prefix(SIGNATURE).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = u32::from_be_bytes(*rest.first_chunk::<4>()?) as usize;
        let kind = *rest.get(4..)?.first_chunk::<4>()?;
        let (whole, after) = rest.split_at_checked(length.saturating_add(FRAME)).unwrap_or((rest, &[]));
        rest = if &kind == b"IEND" { &[] } else { after };
        Some(Chunk { kind, data: &whole[8..whole.len().min(8 + length)], whole })
    })
}

/// Whether the file has its last chunk.
pub(crate) fn is_complete(bytes: &[u8]) -> bool {
    chunks(bytes).any(|chunk| &chunk.kind == b"IEND")
}

/// The file as the decoder gets it: pixels, and what may hold the orientation.
pub(crate) fn for_decoding(bytes: &[u8]) -> Cow<'_, [u8]> {
    if chunks(bytes).all(|chunk| PIXELS.contains(&&chunk.kind)) {
        return Cow::Borrowed(bytes);
    }
    let mut out = SIGNATURE.to_vec();
    let (mut exif, mut xmp) = (false, false);
    for chunk in chunks(bytes) {
        let first = |seen: &mut bool| !std::mem::replace(seen, true);
        let keep = match &chunk.kind {
            b"eXIf" => first(&mut exif),
            b"iTXt" => chunk.data.starts_with(XMP) && first(&mut xmp),
            kind => PIXELS.contains(&kind),
        };
        if keep {
            out.extend(chunk.whole);
        }
    }
    Cow::Owned(out)
}

/// The text under a keyword; `None` inside if it is damaged or longer than `limit`.
pub(crate) fn text(bytes: &[u8], keyword: &str, limit: usize) -> Option<Option<String>> {
    let found = chunks(bytes).find_map(|chunk| {
        let data = chunk.data.strip_prefix(keyword.as_bytes())?.strip_prefix(&[0])?;
        let is_text = matches!(&chunk.kind, b"tEXt" | b"zTXt" | b"iTXt") && chunk.is_sound();
        is_text.then_some((chunk.kind, data))
    });
    let (kind, data) = found?;
    Some(match &kind {
        b"tEXt" => (data.len() <= limit).then(|| latin1(data)),
        b"zTXt" => data.split_first().and_then(|(_, data)| Some(latin1(&inflate(data, limit)?))),
        _ => international(data, limit),
    })
}

/// A text in UTF-8, behind the language and a translated keyword.
fn international(data: &[u8], limit: usize) -> Option<String> {
    let (&[is_compressed, _method], data) = data.split_first_chunk::<2>()?;
    let text = data.splitn(3, |byte| *byte == 0).nth(2)?;
    let text = match is_compressed {
        0 if text.len() > limit => return None,
        0 => text.to_vec(),
        _ => inflate(text, limit)?,
    };
    String::from_utf8(text).ok()
}

fn inflate(data: &[u8], limit: usize) -> Option<Vec<u8>> {
    decompress_to_vec_zlib_with_limit(data, limit).ok()
}

fn latin1(data: &[u8]) -> String {
    data.iter().map(|byte| char::from(*byte)).collect()
}

/// Where the header ends; `None` if the file has none.
pub(crate) fn header_end(bytes: &[u8]) -> Option<usize> {
    let header = chunks(bytes).next().filter(|chunk| &chunk.kind == b"IHDR")?;
    Some(SIGNATURE.len() + header.whole.len())
}

/// A chunk with its frame.
pub(crate) fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut out = (data.len() as u32).to_be_bytes().to_vec();
    out.extend(kind);
    out.extend(data);
    let checksum = crc(&out[4..]);
    out.extend(checksum.to_be_bytes());
    out
}

fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}
