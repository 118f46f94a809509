//! Products of nvfp4 matrices with Kiln's own `mma` kernels, on compute capability 12.0 and 12.1.

use kiln_tensor::DType;

use super::mma::{ROWS, Tiling, has_aligned_pairs, product_arguments};
use super::shape::{GemmShape, Operands};
use super::tilings::Tilings;
use crate::error::Result;
use crate::kernels::{Nvfp4GemmArgs, kernels};
use crate::queue::Queue;
use crate::sources::KernelSource;
use crate::sys::driver::DevicePtr;

kernels! {
    "gemm_mma_nvfp4" {
        GemmNvfp4(args: Nvfp4GemmArgs):
            NVFP4_256 = "gemm_mma_nvfp4_256", NVFP4_128 = "gemm_mma_nvfp4_128";
    }
}

/// Stages, and bytes of a line and of the scales of its blocks, as in `gemm_mma_nvfp4.cu`.
const STAGES: usize = 3;
const LINE: usize = 64 + 8;

fn shared_bytes(tiling: Tiling) -> usize {
    STAGES * (ROWS + tiling.columns) * LINE
}

/// The products and their tilings.
pub(crate) struct Nvfp4Gemm {
    tilings: Tilings<Tiling>,
}

impl Nvfp4Gemm {
    pub const SOURCE: KernelSource = KernelSource { name: "gemm_mma_nvfp4" };

    pub fn new() -> Nvfp4Gemm {
        Nvfp4Gemm { tilings: Tilings::new(Nvfp4Gemm::SOURCE) }
    }

    /// The shape of a product of rows of `depth` bytes, a multiple of 64.
    pub fn shape([rows, n, depth]: [usize; 3], out_dtype: DType, add: bool) -> GemmShape {
        GemmShape::packed([rows, n, depth], DType::U8, out_dtype, add)
    }

    /// Whether the kernels take the product: pairs of columns, whole and aligned.
    pub fn supports(shape: &GemmShape, operands: &Operands) -> bool {
        operands.scales.is_some() && has_aligned_pairs(shape, operands)
    }

    /// Runs a product. `blocks`: the scales of the blocks of `x` and `w`.
    pub fn run(
        &self,
        queue: &Queue,
        shape: &GemmShape,
        operands: &Operands,
        blocks: [DevicePtr; 2],
    ) -> Result<()> {
        let launch = |trial: &Operands, tiling| launch(queue, shape, trial, blocks, tiling);
        let tiling = self.tilings.choose(queue, shape, operands, || Tiling::ALL.to_vec(), launch)?;
        launch(operands, tiling)
    }
}

fn launch(
    queue: &Queue,
    shape: &GemmShape,
    operands: &Operands,
    [x_blocks, w_blocks]: [DevicePtr; 2],
    tiling: Tiling,
) -> Result<()> {
    let (product, grid) = product_arguments(shape, operands, tiling)?;
    let args = Nvfp4GemmArgs { product, x_blocks, w_blocks };
    let kernel = tiling.kernel([NVFP4_256, NVFP4_128]);
    kernel.launch(queue, grid, tiling.columns, shared_bytes(tiling), &GemmNvfp4 { args })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::test_product::{open_gpu, upload};

    /// Twice the value of an e2m1.
    fn doubled(code: u8) -> f32 {
        [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0][usize::from(code & 7)]
            * if code & 8 == 0 { 1.0 } else { -1.0 }
    }

    #[test]
    fn every_tiling_gives_the_product() {
        let Some(queue) = open_gpu() else { return };
        if !queue.gpu().has_nvfp4() {
            return println!("skipped: no nvfp4 products on this GPU");
        }
        let (rows, n, depth) = (200, 264, 192);
        let bytes = |count: usize, seed: usize| {
            (0..count).map(|i| ((i + seed) * 7919 % 251) as u8).collect::<Vec<_>>()
        };
        // Scales of 1, 2 and 4 of blocks, and of 1/4 to 8 of rows.
        let blocks = |count: usize, seed: usize| {
            (0..count).map(|i| ((i + seed) * 31 % 3 * 8 + 0x38) as u8).collect::<Vec<_>>()
        };
        let block_scale = |byte: u8| f32::from(1u8 << ((byte - 0x38) / 8));
        let row_scale = |i: usize| (2f32).powi((i * 5 % 6) as i32 - 2);
        let floats = |count: usize| (0..count).flat_map(|i| row_scale(i).to_le_bytes()).collect::<Vec<u8>>();
        let (x, w) = (bytes(rows * depth, 1), bytes(n * depth, 2));
        let (x_blocks, w_blocks) = (blocks(rows * depth / 8, 1), blocks(n * depth / 8, 2));
        let buffers =
            [&x, &w, &x_blocks, &w_blocks, &floats(rows), &floats(n)].map(|bytes| upload(&queue, bytes));
        let out = queue.allocate(rows * n * 4).unwrap().unwrap();
        let [x_at, w_at, x_blocks_at, w_blocks_at, x_scales, w_scales] =
            buffers.each_ref().map(|b| b.ptr(&queue));
        let shape = Nvfp4Gemm::shape([rows, n, depth], DType::F32, false);
        let scales = Some([w_scales, x_scales]);
        let bias = Some(w_scales);
        let operands = Operands { alpha: 0.5, bias, scales, ..Operands::new(x_at, w_at, out.ptr(&queue)) };
        assert!(Nvfp4Gemm::supports(&shape, &operands));
        for tiling in Tiling::ALL {
            queue.upload(&vec![0xff; rows * n * 4], out.ptr(&queue)).unwrap();
            launch(&queue, &shape, &operands, [x_blocks_at, w_blocks_at], tiling).unwrap();
            let mut found = vec![0; rows * n * 4];
            queue.download(out.ptr(&queue), &mut found).unwrap();
            // Some rows and columns of each tile.
            for (row, column) in (0..2000).map(|i| (i * 37 % rows, i * 101 % n)) {
                let product = |i: usize| {
                    let ([a, b], block) = ([x[row * depth + i], w[column * depth + i]], i / 8);
                    let scale = block_scale(x_blocks[row * depth / 8 + block])
                        * block_scale(w_blocks[column * depth / 8 + block]);
                    0.25 * scale * (doubled(a) * doubled(b) + doubled(a >> 4) * doubled(b >> 4))
                };
                let sum: f32 = (0..depth).map(product).sum();
                let expected = 0.5 * row_scale(row) * row_scale(column) * sum + row_scale(column);
                let place = 4 * (row * n + column);
                let found = f32::from_le_bytes(found[place..place + 4].try_into().unwrap());
                assert_eq!(found, expected, "{tiling:?} {row} {column}");
            }
        }
    }

    #[test]
    fn the_smallest_gpus_have_enough_shared_memory() {
        assert!(Tiling::ALL.iter().all(|&tiling| shared_bytes(tiling) <= 99 << 10));
    }
}
