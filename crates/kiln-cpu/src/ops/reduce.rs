//! Reductions of whole tensors to one number.
//!
//! Every chunk of a fixed length is summed by itself, then the chunks in order, so that the result does not depend on the
//! number of threads.

use kiln_ops::{Result, Tensor as _, shapes};

use crate::Context;
use crate::element::{Element, read};
use crate::simd::{MAX_LANES, Simd, Sum, dispatch};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Elements of a chunk.
const CHUNK: usize = 1 << 13;

/// `Σ|x - y|` and `Σ|y|` of a chunk. Lanes beyond its end are zeros in both.
#[inline(always)]
fn l1_kernel<S: Simd, T: Element>(s: S, x: &[T], y: &[T], sums: &mut [f32; 2]) {
    let (zero, mut difference, mut size) = (s.splat(0.0), Sum::zero(s), Sum::zero(s));
    for (x, y) in x.chunks(MAX_LANES).zip(y.chunks(MAX_LANES)) {
        for part in 0..Sum::<S>::PARTS {
            let at = part * S::LANES;
            if at < y.len() {
                let y = read(s, y, at);
                let d = s.sub(read(s, x, at), y);
                // |v| as max(-v, v): NaN stays NaN, because `max` returns its second operand then.
                difference.add(s, part, s.max(s.sub(zero, d), d));
                size.add(s, part, s.max(s.sub(zero, y), y));
            }
        }
    }
    *sums = [difference.total(s), size.total(s)];
}

dispatch! {
    fn l1_chunk<T: Element>(x: &[T], y: &[T], sums: &mut [f32; 2]) => l1_kernel;
}

pub(crate) fn relative_l1(cx: &Context, x: &CpuTensor, y: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::relative_l1(x, y)?;
    let n = x.shape().numel();
    let mut sums = vec![[0.0f32; 2]; n.div_ceil(CHUNK)];
    by_dtype!(x, T => {
        let (x, y) = (T::elements(x), T::elements(y));
        cx.pool.for_each_chunk(&mut sums, 1, |i, sums| {
            let range = i * CHUNK..n.min((i + 1) * CHUNK);
            l1_chunk(cx.level, &x[range.clone()], &y[range], &mut sums[0]);
        });
    });
    let [difference, size] = sums
        .iter()
        .fold([0.0f64; 2], |[d, s], &[chunk_d, chunk_s]| [d + f64::from(chunk_d), s + f64::from(chunk_s)]);
    let mut out = cx.buffer::<f32>(1)?;
    out[0] = if difference == 0.0 { 0.0 } else { (difference / size) as f32 };
    Ok(f32::into_tensor(out, shape))
}
