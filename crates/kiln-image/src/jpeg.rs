//! The marker structure of a JPEG file: enough to find its end, and to read and write comments.

/// A marker with the data of its segment, if it has one.
pub(crate) struct Segment<'a> {
    pub marker: u8,
    pub data: &'a [u8],
}

pub(crate) const COMMENT: u8 = 0xfe;
/// The marker of EXIF and of XMP.
pub(crate) const APP1: u8 = 0xe1;
/// Most data of a segment that is written.
const MAX_SEGMENT: usize = 65_000;
const START: u8 = 0xd8;
const END: u8 = 0xd9;

/// Iterates over the markers after the start of the image, skipping compressed data. Stops after the end marker, or at
/// the end of the file.
pub(crate) fn segments(bytes: &[u8]) -> impl Iterator<Item = Segment<'_>> {
    let mut rest = bytes.strip_prefix(&[0xff, START]).unwrap_or_default();
    std::iter::from_fn(move || {
        // Also skips compressed data, where 0xff is followed by 0 or a restart marker, and fill bytes.
        let at = rest.windows(2).position(|w| w[0] == 0xff && !matches!(w[1], 0 | 1 | 0xd0..=0xd7 | 0xff))?;
        let marker = rest[at + 1];
        rest = &rest[at + 2..];
        if matches!(marker, START | END) {
            rest = if marker == END { &[] } else { rest };
            return Some(Segment { marker, data: &[] });
        }
        let length = usize::from(u16::from_be_bytes([*rest.first()?, *rest.get(1)?]));
        let data = rest.get(2..length)?;
        rest = &rest[length..];
        Some(Segment { marker, data })
    })
}

/// The size of an image, as a start of frame says it.
pub(crate) struct Frame {
    pub width: u16,
    pub height: u16,
    pub components: u8,
}

/// Iterates over the starts of frames: a sound file has one.
pub(crate) fn frames(bytes: &[u8]) -> impl Iterator<Item = Frame> {
    segments(bytes).filter_map(|segment| {
        // Between them are the markers of tables and extensions.
        let is_frame = matches!(segment.marker, 0xc0..=0xcf) && !matches!(segment.marker, 0xc4 | 0xc8 | 0xcc);
        let data = segment.data.first_chunk::<6>().filter(|_| is_frame)?;
        let side = |high, low| u16::from_be_bytes([high, low]);
        Some(Frame { width: side(data[3], data[4]), height: side(data[1], data[2]), components: data[5] })
    })
}

/// Whether the file has its end marker.
pub(crate) fn is_complete(bytes: &[u8]) -> bool {
    segments(bytes).any(|segment| segment.marker == END)
}

/// Adds `text` to `jpeg` in as many comment segments as it needs, each starting with `tag`.
pub(crate) fn with_comment(jpeg: &[u8], tag: &[u8], text: &[u8]) -> Vec<u8> {
    let segments = text.chunks(MAX_SEGMENT - tag.len()).map(|chunk| (COMMENT, [tag, chunk].concat()));
    with_segments(jpeg, segments)
}

/// Adds EXIF or XMP behind its tag, unless it is too long for a segment.
pub(crate) fn with_app1(jpeg: &[u8], tag: &[u8], block: &[u8]) -> Vec<u8> {
    let data = [tag, block].concat();
    if data.len() > MAX_SEGMENT {
        return jpeg.to_vec();
    }
    with_segments(jpeg, [(APP1, data)])
}

/// Adds segments behind the JFIF header.
fn with_segments(jpeg: &[u8], segments_to_add: impl IntoIterator<Item = (u8, Vec<u8>)>) -> Vec<u8> {
    let (start, rest) = jpeg.split_at(header_end(jpeg));
    let mut out = start.to_vec();
    for (marker, data) in segments_to_add {
        segment(&mut out, marker, &data);
    }
    out.extend(rest);
    out
}

/// Where the JFIF header ends, which has to be the first segment.
pub(crate) fn header_end(jpeg: &[u8]) -> usize {
    let end = match segments(jpeg).next() {
        Some(Segment { marker: 0xe0, data }) => 2 + 4 + data.len(),
        _ => 2,
    };
    end.min(jpeg.len())
}

/// Appends a segment.
pub(crate) fn segment(out: &mut Vec<u8>, marker: u8, data: &[u8]) {
    out.extend([0xff, marker]);
    out.extend(((2 + data.len()) as u16).to_be_bytes());
    out.extend(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_marker_inside_a_thumbnail_does_not_count() {
        let app1 = [0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9];
        let scan = [0xff, 0xda, 0, 3, 1, 0x12, 0xff, 0, 0x34, 0xff, 0xd0, 0x56];
        let mut file = [&[0xff, START], &app1[..], &scan].concat();
        assert!(!is_complete(&file));
        file.extend([0xff, 0xff, END]);
        assert!(is_complete(&file));
        for cut in 0..file.len() {
            assert!(!is_complete(&file[..cut]), "cut at {cut}");
        }
    }
}
