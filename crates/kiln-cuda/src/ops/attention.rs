//! Attention: builds the arguments and chooses among the implementations: for few queries, Hopper, wide heads, tiles,
//! f32 and any size.

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionMask, AttentionSpec, Error, Result, Tensor as _, shapes};
use kiln_tensor::DType;

use super::movement::concat_rows;
use super::{attention_f32, attention_few, attention_hopper, attention_wide};
use crate::context::{Context, int};
use crate::kernels::{AttentionArgs, Kernel, MAX_SEGMENTS, Segments, kernels};
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "attention" {
        AttentionTiled(args: AttentionArgs):
            ATTENTION_32 = "attention_32", ATTENTION_64 = "attention_64", ATTENTION_96 = "attention_96",
            ATTENTION_128 = "attention_128", ATTENTION_256 = "attention_256",
            ATTENTION_512 = "attention_512";
    }
    "attention_plain" {
        AttentionPlain(args: AttentionArgs):
            ATTENTION_PLAIN_F32_4 = "attention_plain_f32_4",
            ATTENTION_PLAIN_F32_16 = "attention_plain_f32_16",
            ATTENTION_PLAIN_BF16_4 = "attention_plain_bf16_4",
            ATTENTION_PLAIN_BF16_16 = "attention_plain_bf16_16";
    }
}

/// Tile configuration of the kernel for one head dimension, as in `attention.cu`.
#[derive(Clone, Copy, Debug)]
struct TiledKernel {
    dim: usize,
    kernel: Kernel<AttentionTiled>,
    split: usize,
    row_warps: usize,
    keys: usize,
}

const TILED_KERNELS: [TiledKernel; 6] = [
    TiledKernel { dim: 32, kernel: ATTENTION_32, split: 1, row_warps: 4, keys: 64 },
    TiledKernel { dim: 64, kernel: ATTENTION_64, split: 1, row_warps: 4, keys: 64 },
    TiledKernel { dim: 96, kernel: ATTENTION_96, split: 1, row_warps: 4, keys: 64 },
    TiledKernel { dim: 128, kernel: ATTENTION_128, split: 1, row_warps: 8, keys: 64 },
    TiledKernel { dim: 256, kernel: ATTENTION_256, split: 2, row_warps: 4, keys: 32 },
    TiledKernel { dim: 512, kernel: ATTENTION_512, split: 4, row_warps: 2, keys: 16 },
];

impl TiledKernel {
    fn threads(&self) -> usize {
        32 * self.split * self.row_warps
    }

    fn queries(&self) -> usize {
        16 * self.row_warps
    }

    /// Bytes of shared memory: two stages of keys and values, and the warps' partial scores.
    fn shared(&self) -> usize {
        let stages = 2 * 2 * self.keys * (self.dim + 8) * 2;
        let partial = if self.split > 1 { self.split * self.row_warps * 16 * self.keys * 4 } else { 0 };
        stages + partial
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
    let tiled = TILED_KERNELS.iter().find(|tiled| tiled.dim == size.head_dim);
    match tiled {
        _ if args.aligned() && attention_few::supports(cx, &args) => attention_few::run(cx, &args, dtype)?,
        Some(_) if dtype == DType::BF16 && args.aligned() && attention_hopper::supports(cx, &args) => {
            attention_hopper::run(cx, &args)?;
        }
        _ if args.aligned() && attention_wide::supports(cx, &args, dtype) => {
            attention_wide::run(cx, &args, dtype)?;
        }
        Some(tiled) if dtype == DType::BF16 && args.aligned() => run_tiled(cx, tiled, &size, args)?,
        _ if dtype == DType::F32 && args.aligned() && attention_f32::supports(&args) => {
            attention_f32::run(cx, &args)?;
        }
        _ => run_plain(cx, &size, dtype, args)?,
    }
    Ok(out)
}

fn run_tiled(cx: &Context, tiled: &TiledKernel, size: &AttentionSize, args: AttentionArgs) -> Result<()> {
    let grid = [size.queries.div_ceil(tiled.queries()), size.heads];
    cx.launch(tiled.kernel, grid, tiled.threads(), tiled.shared(), &AttentionTiled { args })
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
    fn every_tiled_kernel_fits_the_smallest_gpu_and_its_own_queries() {
        for tiled in TILED_KERNELS {
            assert!(tiled.shared() <= 99 << 10, "{tiled:?} needs {}", tiled.shared());
            // Queries are loaded through the memory of two stages of keys and values.
            assert!(tiled.queries() <= 4 * tiled.keys, "{tiled:?}");
            assert_eq!(tiled.dim / tiled.split % 16, 0);
        }
    }
}
