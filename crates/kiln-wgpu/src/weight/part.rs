//! Parts of weights: as many rows of one format as one kernel can see.

use std::ops::Range;
use std::sync::Arc;

use kiln_ops::{Residency, Result};

use super::rows::WeightRows;
use crate::context::Context;
use crate::device::DeviceBuffer;

/// Rows of a weight in one buffer.
pub(crate) struct Part {
    /// The first row, counted over all parts.
    pub first: usize,
    pub rows: usize,
    pub format: &'static str,
    /// Words from one row to the next.
    pub stride: usize,
    /// Columns that share a scale, for fp8 in tiles.
    pub tile: usize,
    storage: Storage,
}

enum Storage {
    Device(DeviceBuffer),
    /// Rows of host matrices, uploaded for every use.
    Host(Vec<(Arc<WeightRows>, Range<usize>)>),
}

/// Distributes the rows of stacked matrices over parts.
pub(crate) fn parts(cx: &Context, sources: Vec<WeightRows>, residency: Residency) -> Result<Vec<Part>> {
    let room = cx.gpu().max_binding();
    let mut parts: Vec<Part> = Vec::new();
    let mut first = 0;
    for source in sources.into_iter().map(Arc::new) {
        let most = (room / (4 * source.stride).max(1)).max(1);
        let mut from = 0;
        while from < source.count {
            let fits = |part: &&mut Part| {
                (part.format, part.stride, part.tile) == (source.format, source.stride, source.tile)
                    && part.rows < most
            };
            let taken = match parts.last_mut().filter(fits) {
                Some(part) => part.push(&source, from, most - part.rows),
                None => {
                    let mut part = Part {
                        first,
                        rows: 0,
                        format: source.format,
                        stride: source.stride,
                        tile: source.tile,
                        storage: Storage::Host(Vec::new()),
                    };
                    let taken = part.push(&source, from, most);
                    parts.push(part);
                    taken
                }
            };
            from += taken;
            first += taken;
        }
    }
    if residency == Residency::Device {
        for part in &mut parts {
            part.storage = Storage::Device(part.buffer(cx)?);
        }
    }
    Ok(parts)
}

impl Part {
    /// A part that is on the device already.
    pub fn resident(
        first: usize,
        rows: usize,
        format: &'static str,
        stride: usize,
        buffer: DeviceBuffer,
    ) -> Part {
        Part { first, rows, format, stride, tile: 1, storage: Storage::Device(buffer) }
    }

    /// Appends up to `most` rows of a matrix from row `from` on; returns how many.
    fn push(&mut self, source: &Arc<WeightRows>, from: usize, most: usize) -> usize {
        let count = most.min(source.count - from);
        if let Storage::Host(pieces) = &mut self.storage {
            pieces.push((Arc::clone(source), from..from + count));
        }
        self.rows += count;
        count
    }

    /// The output columns of its rows.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    /// Its rows on the device: uploaded, if they are kept on the host.
    pub fn buffer(&self, cx: &Context) -> Result<DeviceBuffer> {
        let pieces = match &self.storage {
            Storage::Device(buffer) => return Ok(buffer.clone()),
            Storage::Host(pieces) => pieces,
        };
        let row_bytes = 4 * self.stride;
        let buffer = cx.allocate(self.rows * row_bytes)?;
        let mut at = 0;
        for (source, rows) in pieces {
            // A few megabytes at a time, where rows have to be laid out anew.
            let step = (PIECE_BYTES / row_bytes.max(1)).max(1);
            for start in rows.clone().step_by(step) {
                let piece = start..rows.end.min(start + step);
                let bytes = source.bytes(piece.clone())?;
                cx.write(&buffer, at, &bytes)?;
                at += piece.len() * row_bytes;
            }
        }
        Ok(buffer)
    }
}

const PIECE_BYTES: usize = 16 << 20;
