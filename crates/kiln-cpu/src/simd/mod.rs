//! Vectors of f32, behind one trait for all instruction sets.
//!
//! A kernel is written once, generic over [`Simd`], as an `#[inline(always)]` function whose first argument is the
//! token `s: S`. [`dispatch!`](crate::simd::dispatch) makes an entry point that takes a [`Level`](crate::isa::Level) and
//! compiles the kernel once per instruction set. Kernels don't use closures on vectors: a closure is a function of its
//! own, compiled without the instruction set unless the optimiser happens to inline it.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dispatch;
mod microkernel;
#[cfg(target_arch = "aarch64")]
mod mmla;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod sum;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{Bf16Tiles, Int8Tiles, LeftOperand, TILE_BF16, TILE_BYTES, TileOperands, TileRegisters};
pub(crate) use dispatch::dispatch;
pub(crate) use microkernel::KC;
#[cfg(target_arch = "aarch64")]
pub(crate) use mmla::{MMLA_TILE, mmla_tile, pair_columns};
pub(crate) use portable::Portable;
pub(crate) use sum::Sum;

use kiln_tensor::{bf16, f16};

use crate::isa::Level;

/// Lanes of the widest vector.
pub(crate) const MAX_LANES: usize = 16;

/// The vector operations of one instruction set. A value of the type proves that the machine has it.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// [`Simd::LANES`] f32.
    type V: Copy;
    const LANES: usize;
    /// Rows of the register tile of a matrix product (MR).
    const TILE_ROWS: usize;
    /// Columns of that tile (NR).
    const TILE_COLS: usize = 2 * Self::LANES;

    /// The instruction set that it proves, to call one kernel from another.
    fn level(self) -> Level;

    fn splat(self, x: f32) -> Self::V;

    /// # Safety
    /// `LANES` values can be read at `p`, which needs no alignment.
    unsafe fn load(self, p: *const f32) -> Self::V;

    /// # Safety
    /// `LANES` values can be written at `p`, which needs no alignment.
    unsafe fn store(self, p: *mut f32, v: Self::V);

    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_bf16(self, p: *const bf16) -> Self::V;

    /// Rounds to nearest even, as `bf16::from_f32` does.
    ///
    /// # Safety
    /// As [`Simd::store`].
    unsafe fn store_bf16(self, p: *mut bf16, v: Self::V);

    /// [`Simd::store_bf16`] of two consecutive vectors.
    ///
    /// # Safety
    /// `2 · LANES` values can be written at `p`, which needs no alignment.
    #[inline(always)]
    unsafe fn store_two_bf16(self, p: *mut bf16, a: Self::V, b: Self::V) {
        // SAFETY: upheld by the caller.
        unsafe {
            self.store_bf16(p, a);
            self.store_bf16(p.add(Self::LANES), b);
        }
    }

    /// A non-temporal [`Simd::store_two_bf16`], where the machine supports it. Other threads see it only after an
    /// `sfence`.
    ///
    /// # Safety
    /// As [`Simd::store_two_bf16`]; `p` is a multiple of 64 bytes.
    #[inline(always)]
    unsafe fn stream_two_bf16(self, p: *mut bf16, a: Self::V, b: Self::V) {
        // SAFETY: upheld by the caller.
        unsafe { self.store_two_bf16(p, a, b) }
    }

    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_f16(self, p: *const f16) -> Self::V;

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once if the set [fuses](crate::Isa::fuses_multiply_add).
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of the two; `b` when one is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of the two; `b` when one is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer.
    fn round(self, a: Self::V) -> Self::V;
    /// Swaps the two lanes of every pair of neighbours.
    fn swap_pairs(self, a: Self::V) -> Self::V;
    /// `x · 2^n` for integers `n` from -252 to 254.
    fn mul_exp2(self, x: Self::V, n: Self::V) -> Self::V;

    /// Prefetches the cache line at `p`, which may be any address.
    fn prefetch(self, p: *const f32);

    /// Writes the tile `c[i][j] = Σ_k a[i][k] · b[k][j]`, added to what is there when `add`.
    ///
    /// # Safety
    /// `a` holds `rows` rows of `depth` values, [`KC`] apart; `b` holds `depth` rows of `TILE_COLS`
    /// values; `c` can take `rows` rows of `TILE_COLS` values, `stride` apart. `1 <= rows <= TILE_ROWS`.
    unsafe fn microkernel(self, args: MicrokernelArgs, rows: usize);

    /// Writes the transpose of a square of `LANES × LANES` values.
    ///
    /// # Safety
    /// `from` holds `LANES` rows of `LANES` values, `from_stride` apart; `to` can take as much, `to_stride` apart.
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// The operands of [`Simd::microkernel`].
#[derive(Clone, Copy)]
pub(crate) struct MicrokernelArgs {
    pub a: *const f32,
    pub b: *const f32,
    pub c: *mut f32,
    /// What is read after this tile, prefetched meanwhile: one cache line per step of the sum.
    pub next: *const f32,
    pub depth: usize,
    pub stride: usize,
    pub add: bool,
}

/// The operands of a register tile whose values are packed in 32-bit words: bytes, 16-bit integers or bf16. The tile is
/// `c[i][j] = Σ_k a[i][k] · b[k][j]`, added to what is there when `add`.
#[derive(Clone, Copy)]
pub(crate) struct WordTileArgs {
    /// Rows of `depth` words, `a_stride` apart.
    pub a: *const u32,
    pub a_stride: usize,
    /// `depth` rows of words, one for every column of the tile.
    pub b: *const u32,
    /// Rows of sums, `stride` apart.
    pub c: *mut u32,
    pub stride: usize,
    pub depth: usize,
    pub add: bool,
}

/// The sum of the lanes, the upper half added to the lower one again and again. Of several vectors: [`Sum`].
#[inline(always)]
pub(crate) fn reduce_add<S: Simd>(s: S, v: S::V) -> f32 {
    let mut lanes = to_array(s, v);
    let mut width = S::LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// The largest lane; NaN if there is one.
#[inline(always)]
pub(crate) fn reduce_max<S: Simd>(s: S, v: S::V) -> f32 {
    let lanes = to_array(s, v);
    let mut max = lanes[0];
    for &x in &lanes[1..S::LANES] {
        max = if x > max || x.is_nan() { x } else { max };
    }
    max
}

#[inline(always)]
fn to_array<S: Simd>(s: S, v: S::V) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: MAX_LANES is at least LANES.
    unsafe { s.store(lanes.as_mut_ptr(), v) };
    lanes
}
