//! Flash attention: scores exist for one block of keys at a time, and the sums so far are rescaled whenever a larger score
//! turns up (online softmax).
//!
//! `simd` computes in vectors, whatever the dtype; `amx` multiplies bf16 in AMX tiles.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_softmax;
mod call;
mod simd;
pub(super) mod softmax;

#[cfg(target_arch = "x86_64")]
use kiln_ops::Tensor;
use kiln_ops::{AttentionSpec, Result, shapes};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use kiln_tensor::DType;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::bf16;

use self::call::AttentionCall;
use self::simd::PackedAttention;
use crate::Context;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::parallel::DisjointMut;
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Runs a call in vectors.
fn run<T: TensorElement>(call: AttentionCall<'_, T>, out: &DisjointMut<'_, T>) -> Result<()> {
    let level = call.cx.level;
    #[cfg(target_arch = "aarch64")]
    if let (Some(bf16), DType::BF16) = (level.bf16(), T::DTYPE) {
        return PackedAttention { call, format: bf16 }.run(out);
    }
    PackedAttention { call, format: level }.run(out)
}

pub(crate) fn attention(
    cx: &Context,
    q: &[&CpuTensor],
    k: &[&CpuTensor],
    v: &[&CpuTensor],
    spec: &AttentionSpec,
) -> Result<CpuTensor> {
    let size = shapes::attention(q, k, v, spec)?;
    #[cfg(target_arch = "x86_64")]
    if let (Level::Amx(amx), DType::BF16) = (cx.level, q[0].dtype()) {
        let mut out = cx.buffer::<bf16>(size.result().numel())?;
        amx::run(&AttentionCall::new(cx, size, spec, [q, k, v]), amx, &DisjointMut::new(&mut out))?;
        return Ok(bf16::into_tensor(out, size.result()));
    }
    by_dtype!(q[0], T => {
        let mut out = cx.buffer::<T>(size.result().numel())?;
        let call = AttentionCall::<T>::new(cx, size, spec, [q, k, v]);
        run(call, &DisjointMut::new(&mut out))?;
        Ok(T::into_tensor(out, size.result()))
    })
}
