//! Matrix products on Hopper with Kiln's own kernels.

use kiln_tensor::DType;

use super::shape::{GemmShape, Operands};
use super::tilings::Tilings;
use crate::error::{Error, Result};
use crate::flags::BlockFlags;
use crate::kernels::{HopperGemmArgs, Kernel, kernels};
use crate::queue::{DeviceBuffer, Queue};
use crate::sources::KernelSource;
use crate::sys::driver::{DevicePtr, TensorMap};
use crate::tensor_map::{BOX_BYTES, MapElement};

kernels! {
    "gemm_hopper_bf16" {
        GemmBf16(args: HopperGemmArgs):
            BF16_256 = "gemm_hopper_bf16_256", BF16_192 = "gemm_hopper_bf16_192",
            BF16_160 = "gemm_hopper_bf16_160", BF16_144 = "gemm_hopper_bf16_144",
            BF16_128 = "gemm_hopper_bf16_128", BF16_96 = "gemm_hopper_bf16_96",
            BF16_80 = "gemm_hopper_bf16_80", BF16_64 = "gemm_hopper_bf16_64";
    }
    "gemm_hopper_columns" {
        GemmColumns(args: HopperGemmArgs):
            W_COLUMNS_256 = "gemm_hopper_w_columns_256", W_COLUMNS_192 = "gemm_hopper_w_columns_192",
            W_COLUMNS_128 = "gemm_hopper_w_columns_128", COLUMNS_256 = "gemm_hopper_columns_256",
            COLUMNS_192 = "gemm_hopper_columns_192", COLUMNS_128 = "gemm_hopper_columns_128";
    }
    "gemm_hopper_fp8" {
        GemmFp8(args: HopperGemmArgs):
            FP8_256 = "gemm_hopper_fp8_256", FP8_192 = "gemm_hopper_fp8_192",
            FP8_160 = "gemm_hopper_fp8_160", FP8_144 = "gemm_hopper_fp8_144",
            FP8_128 = "gemm_hopper_fp8_128", FP8_96 = "gemm_hopper_fp8_96",
            FP8_80 = "gemm_hopper_fp8_80", FP8_64 = "gemm_hopper_fp8_64";
    }
    "gemm_hopper_swiglu" {
        GemmSwiglu(args: HopperGemmArgs):
            SWIGLU_BF16_256 = "gemm_hopper_swiglu_bf16_256", SWIGLU_BF16_192 = "gemm_hopper_swiglu_bf16_192",
            SWIGLU_BF16_128 = "gemm_hopper_swiglu_bf16_128", SWIGLU_FP8_256 = "gemm_hopper_swiglu_fp8_256",
            SWIGLU_FP8_192 = "gemm_hopper_swiglu_fp8_192", SWIGLU_FP8_128 = "gemm_hopper_swiglu_fp8_128",
            SWIGLU_INT8_256 = "gemm_hopper_swiglu_int8_256", SWIGLU_INT8_192 = "gemm_hopper_swiglu_int8_192",
            SWIGLU_INT8_128 = "gemm_hopper_swiglu_int8_128";
    }
    "gemm_hopper_int8" {
        GemmInt8(args: HopperGemmArgs):
            INT8_256 = "gemm_hopper_int8_256", INT8_192 = "gemm_hopper_int8_192",
            INT8_160 = "gemm_hopper_int8_160", INT8_144 = "gemm_hopper_int8_144",
            INT8_128 = "gemm_hopper_int8_128", INT8_96 = "gemm_hopper_int8_96",
            INT8_80 = "gemm_hopper_int8_80", INT8_64 = "gemm_hopper_int8_64";
    }
}

/// Rows of a block's tile, blocks of a cluster, side of a box, threads, and bytes of shared memory for stages and results, as
/// in `hopper_gemm.cuh`.
const ROWS: usize = 128;
const CLUSTER: usize = 2;
const BOX: usize = 64;
const THREADS: usize = 384;
const SHARED: usize = 225 << 10;

/// Columns of tiles: those that reach full speed, and those for products that few of them cover.
const WIDE: [usize; 2] = [256, 192];
const NARROW: [usize; 6] = [128, 160, 144, 96, 80, 64];

/// How a product is divided among clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiling {
    /// Columns of a tile.
    columns: usize,
    /// Tiles along the rows that follow each other.
    group: usize,
    /// Whether tiles that don't divide evenly are split along the sum.
    split: bool,
}

