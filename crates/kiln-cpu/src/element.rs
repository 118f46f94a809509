//! The number formats that kernels load and store. Kernels compute in f32.

use bytemuck::Pod;
use kiln_tensor::{DType, bf16, f16};

use crate::simd::{MAX_LANES, Simd};

/// A number format that kernels load: of weights or activations.
pub(crate) trait Scalar: Pod + Send + Sync {
    /// # Safety
    /// `S::LANES` values can be read at `p`, which needs no alignment.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;

    fn widen(self) -> f32;
}

/// A number format of activations, which kernels load and store.
pub(crate) trait Element: Scalar {
    const DTYPE: DType;

    /// # Safety
    /// `S::LANES` values can be written at `p`, which needs no alignment.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);

    /// Stores two consecutive vectors.
    ///
    /// # Safety
    /// `2 · S::LANES` values can be written at `p`, which needs no alignment.
    unsafe fn store_two<S: Simd>(s: S, p: *mut Self, a: S::V, b: S::V);

    /// A non-temporal [`Element::store_two`], where format and machine support it. Other threads see it only after an
    /// `sfence`.
    ///
    /// # Safety
    /// As [`Element::store_two`]; `p` is a multiple of 64 bytes.
    #[inline(always)]
    unsafe fn stream_two<S: Simd>(s: S, p: *mut Self, a: S::V, b: S::V) {
        // SAFETY: upheld by the caller.
        unsafe { Self::store_two(s, p, a, b) }
    }
}

impl Scalar for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: upheld by the caller.
        unsafe { s.load(p) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Scalar for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const bf16) -> S::V {
        // SAFETY: upheld by the caller.
        unsafe { s.load_bf16(p) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Scalar for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f16) -> S::V {
        // SAFETY: upheld by the caller.
        unsafe { s.load_f16(p) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut f32, v: S::V) {
        // SAFETY: upheld by the caller.
        unsafe { s.store(p, v) }
    }

    #[inline(always)]
    unsafe fn store_two<S: Simd>(s: S, p: *mut f32, a: S::V, b: S::V) {
        // SAFETY: upheld by the caller.
        unsafe {
            s.store(p, a);
            s.store(p.add(S::LANES), b);
        }
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut bf16, v: S::V) {
        // SAFETY: upheld by the caller.
        unsafe { s.store_bf16(p, v) }
    }

    #[inline(always)]
    unsafe fn store_two<S: Simd>(s: S, p: *mut bf16, a: S::V, b: S::V) {
        // SAFETY: upheld by the caller.
        unsafe { s.store_two_bf16(p, a, b) }
    }

    #[inline(always)]
    unsafe fn stream_two<S: Simd>(s: S, p: *mut bf16, a: S::V, b: S::V) {
        // SAFETY: upheld by the caller.
        unsafe { s.stream_two_bf16(p, a, b) }
    }
}

/// Loads the vector at `x[i..]`, with zeros past the end.
#[inline(always)]
pub(crate) fn read<S: Simd, T: Scalar>(s: S, x: &[T], i: usize) -> S::V {
    let rest = &x[i..];
    if rest.len() >= S::LANES {
        // SAFETY: just checked.
        return unsafe { T::load(s, rest.as_ptr()) };
    }
    let mut lanes = [T::zeroed(); MAX_LANES];
    lanes[..rest.len()].copy_from_slice(rest);
    // SAFETY: MAX_LANES is at least LANES.
    unsafe { T::load(s, lanes.as_ptr()) }
}

/// Stores the vector to `x[i..]`, except for lanes past the end.
#[inline(always)]
pub(crate) fn write<S: Simd, T: Element>(s: S, x: &mut [T], i: usize, v: S::V) {
    let rest = &mut x[i..];
    if rest.len() >= S::LANES {
        // SAFETY: just checked.
        return unsafe { T::store(s, rest.as_mut_ptr(), v) };
    }
    let mut lanes = [T::zeroed(); MAX_LANES];
    // SAFETY: MAX_LANES is at least LANES.
    unsafe { T::store(s, lanes.as_mut_ptr(), v) };
    rest.copy_from_slice(&lanes[..rest.len()]);
}

/// Loads a whole vector from the start of `x`.
#[inline(always)]
pub(crate) fn load<S: Simd, T: Scalar>(s: S, x: &[T]) -> S::V {
    assert!(x.len() >= S::LANES);
    // SAFETY: just checked; with slices out of `chunks_exact` the compiler drops the check.
    unsafe { T::load(s, x.as_ptr()) }
}

/// Stores a whole vector to the start of `x`.
#[inline(always)]
pub(crate) fn store<S: Simd, T: Element>(s: S, x: &mut [T], v: S::V) {
    assert!(x.len() >= S::LANES);
    // SAFETY: just checked.
    unsafe { T::store(s, x.as_mut_ptr(), v) }
}

/// Converts `to.len()` values to another format.
#[inline(always)]
pub(crate) fn convert<S: Simd, T: Scalar, U: Element>(s: S, from: &[T], to: &mut [U]) {
    assert!(from.len() >= to.len());
    let whole = to.len() / (2 * S::LANES) * (2 * S::LANES);
    // No iterators: in some kernels they are not inlined.
    for i in (0..whole).step_by(2 * S::LANES) {
        // SAFETY: i + 2 · LANES <= whole, and both are at least that long.
        unsafe {
            let from = from.as_ptr().add(i);
            let (a, b) = (T::load(s, from), T::load(s, from.add(S::LANES)));
            U::store_two(s, to.as_mut_ptr().add(i), a, b);
        }
    }
    for i in (whole..to.len()).step_by(S::LANES) {
        write(s, to, i, read(s, from, i));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Isa, Level};
    use crate::simd::dispatch;

    dispatch! {
        fn convert_slice<T: Scalar, U: Element>(from: &[T], to: &mut [U]) => convert;
    }

    #[test]
    fn every_set_rounds_to_bf16_like_the_half_crate() {
        let mut values: Vec<f32> =
            (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(21_474_837))).collect();
        values.extend([
            f32::NAN,
            -f32::NAN,
            f32::INFINITY,
            f32::MAX,
            1e-40,
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
        ]);
        let expected: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        for isa in Isa::available() {
            let mut out = vec![bf16::ZERO; values.len()];
            convert_slice(Level::detect(isa).unwrap(), &values, &mut out);
            let bits: Vec<u16> = out.iter().map(|x| x.to_bits()).collect();
            assert!(bits == expected, "{isa}");
        }
    }

    #[test]
    fn every_set_loads_bf16_and_f16() {
        let bf: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let half: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for isa in Isa::available() {
            let level = Level::detect(isa).unwrap();
            let mut out = vec![0f32; 65536];
            convert_slice(level, &bf, &mut out);
            let same = |x: f32, y: f32| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
            assert!(out.iter().zip(&bf).all(|(&x, y)| same(x, y.to_f32())), "{isa} bf16");
            convert_slice(level, &half, &mut out);
            assert!(out.iter().zip(&half).all(|(&x, y)| same(x, y.to_f32())), "{isa} f16");
        }
    }
}
