//! Dot products in plain Rust.

use super::{BroadcastDot, DotSimd, microkernel};
use crate::simd::{Portable, Simd, WordTileArgs};

/// Plain Rust: two 16-bit values per word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortableDot;

const LANES: usize = Portable::LANES;

impl DotSimd for PortableDot {
    type S = Portable;
    type I = [u32; LANES];
    const VALUES_PER_WORD: usize = 2;
    const UNSIGNED_WEIGHT: bool = false;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn simd(self) -> Portable {
        Portable
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> Self::I {
        // SAFETY: the trait's contract; the read needs no alignment.
        unsafe { p.cast::<Self::I>().read_unaligned() }
    }

    #[inline(always)]
    fn sub_to_f32(self, a: Self::I, b: i32) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = (a[i] as i32).wrapping_sub(b) as f32;
        }
        out
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, v: [f32; LANES]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: the trait's contract.
            unsafe { p.add(i).write(v.to_bits() as i8) };
        }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: WordTileArgs) {
        // SAFETY: the trait's contract.
        unsafe { microkernel::<Self, { PortableDot::TILE_ROWS }>(self, args) }
    }
}

impl BroadcastDot for PortableDot {
    #[inline(always)]
    fn zero(self) -> Self::I {
        [0; LANES]
    }

    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> Self::I {
        // SAFETY: as above.
        [unsafe { p.read_unaligned() }; LANES]
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u32, v: Self::I) {
        // SAFETY: as above.
        unsafe { p.cast::<Self::I>().write_unaligned(v) }
    }

    #[inline(always)]
    fn dot(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        let mut out = sum;
        for i in 0..LANES {
            let low = i32::from(w[i] as i16) * i32::from(x[i] as i16);
            let high = i32::from((w[i] >> 16) as i16) * i32::from((x[i] >> 16) as i16);
            out[i] = sum[i].wrapping_add((low + high) as u32);
        }
        out
    }

    #[inline(always)]
    fn add(self, a: Self::I, b: Self::I) -> Self::I {
        let mut out = a;
        for i in 0..LANES {
            out[i] = a[i].wrapping_add(b[i]);
        }
        out
    }
}
