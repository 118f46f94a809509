//! Attention: builds the arguments and chooses among the implementations: for few queries, Hopper, wide heads, heads of at
//! most 128, split heads, f32 and any size.

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionMask, AttentionSpec, Error, HeadBlock, Result, RopeLayout, Tensor as _, shapes};
use kiln_tensor::DType;

use super::attention_8bit::QkNorms;
use super::movement::concat_rows;
use super::rope::{qk_norm_rope, supports_heads_128};
use super::{
    attention_8bit, attention_f32, attention_few, attention_hopper, attention_split, attention_wide,
};
use crate::context::{Context, int};
use crate::kernels::{AttentionArgs, HeadNorms, Kernel, MAX_SEGMENTS, Segments, kernels};
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "attention" {
        AttentionTiled(args: AttentionArgs):
            ATTENTION_32 = "attention_32", ATTENTION_64 = "attention_64", ATTENTION_96 = "attention_96",
            ATTENTION_128 = "attention_128", ATTENTION_128_LARGE = "attention_128_large";
    }
    "attention_plain" {
        AttentionPlain(args: AttentionArgs):
            ATTENTION_PLAIN_F32_4 = "attention_plain_f32_4",
            ATTENTION_PLAIN_F32_16 = "attention_plain_f32_16",
            ATTENTION_PLAIN_BF16_4 = "attention_plain_bf16_4",
            ATTENTION_PLAIN_BF16_16 = "attention_plain_bf16_16";
    }
}

/// Warps of a block and keys of a tile, as in `attention.cu`.
const WARPS: usize = 4;
const KEYS: usize = 64;
/// Bytes of shared memory that the driver takes for each block.
const RESERVED: usize = 1 << 10;

/// The kernel for one head dimension, as in `attention.cu`.
#[derive(Clone, Copy, Debug)]
struct TiledKernel {
    dim: usize,
    kernel: Kernel<AttentionTiled>,
    /// 16-row tiles of queries of a warp.
    tiles: usize,
    /// Resident blocks per multiprocessor.
    blocks: usize,
}

/// In the order in which they are chosen.
const TILED_KERNELS: [TiledKernel; 5] = [
    TiledKernel { dim: 32, kernel: ATTENTION_32, tiles: 1, blocks: 4 },
    TiledKernel { dim: 64, kernel: ATTENTION_64, tiles: 1, blocks: 4 },
    TiledKernel { dim: 96, kernel: ATTENTION_96, tiles: 1, blocks: 3 },
    TiledKernel { dim: 128, kernel: ATTENTION_128_LARGE, tiles: 2, blocks: 2 },
    TiledKernel { dim: 128, kernel: ATTENTION_128, tiles: 1, blocks: 3 },
];

impl TiledKernel {
    /// The first kernel for heads of this size whose blocks fit a multiprocessor, where a block may have at most
    /// `shared_memory` bytes.
    fn find(dim: usize, shared_memory: usize) -> Option<TiledKernel> {
        let available = shared_memory + RESERVED;
        let fits = |tiled: &TiledKernel| tiled.blocks * (tiled.shared() + RESERVED) <= available;
        TILED_KERNELS.into_iter().find(|tiled| tiled.dim == dim && fits(tiled))
    }

    fn queries(&self) -> usize {
        16 * self.tiles * WARPS
    }

    /// Bytes of shared memory: a tile of keys, one of values, and queries that are not held in registers.
    fn shared(&self) -> usize {
        let queries = if self.tiles == 1 { 0 } else { self.queries() };
        (queries + 2 * KEYS) * self.dim.next_power_of_two() * 2
    }

    fn run(&self, cx: &Context, args: &AttentionArgs) -> Result<()> {
        let grid = [(args.queries as usize).div_ceil(self.queries()), args.heads as usize];
        cx.launch(self.kernel, grid, 32 * WARPS, self.shared(), &AttentionTiled { args: *args })
    }
}

