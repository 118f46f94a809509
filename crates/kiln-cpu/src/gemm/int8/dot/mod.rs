//! Integer dot products in vectors: 32-bit words that hold two or four values, and the instruction that multiplies and
//! sums them.

mod isa;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

pub(crate) use isa::{DotIsa, dispatch_dot};

use crate::simd::{Simd, WordTileArgs};

/// The integer dot products of one instruction set. A value of the type proves that the machine has it.
pub(crate) trait DotSimd: Copy + Send + Sync + 'static {
    /// The f32 vectors of the same instruction set.
    type S: Simd;
    /// A vector with as many words as `S` has lanes.
    type I: Copy;
    /// Values per word: four int8, or two widened to 16 bits.
    const VALUES_PER_WORD: usize;
    /// Whether the weight's values get 128 added, for an instruction that takes them unsigned. Every sum of a row is then
    /// too large by 128 times the sum of the row's activations.
    const UNSIGNED_WEIGHT: bool;
    /// Rows of the register tile; it has two vectors of columns.
    const TILE_ROWS: usize;
    const TILE_COLS: usize = 2 * Self::S::LANES;

    fn simd(self) -> Self::S;

    /// # Safety
    /// As many words as there are lanes can be read at `p`, which needs no alignment.
    unsafe fn load(self, p: *const u32) -> Self::I;

    /// `a - b`, each lane an i32, converted to f32.
    fn sub_to_f32(self, a: Self::I, b: i32) -> <Self::S as Simd>::V;

    /// Writes the low byte of each lane's bits.
    ///
    /// # Safety
    /// As many bytes as there are lanes can be written at `p`.
    unsafe fn store_bytes(self, p: *mut i8, v: <Self::S as Simd>::V);

    /// Writes a square of words of the weight as the microkernel reads it: transposed, or in an order of its own.
    ///
    /// # Safety
    /// As [`Simd::transpose`], of words.
    #[inline(always)]
    unsafe fn transpose(self, from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize) {
        // SAFETY: upheld by the caller.
        unsafe { self.simd().transpose(from.cast(), from_stride, to.cast(), to_stride) }
    }

    /// Writes a register tile of `TILE_ROWS` rows.
    ///
    /// # Safety
    /// The operands are as [`WordTileArgs`] says, and `depth` is a multiple of 16.
    unsafe fn microkernel(self, args: WordTileArgs);
}

/// Dot products of a vector of the weight with one word of the activations in every lane.
pub(crate) trait BroadcastDot: DotSimd {
    fn zero(self) -> Self::I;

    /// The word at `p` in every lane.
    ///
    /// # Safety
    /// `p` can be read; it needs no alignment.
    unsafe fn broadcast(self, p: *const u32) -> Self::I;

    /// # Safety
    /// As many words as there are lanes can be written at `p`, which needs no alignment.
    unsafe fn store(self, p: *mut u32, v: Self::I);

    /// In each lane `sum + Σ w · x` over the values of the words, modulo 2³².
    fn dot(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
}

/// Writes the tile `c[i][j] = Σ_k a[i][k] · b[k][j]`, added to what is there when `add`.
///
/// # Safety
/// `a`, `b` and `c` hold `ROWS` rows as [`WordTileArgs`] says.
#[inline(always)]
unsafe fn microkernel<D: BroadcastDot, const ROWS: usize>(d: D, t: WordTileArgs) {
    let lanes = D::S::LANES;
    let mut sums = [[d.zero(); 2]; ROWS];
    for k in 0..t.depth {
        // SAFETY: row k of b and column k of a lie inside what the caller promises.
        unsafe {
            let b = t.b.add(k * D::TILE_COLS);
            let (b0, b1) = (d.load(b), d.load(b.add(lanes)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = d.broadcast(t.a.add(i * t.a_stride + k));
                sum[0] = d.dot(sum[0], b0, a);
                sum[1] = d.dot(sum[1], b1, a);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        for (j, &sum) in sum.iter().enumerate() {
            // SAFETY: the tile's row i lies inside what the caller promises.
            unsafe {
                let c = t.c.add(i * t.stride + j * lanes);
                d.store(c, if t.add { d.add(d.load(c), sum) } else { sum });
            }
        }
    }
}