impl Tiling {
    /// The tilings to measure. The first one is for products that are not worth it.
    fn candidates(shape: &GemmShape, clusters: usize) -> Vec<Tiling> {
        let tiles =
            |columns| Division::new(shape, Tiling { columns, group: 8, split: false }, clusters).tiles();
        // The kernels for columns along the sum load boxes of 64, and SwiGLU has none.
        let few = !shape.w_is_k_by_n && !shape.swiglu && tiles(192) < 4 * clusters;
        let narrow = if few { &NARROW[..] } else { &NARROW[..1] };
        let mut all = Vec::new();
        for &columns in narrow.iter().chain(&WIDE) {
            // A large group is the whole of few rows.
            let groups =
                if WIDE.contains(&columns) && shape.rows > 8 * ROWS * CLUSTER { &[8, 64][..] } else { &[8] };
            for &group in groups {
                let whole = Tiling { columns, group, split: false };
                let split = Tiling { split: true, ..whole };
                all.push(whole);
                if Division::new(shape, split, clusters).split_tiles > 0 {
                    all.push(split);
                }
            }
        }
        all
    }

    /// Columns of a tile's results.
    fn results(self, shape: &GemmShape) -> usize {
        if shape.swiglu { self.columns / 2 } else { self.columns }
    }

    /// Columns of a box of results.
    fn out_columns(self, shape: &GemmShape) -> usize {
        [64, 32, 16].into_iter().find(|n| self.results(shape).is_multiple_of(*n)).unwrap_or(BOX)
    }

    /// Bytes of shared memory: stages of both operands, results, barriers, and alignment to 1024.
    fn shared_bytes(self, shape: &GemmShape) -> usize {
        let (stage, results) = ((ROWS + self.columns) * BOX_BYTES, 4 * BOX * 2 * self.out_columns(shape));
        let stages = (SHARED - results) / stage;
        stages * stage + results + 16 * stages + 8 * 4 + 1024
    }

    /// The kernel for these columns.
    fn kernel<P, const N: usize>(self, all: [(usize, Kernel<P>); N]) -> Result<Kernel<P>> {
        let none = || Error::Call { call: "matmul", what: format!("no kernel for {} columns", self.columns) };
        all.into_iter()
            .find(|(columns, _)| *columns == self.columns)
            .map(|(_, kernel)| kernel)
            .ok_or_else(none)
    }
}

/// The tiles of a product, and how they are shared by clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    tiles_m: usize,
    tiles_n: usize,
    tiles_all: usize,
    /// Steps of 128 bytes along the sum.
    steps: usize,
    clusters: usize,
    /// Tiles whose steps are shared evenly by all clusters.
    split_tiles: usize,
}

impl Division {
    fn tiles(&self) -> usize {
        self.tiles_m * self.tiles_all
    }

    /// `clusters`: those that the GPU runs at once.
    fn new(shape: &GemmShape, tiling: Tiling, clusters: usize) -> Division {
        let tiles_m = shape.rows.div_ceil(ROWS * CLUSTER);
        let tiles_n = shape.n.div_ceil(tiling.results(shape));
        let tiles_all = tiles_n * shape.batch;
        let (tiles, steps) = (tiles_m * tiles_all, (shape.k * shape.dtype.size()).div_ceil(BOX_BYTES));
        let rest = tiles % clusters;
        let split_tiles = match tiling.split && rest > 0 {
            // Fewer steps than clusters would leave some without work.
            true if tiles < clusters && tiles * steps >= clusters => tiles,
            // One whole tile more for each, so that every share is at least a tile.
            true if tiles > clusters => rest + clusters,
            _ => 0,
        };
        let clusters = if split_tiles > 0 { clusters } else { clusters.min(tiles) };
        Division { tiles_m, tiles_n, tiles_all, steps, clusters, split_tiles }
    }
}

/// The products and their tilings.
pub(crate) struct HopperGemm {
    flags: BlockFlags,
    tilings: Tilings<Tiling>,
}

impl HopperGemm {
    /// A source with all that the kernels share.
    pub const SOURCE: KernelSource = KernelSource { name: "gemm_hopper_bf16" };

    pub fn new() -> HopperGemm {
        HopperGemm { flags: BlockFlags::default(), tilings: Tilings::new(HopperGemm::SOURCE) }
    }

