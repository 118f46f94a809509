//! Vectors in plain Rust.

use kiln_tensor::{bf16, f16};

use super::microkernel::microkernel_by_rows;
use super::{MicrokernelArgs, Simd};
use crate::isa::{Isa, Level};

/// Arrays of four, for which every target has registers; the compiler vectorises the loops over them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

const LANES: usize = 4;

/// Makes a vector of an expression for lane `i`.
macro_rules! lanes {
    ($i:ident => $lane:expr) => {{
        let mut out = [0.0f32; LANES];
        for $i in 0..LANES {
            out[$i] = $lane;
        }
        out
    }};
}

/// Rounds once where that is one instruction. Elsewhere `mul_add` would call the C library, and the fastest way to round
/// once in f64 makes a product twelve times slower.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if Isa::Portable.fuses_multiply_add() { a.mul_add(b, c) } else { a * b + c }
}

impl Simd for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn level(self) -> Level {
        Level::Portable
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the trait's contract; the read needs no alignment.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: as above.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> Self::V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from(bits[i]) << 16))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: Self::V) {
        let mut out = [0u16; LANES];
        for i in 0..LANES {
            let bits = v[i].to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            let bits = if v[i].is_nan() { bits | 0x40_0000 } else { rounded };
            out[i] = (bits >> 16) as u16;
        }
        // SAFETY: as above.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(out) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> Self::V {
        // SAFETY: as above.
        let halves = unsafe { p.cast::<[f16; LANES]>().read_unaligned() };
        lanes!(i => halves[i].to_f32())
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes!(i => fma(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // Adding and subtracting 1.5 · 2^23 rounds anything below 2^22 to an integer, without a call.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(i => (a[i] + MAGIC) - MAGIC)
    }

    #[inline(always)]
    fn swap_pairs(self, a: Self::V) -> Self::V {
        lanes!(i => a[i ^ 1])
    }

    #[inline(always)]
    fn mul_exp2(self, x: Self::V, n: Self::V) -> Self::V {
        // In two steps, so that neither power of two leaves the range of f32.
        lanes!(i => {
            let n = n[i] as i32;
            let half = n >> 1;
            let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
            x[i] * power(half) * power(n - half)
        })
    }

    #[inline(always)]
    fn prefetch(self, _: *const f32) {}

    #[inline(always)]
    unsafe fn microkernel(self, args: MicrokernelArgs, rows: usize) {
        microkernel_by_rows!(self, args, rows; 1 2 3 4)
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..LANES {
            for j in 0..LANES {
                // SAFETY: the trait's contract.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }
}
