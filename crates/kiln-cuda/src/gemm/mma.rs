//! Matrix products with Kiln's own `mma` kernels, on every GPU.

use kiln_tensor::DType;

use super::shape::{GemmShape, Operands};
use super::tilings::Tilings;
use crate::error::{Error, Result};
use crate::kernels::{Kernel, MmaGemmArgs, kernels};
use crate::queue::Queue;
use crate::sources::KernelSource;

kernels! {
    "gemm_mma_bf16" {
        GemmBf16(args: MmaGemmArgs):
            BF16_256 = "gemm_mma_bf16_256", BF16_128 = "gemm_mma_bf16_128",
            SWIGLU_BF16_256 = "gemm_mma_bf16_swiglu_256", SWIGLU_BF16_128 = "gemm_mma_bf16_swiglu_128";
    }
    "gemm_mma_fp8" {
        GemmFp8(args: MmaGemmArgs):
            FP8_256 = "gemm_mma_fp8_256", FP8_128 = "gemm_mma_fp8_128",
            SWIGLU_FP8_256 = "gemm_mma_fp8_swiglu_256", SWIGLU_FP8_128 = "gemm_mma_fp8_swiglu_128";
    }
    "gemm_mma_int8" {
        GemmInt8(args: MmaGemmArgs):
            INT8_256 = "gemm_mma_int8_256", INT8_128 = "gemm_mma_int8_128",
            SWIGLU_INT8_256 = "gemm_mma_int8_swiglu_256", SWIGLU_INT8_128 = "gemm_mma_int8_swiglu_128";
    }
}

/// Rows of a tile, stages, and bytes of a line in shared memory, as in `mma_gemm.cuh`.
pub(super) const ROWS: usize = 128;
const STAGES: usize = 4;
const LINE: usize = 64;

/// How a product is divided among blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Columns of a tile: 256 or 128, and the number of threads.
    pub columns: usize,
    /// Tiles along the rows that follow each other.
    group: usize,
}

impl Tiling {
    pub const ALL: [Tiling; 3] = [
        Tiling { columns: 128, group: 8 },
        Tiling { columns: 256, group: 8 },
        Tiling { columns: 256, group: 16 },
    ];

    fn shared_bytes(self) -> usize {
        STAGES * (ROWS + self.columns) * LINE
    }

    pub fn kernel<P>(self, [wide, narrow]: [Kernel<P>; 2]) -> Kernel<P> {
        if self.columns == 256 { wide } else { narrow }
    }
}

/// The products and their tilings.
pub(crate) struct MmaGemm {
    tilings: Tilings<Tiling>,
}

impl MmaGemm {
    /// A source with all that the kernels share.
    pub const SOURCE: KernelSource = KernelSource { name: "gemm_mma_bf16" };

    pub fn new() -> MmaGemm {
        MmaGemm { tilings: Tilings::new(MmaGemm::SOURCE) }
    }

    /// Whether the kernels take the product: rows along the sum, in whole vectors and aligned; pairs of columns.
    pub fn supports(queue: &Queue, shape: &GemmShape, operands: &Operands) -> bool {
        let size = shape.dtype.size();
        let typed = match shape.dtype {
            DType::BF16 => operands.scales.is_none(),
            DType::F8E4M3 => queue.gpu().capability >= (8, 9) && operands.scales.is_some(),
            DType::I8 => operands.scales.is_some(),
            _ => false,
        };
        let mut vectors = vec![shape.k * size, shape.ldx * size, shape.right * size, shape.ldw * size];
        if shape.batch > 1 {
            vectors.push(shape.stride_w * size);
        }
        typed
            && shape.can_be_fused(operands, LINE)
            && !shape.x_is_k_by_rows
            && !shape.w_is_k_by_n
            && matches!(shape.out_dtype, DType::BF16 | DType::F32)
            && vectors.iter().all(|bytes| bytes % 16 == 0)
            && [operands.x, operands.x_right.unwrap_or(0), operands.w].iter().all(|at| at % 16 == 0)
            && has_aligned_pairs(shape, operands)
    }

