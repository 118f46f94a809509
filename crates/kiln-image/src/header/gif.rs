//! A GIF's logical screen and its first frame, which may be larger than the screen.

use super::memory::{Header, truncated, twice_and_rgb};

const EXTENSION: u8 = 0x21;
const IMAGE: u8 = 0x2c;

pub(super) fn header(bytes: &[u8]) -> Result<Header, String> {
    let head = bytes.first_chunk::<13>().ok_or_else(truncated)?;
    let (width, height) = (u16::from_le_bytes([head[6], head[7]]), u16::from_le_bytes([head[8], head[9]]));
    let colors = if head[10] & 0x80 == 0 { 0 } else { 3 << ((head[10] & 7) + 1) };
    let mut at = 13 + colors;
    let frame_pixels = loop {
        match *bytes.get(at).ok_or_else(truncated)? {
            EXTENSION => at = after_blocks(bytes, at + 2).ok_or_else(truncated)?,
            IMAGE => {
                let frame = bytes.get(at + 5..).and_then(<[u8]>::first_chunk::<4>).ok_or_else(truncated)?;
                let side = |low, high| u64::from(u16::from_le_bytes([low, high]));
                break side(frame[0], frame[1]) * side(frame[2], frame[3]);
            }
            // The decoder says what is wrong.
            _ => break 0,
        }
    };
    // The frame as RGBA, and as the numbers of its colours.
    let extra = frame_pixels * 5;
    Ok(Header { width: width.into(), height: height.into(), pixel_bytes: twice_and_rgb(4), extra, file: 0 })
}

/// The position after a sequence of data blocks.
fn after_blocks(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        let length = usize::from(*bytes.get(at)?);
        at += 1 + length;
        if length == 0 {
            return Some(at);
        }
    }
}