    /// Whether the kernels take the product: aligned rows and addresses, pairs of columns.
    pub fn supports(queue: &Queue, shape: &GemmShape, operands: &Operands) -> bool {
        let size = shape.dtype.size();
        let typed = match shape.dtype {
            DType::BF16 => !shape.x_is_k_by_rows || shape.w_is_k_by_n,
            DType::F8E4M3 | DType::I8 => {
                !shape.x_is_k_by_rows && !shape.w_is_k_by_n && operands.scales.is_some()
            }
            _ => false,
        };
        let out = shape.out_dtype.size();
        let rows =
            [shape.ldx * size, shape.right * size, shape.ldw * size, shape.ldo * out, shape.ldadd * out];
        let strides = [shape.stride_w * size, shape.stride_out * out];
        let aligned =
            rows.iter().chain(if shape.batch > 1 { &strides[..] } else { &[] }).all(|n| n % 16 == 0);
        let optional = [operands.x_right, operands.gate, operands.add, operands.bias];
        let at = optional.map(|at| at.unwrap_or(0)).into_iter().chain([operands.w, operands.x, operands.out]);
        let scales = operands.scales.unwrap_or_default();
        queue.gpu().capability == (9, 0)
            && typed
            && shape.can_be_fused(operands, BOX_BYTES)
            && aligned
            && shape.n.is_multiple_of(2)
            && shape.k > 0
            && matches!(shape.out_dtype, DType::BF16 | DType::F32)
            && at.into_iter().all(|at| at % 16 == 0)
            && scales.iter().all(|at| at % 8 == 0)
    }