pub(crate) fn attention(
    cx: &Context,
    q: &[&CudaTensor],
    k: &[&CudaTensor],
    v: &[&CudaTensor],
    spec: &AttentionSpec,
) -> Result<CudaTensor> {
    attention_into(cx, [q, k, v], spec, None)
}

pub(crate) fn norm_rope_attention(
    cx: &Context,
    qk: &[HeadBlock<'_, CudaTensor>],
    v: &[&CudaTensor],
    eps: f32,
    spec: &AttentionSpec,
) -> Result<CudaTensor> {
    if let Some(attended) = round_unnormed(cx, qk, v, eps, spec)? {
        return Ok(attended);
    }
    let normed = qk
        .iter()
        .map(|block| qk_norm_rope(cx, block.qk, Some(block.weights), block.rope, eps))
        .collect::<Result<Vec<_>>>()?;
    let (q, k): (Vec<_>, Vec<_>) = normed.iter().map(|[q, k]| (q, k)).unzip();
    attention(cx, &q, &k, v, spec)
}

/// The same in 8 bits, with norm and rotation in the kernels that round; `None` if they don't take the arguments.
fn round_unnormed(
    cx: &Context,
    qk: &[HeadBlock<'_, CudaTensor>],
    v: &[&CudaTensor],
    eps: f32,
    spec: &AttentionSpec,
) -> Result<Option<CudaTensor>> {
    let [q, k] = [0, 1].map(|i| qk.iter().map(|block| block.qk[i]).collect::<Vec<_>>());
    let fits = |block: &HeadBlock<'_, CudaTensor>| {
        block.qk[0].shape().rows() > 0
            && block.rope.pairs == RopeLayout::Interleaved
            && supports_heads_128(&block.qk, &block.weights, block.rope)
    };
    if !spec.eight_bits || qk.is_empty() || qk.len() > MAX_SEGMENTS || !qk.iter().all(fits) {
        return Ok(None);
    }
    for block in qk {
        for (x, weight) in block.qk.into_iter().zip(block.weights) {
            shapes::norm_rope(x, Some(weight), block.rope)?;
        }
    }
    let size = shapes::attention(&q, &k, v, spec)?;
    let out = CudaTensor::new(cx, size.result(), q[0].dtype())?;
    let mut concatenated = Vec::new();
    let mut args = build_args(cx, [&q, &k, v], &size, &spec.mask, out.ptr(cx), &mut concatenated)?;
    if q[0].dtype() != DType::BF16 || !args.aligned() || !attention_8bit::supports(cx, &args) {
        return Ok(None);
    }
    // A segment per block: each has its own norms.
    let mut norms = QkNorms { q: HeadNorms::default(), k: HeadNorms::default(), eps };
    let mut end = 0;
    for (i, block) in qk.iter().enumerate() {
        end += block.qk[0].shape().rows();
        for (segments, x) in [&mut args.q, &mut args.k].into_iter().zip(block.qk) {
            (segments.start[i], segments.end[i]) = (x.ptr(cx), int("attention", end)?);
            segments.count = int("attention", qk.len())?;
        }
        for (norms, weight) in [&mut norms.q, &mut norms.k].into_iter().zip(block.weights) {
            norms.weights[i] = weight.ptr(cx);
            (norms.cosines[i], norms.sines[i]) = (block.rope.cos.ptr(cx), block.rope.sin.ptr(cx));
        }
    }
    attention_8bit::run(cx, &args, Some(&norms))?;
    Ok(Some(out))
}

/// [`attention`], which also stores the logarithms of the rows' sums in `lse`.
pub(crate) fn attention_into(
    cx: &Context,
    [q, k, v]: [&[&CudaTensor]; 3],
    spec: &AttentionSpec,
    lse: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let size = shapes::attention(q, k, v, spec)?;
    let dtype = q[0].dtype();
    let out = CudaTensor::new(cx, size.result(), dtype)?;
    if size.queries == 0 {
        return Ok(out);
    }
    let mut concatenated = Vec::new();
    let mut args = build_args(cx, [q, k, v], &size, &spec.mask, out.ptr(cx), &mut concatenated)?;
    args.lse = lse.map_or(0, |lse| lse.ptr(cx));
    run(cx, &size, dtype, args, spec.eight_bits)?;
    Ok(out)
}

fn run(
    cx: &Context,
    size: &AttentionSize,
    dtype: DType,
    args: AttentionArgs,
    eight_bits: bool,
) -> Result<()> {
    if !args.aligned() {
        return run_plain(cx, size, dtype, args);
    }
    if attention_few::supports(cx, &args) {
        return attention_few::run(cx, &args, dtype);
    }
    if dtype == DType::BF16 && eight_bits && attention_8bit::supports(cx, &args) {
        return attention_8bit::run(cx, &args, None);
    }
    if dtype == DType::BF16 && attention_hopper::supports(cx, &args) {
        return attention_hopper::run(cx, &args);
    }
    if attention_wide::supports(cx, &args, dtype) {
        return attention_wide::run(cx, &args, dtype);
    }
    if dtype == DType::BF16 {
        if let Some(tiled) = TiledKernel::find(size.head_dim, cx.gpu().shared_memory as usize) {
            return tiled.run(cx, &args);
        }
        if let Some(split) = attention_split::find(size.head_dim) {
            return split.run(cx, &args);
        }
    }
    if dtype == DType::F32 && attention_f32::supports(&args) {
        return attention_f32::run(cx, &args);
    }
    run_plain(cx, size, dtype, args)
}

fn run_plain(cx: &Context, size: &AttentionSize, dtype: DType, args: AttentionArgs) -> Result<()> {
    let kernel = match (dtype, size.head_dim) {
        (DType::BF16, ..=128) => ATTENTION_PLAIN_BF16_4,
        (DType::BF16, ..=512) => ATTENTION_PLAIN_BF16_16,
        (_, ..=128) => ATTENTION_PLAIN_F32_4,
        (_, ..=512) => ATTENTION_PLAIN_F32_16,
        (_, wide) => {
            let what = format!("the CUDA kernels support heads of at most 512 elements, not {wide}");
            return Err(Error::Device { backend: cx.name(), what });
        }
    };
    let grid = [size.queries.div_ceil(4), size.heads];
    cx.launch(kernel, grid, 128, 0, &AttentionPlain { args })
}

/// The segments of row blocks. More blocks than a kernel takes are copied into `concatenated`.
pub(crate) fn segment_table(
    cx: &Context,
    blocks: &[&CudaTensor],
    concatenated: &mut Vec<CudaTensor>,
) -> Result<Segments> {
    let rows = blocks.iter().map(|block| RowBlock::new(cx, block));
    let row = blocks[0].shape().last() * blocks[0].dtype().size();
    if let Some(segments) = segments(rows, row)? {
        return Ok(segments);
    }
    let whole = concat_rows(cx, blocks)?;
    let segments = segments([RowBlock::new(cx, &whole)].into_iter(), row)?;
    concatenated.push(whole);
    Ok(segments.unwrap_or_default())
}

/// Builds the kernel's arguments. Tensors of more row blocks than a kernel takes are copied into `concatenated`.
pub(crate) fn build_args(
    cx: &Context,
    blocks: [&[&CudaTensor]; 3],
    size: &AttentionSize,
    mask: &AttentionMask,
    out: DevicePtr,
    concatenated: &mut Vec<CudaTensor>,
) -> Result<AttentionArgs> {
    let mut table = |blocks: &[&CudaTensor]| segment_table(cx, blocks, concatenated);
    let number = |n: usize| int("attention", n);
    let (mask, a, b) = match mask {
        AttentionMask::None => (0, 0, 0),
        AttentionMask::Causal { valid } => (1, number(*valid)?, 0),
        AttentionMask::Isolated { rows } => (2, number(rows.start)?, number(rows.end)?),
    };
    Ok(AttentionArgs {
        q: table(blocks[0])?,
        k: table(blocks[1])?,
        v: table(blocks[2])?,
        out,
        queries: number(size.queries)?,
        keys: number(size.keys)?,
        heads: number(size.heads)?,
        kv_heads: number(size.kv_heads)?,
        head_dim: number(size.head_dim)?,
        mask,
        a,
        b,
        scale: 1.0 / (size.head_dim as f32).sqrt(),
        unused: 0,
        lse: 0,
    })
}

/// Consecutive rows in memory.
#[derive(Clone, Copy)]
struct RowBlock {
    at: DevicePtr,
    count: usize,
    /// Address of the buffer that contains them.
    block: DevicePtr,
}

impl RowBlock {
    fn new(cx: &Context, x: &CudaTensor) -> RowBlock {
        RowBlock { at: x.ptr(cx), count: x.shape().rows(), block: x.buffer_ptr(cx) }
    }
}

/// Builds the segment table of some row blocks, merging adjacent blocks of one buffer; `None` if there are too many.
/// Adjacent buffers are not merged: how keys are split affects the last bits, which must not depend on addresses.
fn segments(blocks: impl Iterator<Item = RowBlock>, row_bytes: usize) -> Result<Option<Segments>> {
    let mut table = Segments::default();
    let (mut rows, mut next, mut count) = (0, None, 0);
    for RowBlock { at, count: block, block: owner } in blocks.filter(|rows| rows.count > 0) {
        rows += block;
        if next == Some((at, owner)) {
            table.end[count - 1] = int("attention", rows)?;
        } else if count == MAX_SEGMENTS {
            return Ok(None);
        } else {
            (table.start[count], table.end[count]) = (at, int("attention", rows)?);
            count += 1;
        }
        next = Some((at + (block * row_bytes) as u64, owner));
    }
    table.count = int("attention", count)?;
    Ok(Some(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks by address and row count; buffers start at multiples of 1000.
    fn table(blocks: &[(DevicePtr, usize)]) -> Option<Segments> {
        segments(blocks.iter().map(|&(at, count)| RowBlock { at, count, block: at / 1000 * 1000 }), 100)
            .unwrap()
    }

    #[test]
    fn adjacent_buffers_stay_separate() {
        let t = table(&[(1000, 10), (2000, 2)]).unwrap();
        assert_eq!((t.count, &t.start[..2], &t.end[..2]), (2, &[1000, 2000][..], &[10, 12][..]));
    }

    #[test]
    fn adjacent_blocks_of_one_buffer_are_merged() {
        let t = table(&[(1000, 3), (1300, 2), (5000, 4), (5400, 1)]).unwrap();
        assert_eq!((t.count, &t.start[..2], &t.end[..2]), (2, &[1000, 5000][..], &[5, 10][..]));
    }

    #[test]
    fn empty_blocks_are_skipped() {
        let t = table(&[(7, 0), (1000, 3), (9, 0), (1300, 2)]).unwrap();
        assert_eq!((t.count, t.start[0], t.end[0]), (1, 1000, 5));
    }

    #[test]
    fn more_blocks_than_max_segments_are_rejected() {
        let apart: Vec<_> = (0..9).map(|i| (10_000 * (i + 1), 2)).collect();
        assert!(table(&apart[..8]).is_some());
        assert_eq!(table(&apart), None);
    }

    #[test]
    fn every_gpu_has_room_for_the_blocks_that_its_kernels_are_compiled_for() {
        for dim in [32, 64, 96, 128] {
            for kilobytes in [99, 163, 227] {
                let tiled = TiledKernel::find(dim, kilobytes << 10).unwrap();
                assert_eq!(tiled.tiles, if dim == 128 && kilobytes > 99 { 2 } else { 1 }, "{tiled:?}");
            }
        }
        for tiled in TILED_KERNELS {
            let [resident, queries] = [tiled.blocks * (tiled.shared() + RESERVED), tiled.queries()];
            assert!(resident <= if tiled.tiles == 1 { 100 << 10 } else { 164 << 10 }, "{tiled:?}");
            // Queries that registers hold are loaded through the memory of keys and values.
            assert!(tiled.tiles > 1 || queries <= 2 * KEYS, "{tiled:?}");
        }
    }
}
