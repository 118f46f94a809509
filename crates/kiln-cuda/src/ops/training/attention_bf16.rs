//! Gradients of attention in bf16 on tensor cores: with TMA and wgmma on Hopper for heads of 128, with mma on other GPUs.

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionMask, AttentionSpec, Result, Tensor as _};
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::kernels::{AttentionBackwardArgs, HopperAttentionBackwardArgs, MmaAttentionBackwardArgs, kernels};
use crate::ops::grid::THREADS;
use crate::ops::movement::concat_rows;
use crate::queue::DeviceBuffer;
use crate::sys::driver::{DevicePtr, TensorMap};
use crate::tensor::CudaTensor;
use crate::tensor_map::MapElement;

kernels! {
    "attention_backward" {
        AttentionBackward(args: AttentionBackwardArgs):
            ATTENTION_BACKWARD_Q_F32_4 = "attention_backward_q_f32_4",
            ATTENTION_BACKWARD_Q_F32_16 = "attention_backward_q_f32_16",
            ATTENTION_BACKWARD_Q_BF16_4 = "attention_backward_q_bf16_4",
            ATTENTION_BACKWARD_Q_BF16_16 = "attention_backward_q_bf16_16",
            ATTENTION_BACKWARD_KV_F32_4 = "attention_backward_kv_f32_4",
            ATTENTION_BACKWARD_KV_F32_16 = "attention_backward_kv_f32_16",
            ATTENTION_BACKWARD_KV_BF16_4 = "attention_backward_kv_bf16_4",
            ATTENTION_BACKWARD_KV_BF16_16 = "attention_backward_kv_bf16_16";
        AttentionStats(dout: DevicePtr, out: DevicePtr, lse: DevicePtr, stats: DevicePtr, queries: i32,
            heads: i32, dim: i32, padded: i32):
            ATTENTION_STATS = "attention_stats";
    }
    "attention_backward_hopper" {
        AttentionBackwardHopper(args: HopperAttentionBackwardArgs):
            ATTENTION_BACKWARD_HOPPER = "attention_backward_hopper";
    }
    "attention_backward_mma" {
        AttentionBackwardMma(args: MmaAttentionBackwardArgs):
            ATTENTION_BACKWARD_Q_MMA_64 = "attention_backward_q_mma_64",
            ATTENTION_BACKWARD_Q_MMA_128 = "attention_backward_q_mma_128",
            ATTENTION_BACKWARD_KV_MMA_64 = "attention_backward_kv_mma_64",
            ATTENTION_BACKWARD_KV_MMA_128 = "attention_backward_kv_mma_128";
    }
}

/// Whether there are kernels for this attention.
pub(super) fn supports(size: &AttentionSize, dtype: DType, spec: &AttentionSpec) -> bool {
    dtype == DType::BF16
        && matches!(size.head_dim, 64 | 128)
        && size.heads == size.kv_heads
        && spec.mask == AttentionMask::None
        && size.queries > 0
        && size.keys > 0
}

pub(super) fn backward(
    cx: &Context,
    dout: &[&CudaTensor],
    [q, k, v]: [&[&CudaTensor]; 3],
    out: &CudaTensor,
    lse: &CudaTensor,
    size: &AttentionSize,
) -> Result<[CudaTensor; 3]> {
    let width = size.heads * size.head_dim;
    let rows = [size.queries, size.keys, size.keys];
    let [dq, dk, dv] = rows.map(|rows| CudaTensor::new(cx, [rows, width], DType::BF16));
    let call = BackwardCall {
        q: whole(cx, q)?,
        k: whole(cx, k)?,
        v: whole(cx, v)?,
        dout: whole(cx, dout)?,
        gradients: [dq?, dk?, dv?],
        padded: size.queries.next_multiple_of(STATS_ROWS),
        size: *size,
    };
    let stats = call.stats(cx, out, lse)?;
    if cx.gpu().capability == (9, 0) && size.head_dim == hopper::DIM {
        call.hopper(cx, &stats)?;
    } else {
        call.mma(cx, &stats)?;
    }
    Ok(call.gradients)
}

/// Row blocks as one aligned tensor.
fn whole(cx: &Context, blocks: &[&CudaTensor]) -> Result<CudaTensor> {
    match blocks {
        [one] if one.is_aligned() => Ok((*one).clone()),
        _ => concat_rows(cx, blocks),
    }
}

fn number(n: usize) -> Result<i32> {
    int("attention_backward", n)
}

/// Queries are padded to whole tiles of any kernel.
const STATS_ROWS: usize = 128;

/// Tile sizes, stages and threads, as in `attention_backward_hopper.cu`.
mod hopper {
    pub const DIM: usize = 128;
    pub const ROWS: usize = 128;
    pub const QUERY_ROWS: usize = 64;
    pub const THREADS: usize = 384;
    const QUERY_STAGES: usize = 4;
    /// Bytes of a row, and of barriers and alignment to 1024.
    const ROW_BYTES: usize = 2 * DIM;
    const EXTRA: usize = 128 + 1024;
    /// Shared memory of a block of keys, which need more: its own two tiles, stages of queries and their gradients, and the
    /// queries' statistics.
    pub const SHARED: usize =
        (2 * ROWS + 2 * QUERY_STAGES * QUERY_ROWS) * ROW_BYTES + QUERY_STAGES * QUERY_ROWS * 8 + EXTRA;
}

