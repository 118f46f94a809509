//! The product of two packed operands in f32, tile by tile.

use crate::simd::{KC, MicrokernelArgs, Simd, dispatch};

/// The sizes of one product of packed operands.
#[derive(Clone, Copy)]
pub(crate) struct GemmSize {
    /// Rows of the left operand.
    pub rows: usize,
    /// Panels of the right operand.
    pub panels: usize,
    /// Summed columns, at most [`KC`].
    pub depth: usize,
    /// Distance between the rows of the result.
    pub stride: usize,
}

#[inline(always)]
fn multiply_kernel<S: Simd>(s: S, size: GemmSize, a: &[f32], b: &[f32], c: &mut [f32], add: bool) {
    let GemmSize { rows, panels, depth, stride } = size;
    if rows == 0 || panels == 0 {
        return;
    }
    assert!(depth <= KC && a.len() >= (rows - 1) * KC + depth);
    assert!(b.len() >= panels * depth * S::TILE_COLS);
    assert!(stride >= panels * S::TILE_COLS && c.len() >= (rows - 1) * stride + panels * S::TILE_COLS);
    let mut row = 0;
    while row < rows {
        let count = S::TILE_ROWS.min(rows - row);
        for panel in 0..panels {
            // SAFETY: the lengths were checked above; count is 1 to TILE_ROWS.
            unsafe {
                let a_rows = a.as_ptr().add(row * KC);
                // The next rows come from memory; the panels are still in the cache since they were packed.
                let next = if panel == 0 { a_rows.wrapping_add(count * KC) } else { a_rows };
                let args = MicrokernelArgs {
                    a: a_rows,
                    next,
                    b: b.as_ptr().add(panel * depth * S::TILE_COLS),
                    c: c.as_mut_ptr().add(row * stride + panel * S::TILE_COLS),
                    depth,
                    stride,
                    add,
                };
                s.microkernel(args, count);
            }
        }
        row += count;
    }
}

dispatch! {
    /// [`PackedFormat::multiply`](super::PackedFormat::multiply).
    pub(super) fn multiply(size: GemmSize, a: &[f32], b: &[f32], c: &mut [f32], add: bool) => multiply_kernel;
}