    /// Runs a product.
    pub fn run(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<()> {
        let launch = |trial: &Operands, tiling| launch(queue, shape, trial, tiling);
        let tiling = self.tilings.choose(queue, shape, operands, || Tiling::ALL.to_vec(), launch)?;
        launch(operands, tiling)
    }
}

/// Whether results, and what is added to them or scales them, are whole and aligned pairs of columns.
pub(super) fn has_aligned_pairs(shape: &GemmShape, operands: &Operands) -> bool {
    let stride_out = if shape.batch > 1 { shape.stride_out } else { 0 };
    let scales = operands.scales.unwrap_or_default();
    let optional = [operands.add, operands.bias, operands.gate].map(|at| at.unwrap_or(0));
    let at = optional.into_iter().chain([operands.out, scales[0], scales[1]]);
    [shape.n, shape.ldo, shape.ldadd, stride_out].iter().all(|n| n % 2 == 0)
        && at.into_iter().all(|at| at % 8 == 0)
}

/// The kernels' arguments, and their grid.
pub(super) fn product_arguments(
    shape: &GemmShape,
    operands: &Operands,
    tiling: Tiling,
) -> Result<(MmaGemmArgs, [usize; 2])> {
    let results = if shape.swiglu { tiling.columns / 2 } else { tiling.columns };
    let (tiles_m, tiles_n) = (shape.rows.div_ceil(ROWS), shape.n.div_ceil(results));
    let [w_scales, x_scales] = operands.scales.unwrap_or_default();
    let element = shape.dtype.size();
    let size = |n: usize| {
        i32::try_from(n)
            .map_err(|_| Error::Call { call: "matmul", what: format!("a size of {n} is too large") })
    };
    let args = MmaGemmArgs {
        x: operands.x,
        x_right: operands.x_right.unwrap_or(0),
        w: operands.w,
        bias: operands.bias.unwrap_or(0),
        gate: operands.gate.unwrap_or(0),
        x_scales,
        w_scales,
        add: operands.add.unwrap_or(0),
        out: operands.out,
        ldx: (shape.ldx * element) as i64,
        ldx_right: (shape.right * element) as i64,
        ldw: (shape.ldw * element) as i64,
        ldadd: shape.ldadd as i64,
        ldo: shape.ldo as i64,
        stride_w: (shape.stride_w * element) as i64,
        stride_out: shape.stride_out as i64,
        alpha: operands.alpha,
        bf16_out: i32::from(shape.out_dtype == DType::BF16),
        rows: size(shape.rows)?,
        n: size(shape.n)?,
        bytes: size(shape.k * element)?,
        left_bytes: if shape.right > 0 { size((shape.k - shape.right) * element)? } else { i32::MAX },
        tiles_m: size(tiles_m)?,
        tiles_n: size(tiles_n)?,
        group: size(tiling.group.min(tiles_m))?,
        unused: 0,
    };
    Ok((args, [tiles_m * tiles_n * shape.batch, 1]))
}

fn launch(queue: &Queue, shape: &GemmShape, operands: &Operands, tiling: Tiling) -> Result<()> {
    let (args, grid) = product_arguments(shape, operands, tiling)?;
    let (threads, shared) = (tiling.columns, tiling.shared_bytes());
    match shape.dtype {
        DType::F8E4M3 => {
            let kernels = if shape.swiglu { [SWIGLU_FP8_256, SWIGLU_FP8_128] } else { [FP8_256, FP8_128] };
            tiling.kernel(kernels).launch(queue, grid, threads, shared, &GemmFp8 { args })
        }
        DType::I8 => {
            let kernels =
                if shape.swiglu { [SWIGLU_INT8_256, SWIGLU_INT8_128] } else { [INT8_256, INT8_128] };
            tiling.kernel(kernels).launch(queue, grid, threads, shared, &GemmInt8 { args })
        }
        _ => {
            let kernels =
                if shape.swiglu { [SWIGLU_BF16_256, SWIGLU_BF16_128] } else { [BF16_256, BF16_128] };
            tiling.kernel(kernels).launch(queue, grid, threads, shared, &GemmBf16 { args })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::test_product::{End, check_tilings, open_gpu};

    #[test]
    fn every_tiling_gives_the_product() {
        let Some(queue) = open_gpu() else { return };
        for end in [End::Added, End::Plain, End::Gated, End::Swiglu] {
            for dtype in [DType::BF16, DType::F8E4M3, DType::I8] {
                if dtype == DType::F8E4M3 && queue.gpu().capability < (8, 9) {
                    println!("skipped: no fp8 on this GPU");
                    continue;
                }
                let launch = |shape: &_, operands: &_, tiling| launch(&queue, shape, operands, tiling);
                check_tilings(&queue, dtype, [false; 2], end, &Tiling::ALL, MmaGemm::supports, launch);
            }
        }
    }

    #[test]
    fn the_smallest_gpus_have_enough_shared_memory() {
        assert!(Tiling::ALL.iter().all(|tiling| tiling.shared_bytes() <= 99 << 10));
    }
}
