//! The chunks of a WebP: its size, and the Huffman codes of the lossless streams that are decoded.

use super::memory::{Header, truncated};
use super::vp8l;
use crate::webp::chunks;

/// A frame of an animation begins with its place and size.
const FRAME_HEADER: usize = 16;

pub(super) fn header(bytes: &[u8]) -> Result<Header, String> {
    let mut size = None;
    let mut tables: u64 = 0;
    let mut seen_frame = false;
    for chunk in chunks(bytes.get(12..).unwrap_or_default()) {
        // Decoders allocate what a chunk claims to hold.
        let data = chunk.data.ok_or_else(truncated)?;
        let first = match size {
            Some(first) => first,
            None => own_size(&chunk.name, data).ok_or("it begins with another chunk than an image")?,
        };
        size = Some(first);
        let mut add = |name: [u8; 4], data: &[u8], (width, height)| {
            let bytes = match &name {
                b"VP8L" => vp8l::table_bytes(data, None)?,
                // Compressed without loss, too, if it is compressed.
                b"ALPH" if data.first().is_some_and(|flags| flags & 3 == 1) => {
                    vp8l::table_bytes(&data[1..], Some((width, height)))?
                }
                _ => 0,
            };
            tables = tables.max(bytes);
            Ok::<_, String>(())
        };
        match &chunk.name {
            b"ANMF" if !seen_frame => {
                seen_frame = true;
                let head = data.first_chunk::<FRAME_HEADER>().ok_or_else(truncated)?;
                let frame = (u24(head, 6) + 1, u24(head, 9) + 1);
                for part in chunks(&data[FRAME_HEADER..]) {
                    add(part.name, part.data.ok_or_else(truncated)?, frame)?;
                }
            }
            name => add(*name, data, first)?,
        }
    }
    let (width, height) = size.ok_or_else(truncated)?;
    // A lossy frame of an animation with transparency: luma and chroma, transparency, RGBA, the canvas, and RGB.
    Ok(Header { width, height, pixel_bytes: 16, extra: tables, file: 0 })
}

fn u24(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], 0])
}

/// The size of the image that begins with this chunk.
fn own_size(name: &[u8; 4], data: &[u8]) -> Option<(u32, u32)> {
    match name {
        b"VP8 " => {
            let head = data.first_chunk::<10>()?;
            let side = |at: usize| u32::from(u16::from_le_bytes([head[at], head[at + 1]]) & 0x3fff);
            Some((side(6), side(8)))
        }
        b"VP8L" => {
            let head = data.first_chunk::<5>()?;
            let bits = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
            Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => {
            let head = data.first_chunk::<10>()?;
            Some((u24(head, 4) + 1, u24(head, 7) + 1))
        }
        _ => None,
    }
}