/// Tile sizes and threads, as in `attention_backward_mma.cu`.
mod mma {
    pub const ROWS: usize = 64;
    pub const THREADS: usize = 128;
    const TILE: usize = 32;

    /// Bytes of shared memory: a block's own two tiles, and two stages of two tiles, with padded rows.
    pub fn shared(dim: usize) -> usize {
        (2 * ROWS + 4 * TILE) * (dim + 8) * 2
    }
}

/// The operands of one backward pass.
struct BackwardCall {
    q: CudaTensor,
    k: CudaTensor,
    v: CudaTensor,
    dout: CudaTensor,
    /// Of queries, keys and values.
    gradients: [CudaTensor; 3],
    padded: usize,
    size: AttentionSize,
}

impl BackwardCall {
    /// The queries' log-sum-exp and sums of `dout * out`, as the kernels read them.
    fn stats(&self, cx: &Context, out: &CudaTensor, lse: &CudaTensor) -> Result<DeviceBuffer> {
        let stats = cx.allocate(4 * 2 * self.size.heads * self.padded)?;
        let parameters = AttentionStats {
            dout: self.dout.ptr(cx),
            out: out.ptr(cx),
            lse: lse.ptr(cx),
            stats: stats.ptr(cx),
            queries: number(self.size.queries)?,
            heads: number(self.size.heads)?,
            dim: number(self.size.head_dim)?,
            padded: number(self.padded)?,
        };
        let grid = [(32 * self.padded * self.size.heads).div_ceil(THREADS), 1];
        cx.launch(ATTENTION_STATS, grid, THREADS, 0, &parameters)?;
        Ok(stats)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size.head_dim as f32).sqrt()
    }

    fn hopper(&self, cx: &Context, stats: &DeviceBuffer) -> Result<()> {
        let width = self.size.heads * hopper::DIM;
        let map = |x: &CudaTensor, tile: usize| -> Result<TensorMap> {
            let rows = x.shape().rows();
            cx.check(cx.driver().encode_tensor_map(
                MapElement::Bf16,
                x.ptr(cx),
                [width, rows],
                [width],
                [tile],
            ))
        };
        let [dq, dk, dv] = self.gradients.each_ref().map(|gradient| gradient.ptr(cx));
        let args = HopperAttentionBackwardArgs {
            q: map(&self.q, hopper::ROWS)?,
            k: map(&self.k, hopper::ROWS)?,
            v: map(&self.v, hopper::ROWS)?,
            dout: map(&self.dout, hopper::ROWS)?,
            streamed_q: map(&self.q, hopper::QUERY_ROWS)?,
            streamed_dout: map(&self.dout, hopper::QUERY_ROWS)?,
            stats: stats.ptr(cx),
            dq,
            dk,
            dv,
            queries: number(self.size.queries)?,
            keys: number(self.size.keys)?,
            heads: number(self.size.heads)?,
            padded: number(self.padded)?,
            scale: self.scale(),
            unused: [0; 3],
        };
        let tiles = [self.size.keys, self.size.queries].map(|rows| rows.div_ceil(hopper::ROWS));
        let blocks = [tiles.iter().sum::<usize>() * self.size.heads, 1];
        let parameters = AttentionBackwardHopper { args };
        cx.launch(ATTENTION_BACKWARD_HOPPER, blocks, hopper::THREADS, hopper::SHARED, &parameters)
    }

    fn mma(&self, cx: &Context, stats: &DeviceBuffer) -> Result<()> {
        let [dq, dk, dv] = self.gradients.each_ref().map(|gradient| gradient.ptr(cx));
        let args = MmaAttentionBackwardArgs {
            q: self.q.ptr(cx),
            k: self.k.ptr(cx),
            v: self.v.ptr(cx),
            dout: self.dout.ptr(cx),
            stats: stats.ptr(cx),
            dq,
            dk,
            dv,
            queries: number(self.size.queries)?,
            keys: number(self.size.keys)?,
            heads: number(self.size.heads)?,
            padded: number(self.padded)?,
            scale: self.scale(),
            unused: 0,
        };
        let [of_queries, of_keys] = match self.size.head_dim {
            64 => [ATTENTION_BACKWARD_Q_MMA_64, ATTENTION_BACKWARD_KV_MMA_64],
            _ => [ATTENTION_BACKWARD_Q_MMA_128, ATTENTION_BACKWARD_KV_MMA_128],
        };
        let (shared, parameters) = (mma::shared(self.size.head_dim), AttentionBackwardMma { args });
        let grid = |rows: usize| [rows.div_ceil(mma::ROWS), self.size.heads];
        cx.launch(of_queries, grid(self.size.queries), mma::THREADS, shared, &parameters)?;
        cx.launch(of_keys, grid(self.size.keys), mma::THREADS, shared, &parameters)
    }
}