    /// Runs a product.
    pub fn run(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<()> {
        let launch = |trial: &Operands, tiling| self.launch(queue, shape, trial, tiling);
        let candidates = || Tiling::candidates(shape, clusters(queue));
        let tiling = self.tilings.choose(queue, shape, operands, candidates, launch)?;
        self.launch(queue, shape, operands, tiling)
    }

    fn launch(&self, queue: &Queue, shape: &GemmShape, operands: &Operands, tiling: Tiling) -> Result<()> {
        let division = Division::new(shape, tiling, clusters(queue));
        let blocks = division.clusters * CLUSTER;
        let shared_steps = division.split_tiles * division.steps;
        let partials = match division.split_tiles {
            0 => None,
            _ => Some((partials(queue, blocks * ROWS * tiling.columns * 4)?, self.flags.ptr(queue)?)),
        };
        let [x, x_right, w, out, add_bf16] = maps(queue, shape, operands, tiling)?;
        let size = |n: usize| {
            i32::try_from(n)
                .map_err(|_| Error::Call { call: "matmul", what: format!("a size of {n} is too large") })
        };
        let [w_scales, x_scales] = operands.scales.unwrap_or_default();
        let args = HopperGemmArgs {
            x,
            x_right,
            w,
            out,
            add_bf16,
            bias: operands.bias.unwrap_or(0),
            gate: operands.gate.unwrap_or(0),
            x_scales,
            w_scales,
            add: operands.add.unwrap_or(0),
            to: operands.out,
            ldadd: shape.ldadd as i64,
            ldo: shape.ldo as i64,
            stride_out: shape.stride_out as i64,
            alpha: operands.alpha,
            bf16_out: i32::from(shape.out_dtype == DType::BF16),
            rows: size(shape.rows)?,
            n: size(shape.n)?,
            steps: size(division.steps)?,
            left_steps: match shape.right {
                0 => size(division.steps)?,
                right => size((shape.k - right) * shape.dtype.size() / BOX_BYTES)?,
            },
            tiles_m: size(division.tiles_m)?,
            tiles_n: size(division.tiles_n)?,
            tiles_all: size(division.tiles_all)?,
            group: size(tiling.group.min(division.tiles_m))?,
            split_tiles: size(division.split_tiles)?,
            steps_per_cluster: size(shared_steps / division.clusters)?,
            longer_clusters: size(shared_steps % division.clusters)?,
            unused: 0,
            partials: partials.as_ref().map_or(0, |(partials, _)| partials.ptr(queue)),
            ready: partials.as_ref().map_or(0, |&(_, ready)| ready),
        };
        let (grid, shared) = ([blocks, 1], tiling.shared_bytes(shape));
        if shape.swiglu {
            let kernel = match shape.dtype {
                DType::F8E4M3 => {
                    tiling.kernel([(256, SWIGLU_FP8_256), (192, SWIGLU_FP8_192), (128, SWIGLU_FP8_128)])?
                }
                DType::I8 => {
                    tiling.kernel([(256, SWIGLU_INT8_256), (192, SWIGLU_INT8_192), (128, SWIGLU_INT8_128)])?
                }
                _ => {
                    tiling.kernel([(256, SWIGLU_BF16_256), (192, SWIGLU_BF16_192), (128, SWIGLU_BF16_128)])?
                }
            };
            return kernel.launch(queue, grid, THREADS, shared, &GemmSwiglu { args });
        }
        match (shape.dtype, shape.x_is_k_by_rows, shape.w_is_k_by_n) {
            (DType::F8E4M3, ..) => {
                let kernel = tiling.kernel([
                    (256, FP8_256),
                    (192, FP8_192),
                    (160, FP8_160),
                    (144, FP8_144),
                    (128, FP8_128),
                    (96, FP8_96),
                    (80, FP8_80),
                    (64, FP8_64),
                ])?;
                kernel.launch(queue, grid, THREADS, shared, &GemmFp8 { args })
            }
            (DType::I8, ..) => {
                let kernel = tiling.kernel([
                    (256, INT8_256),
                    (192, INT8_192),
                    (160, INT8_160),
                    (144, INT8_144),
                    (128, INT8_128),
                    (96, INT8_96),
                    (80, INT8_80),
                    (64, INT8_64),
                ])?;
                kernel.launch(queue, grid, THREADS, shared, &GemmInt8 { args })
            }
            (_, false, false) => {
                let kernel = tiling.kernel([
                    (256, BF16_256),
                    (192, BF16_192),
                    (160, BF16_160),
                    (144, BF16_144),
                    (128, BF16_128),
                    (96, BF16_96),
                    (80, BF16_80),
                    (64, BF16_64),
                ])?;
                kernel.launch(queue, grid, THREADS, shared, &GemmBf16 { args })
            }
            (_, false, true) => {
                let kernel =
                    tiling.kernel([(256, W_COLUMNS_256), (192, W_COLUMNS_192), (128, W_COLUMNS_128)])?;
                kernel.launch(queue, grid, THREADS, shared, &GemmColumns { args })
            }
            (_, true, _) => {
                let kernel = tiling.kernel([(256, COLUMNS_256), (192, COLUMNS_192), (128, COLUMNS_128)])?;
                kernel.launch(queue, grid, THREADS, shared, &GemmColumns { args })
            }
        }
    }
}

/// Clusters that the GPU runs at once.
fn clusters(queue: &Queue) -> usize {
    (queue.gpu().multiprocessors.max(1) as usize / CLUSTER).max(1)
}

fn partials(queue: &Queue, bytes: usize) -> Result<DeviceBuffer> {
    let none = || Error::Call { call: "cuMemAlloc", what: "no memory for partial sums".into() };
    queue.allocate(bytes)?.ok_or_else(none)
}

/// The maps of `x` and its right columns, of `w`, and of a bf16 result and summand.
fn maps(queue: &Queue, shape: &GemmShape, operands: &Operands, tiling: Tiling) -> Result<[TensorMap; 5]> {
    let GemmShape { rows, n, k, batch, .. } = *shape;
    let element = if shape.dtype == DType::BF16 { MapElement::Bf16 } else { MapElement::Byte };
    let driver = queue.driver();
    let x = match shape.x_is_k_by_rows {
        true => driver.encode_tensor_map(element, operands.x, [rows, k], [shape.ldx], [BOX])?,
        false => {
            driver.encode_tensor_map(element, operands.x, [k - shape.right, rows], [shape.ldx], [ROWS])?
        }
    };
    let x_right = match operands.x_right {
        Some(right) => {
            let (sizes, strides) = ([shape.right, rows], [shape.right]);
            driver.encode_tensor_map(element, right, sizes, strides, [ROWS])?
        }
        None => TensorMap::NONE,
    };
    // A single product's stride is not used, but has to be valid.
    let stride = |stride: usize, rows: usize, ld: usize| if batch > 1 { stride } else { rows * ld };
    let w = match shape.w_is_k_by_n {
        true => {
            let strides = [shape.ldw, stride(shape.stride_w, k, shape.ldw)];
            driver.encode_tensor_map(element, operands.w, [n, k, batch], strides, [BOX, 1])?
        }
        false => {
            let strides = [shape.ldw, stride(shape.stride_w, shape.w_rows(), shape.ldw)];
            let sizes = [k, shape.w_rows(), batch];
            driver.encode_tensor_map(element, operands.w, sizes, strides, [tiling.columns / 2, 1])?
        }
    };
    let bf16 = |at: DevicePtr, ld: usize| match shape.out_dtype {
        DType::BF16 => {
            let strides = [ld, stride(shape.stride_out, rows, ld)];
            let (sizes, bytes) = ([n, rows, batch], 2 * tiling.out_columns(shape));
            driver.encode_narrow_tensor_map(MapElement::Bf16, at, sizes, strides, bytes, [BOX, 1])
        }
        _ => Ok(TensorMap::NONE),
    };
    let out = bf16(operands.out, shape.ldo)?;
    let add = operands.add.map_or(Ok(TensorMap::NONE), |add| bf16(add, shape.ldadd))?;
    Ok([x, x_right, w, out, add])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::test_product::{End, check_tilings, open_gpu};

    fn divided(rows: usize, n: usize, k: usize, split: bool) -> (usize, usize) {
        let shape = GemmShape::packed([rows, n, k], DType::BF16, DType::BF16, false);
        let division = Division::new(&shape, Tiling { columns: 256, group: 8, split }, 66);
        (division.clusters, division.split_tiles)
    }

    #[test]
    fn tiles_that_do_not_divide_evenly_are_split() {
        assert_eq!(divided(4608, 3072, 3072, false), (66, 0));
        // 18 x 12 tiles are 3 for each cluster and 18 more.
        assert_eq!(divided(4608, 3072, 3072, true), (66, 18 + 66));
        assert_eq!(divided(11 * 256, 6 * 256, 3072, true), (66, 0));
        // Fewer tiles than clusters.
        assert_eq!(divided(512, 3072, 3072, true), (66, 24));
        assert_eq!(divided(512, 3072, 3072, false), (24, 0));
        // Too few steps for all clusters.
        assert_eq!(divided(256, 256, 64, true), (1, 0));
    }

    #[test]
    fn every_tiling_gives_the_product() {
        let Some(queue) = open_gpu() else { return };
        if queue.gpu().capability != (9, 0) {
            return println!("skipped: not a Hopper GPU");
        }
        let gemm = HopperGemm::new();
        let check = |dtype, columns: [bool; 2], end| {
            let launch = |shape: &_, operands: &_, tiling| gemm.launch(&queue, shape, operands, tiling);
            let narrow = if columns[1] || end == End::Swiglu { &NARROW[..1] } else { &NARROW[..] };
            let sides = WIDE.iter().chain(narrow).flat_map(|&columns| [(columns, false), (columns, true)]);
            let all: Vec<_> = sides
                .enumerate()
                .map(|(i, (columns, split))| Tiling { columns, group: 1 + i % 3, split })
                .collect();
            check_tilings(&queue, dtype, columns, end, &all, HopperGemm::supports, launch);
        };
        for end in [End::Added, End::Plain] {
            for columns in [[false, false], [false, true], [true, true]] {
                check(DType::BF16, columns, end);
            }
            check(DType::F8E4M3, [false; 2], end);
            check(DType::I8, [false; 2], end);
        }
        check(DType::BF16, [false; 2], End::Gated);
        for dtype in [DType::BF16, DType::F8E4M3, DType::I8] {
            check(dtype, [false; 2], End::Swiglu);
        }
    }

    #[test]
    fn a_block_has_enough_shared_memory() {
        let plain = GemmShape::packed([512; 3], DType::BF16, DType::BF16, false);
        for columns in WIDE.into_iter().chain(NARROW) {
            for shape in [plain, GemmShape { swiglu: true, ..plain }] {
                assert!(Tiling { columns, group: 8, split: false }.shared_bytes(&shape) <= 227 << 10);
            }
        }
    }

    #[test]
    fn narrow_tiles_are_for_products_of_few_tiles() {
        let columns = |rows, n| {
            let shape = GemmShape::packed([rows, n, 3072], DType::BF16, DType::BF16, false);
            let mut columns: Vec<_> = Tiling::candidates(&shape, 66).iter().map(|t| t.columns).collect();
            columns.dedup();
            columns
        };
        assert_eq!(columns(4608, 18432), [128, 256, 192]);
        assert_eq!(columns(512, 3072), [128, 160, 144, 96, 80, 64, 256, 192]);
    }
}
