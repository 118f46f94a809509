//! Products with nvfp4 weights: quantization of activations, and the fallback kernel.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::DType;

use super::int8::quantize_threads;
use super::movement::Concatenated;
use crate::context::{Context, int};
use crate::gemm::Operands;
use crate::gemm::nvfp4::Nvfp4Gemm;
use crate::kernels::kernels;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;
use crate::weight::Nvfp4Matrix;

kernels! {
    "nvfp4" {
        QuantizeNvfp4(x: DevicePtr, x_cols: i32, y: DevicePtr, y_cols: i32, q: DevicePtr, blocks: DevicePtr,
            scales: DevicePtr, depth: i32, high_first: i32):
            QUANTIZE_NVFP4 = "quantize_nvfp4" by dtype;
        GemmNvfp4(x: DevicePtr, x_blocks: DevicePtr, x_scales: DevicePtr, w: DevicePtr, w_blocks: DevicePtr,
            w_scales: DevicePtr, bias: DevicePtr, add: DevicePtr, out: DevicePtr, rows: i32, n: i32, depth: i32):
            GEMM_NVFP4 = "gemm_nvfp4" by dtype;
    }
}

/// Tile size of the fallback kernel, in rows and in outputs.
const TILE: usize = 16;

/// Activations in nvfp4: values, scales of blocks, one scale per row.
pub(crate) struct Nvfp4Operand {
    rows: usize,
    values: DeviceBuffer,
    blocks: DeviceBuffer,
    scales: DeviceBuffer,
}

impl Nvfp4Operand {
    /// Quantizes activations, concatenated by columns to the weight's width.
    pub fn new(cx: &Context, xs: &[&CudaTensor], w: &Nvfp4Matrix) -> Result<Nvfp4Operand> {
        let Concatenated { rows, dtype, ptrs, widths, .. } = Concatenated::new(cx, xs)?;
        let operand = Nvfp4Operand::allocate(cx, rows, w)?;
        let parameters = operand.quantize(cx, ptrs, widths, w)?;
        let threads = quantize_threads(2 * w.depth);
        cx.launch(QUANTIZE_NVFP4.of(dtype), [rows, 1], threads, 0, &parameters)?;
        Ok(operand)
    }

    /// Allocates uninitialised rows.
    fn allocate(cx: &Context, rows: usize, w: &Nvfp4Matrix) -> Result<Nvfp4Operand> {
        let (values, blocks) = (cx.allocate(rows * w.depth)?, cx.allocate(rows * w.depth / 8)?);
        Ok(Nvfp4Operand { rows, values, blocks, scales: cx.allocate(rows * 4)? })
    }

    fn quantize(
        &self,
        cx: &Context,
        [x, y]: [DevicePtr; 2],
        widths: [usize; 2],
        w: &Nvfp4Matrix,
    ) -> Result<QuantizeNvfp4> {
        let size = |n: usize| int("linear", n);
        Ok(QuantizeNvfp4 {
            x,
            x_cols: size(widths[0])?,
            y,
            y_cols: size(widths[1])?,
            q: self.values.ptr(cx),
            blocks: self.blocks.ptr(cx),
            scales: self.scales.ptr(cx),
            depth: size(w.depth)?,
            high_first: w.high_first.into(),
        })
    }

    /// Multiplies with some rows of the weight. Takes the addresses of the bias, the summand and the result.
    pub fn gemm(
        &self,
        cx: &Context,
        w: &Nvfp4Matrix,
        outputs: &Range<usize>,
        [bias, add, out]: [Option<DevicePtr>; 3],
        dtype: DType,
    ) -> Result<()> {
        let n = outputs.len();
        if self.rows == 0 || n == 0 {
            return Ok(());
        }
        let [x, x_blocks, x_scales] = [&self.values, &self.blocks, &self.scales].map(|buffer| buffer.ptr(cx));
        let [w_at, w_blocks, w_scales] = w.ptr(cx, outputs.start);
        let shape = Nvfp4Gemm::shape([self.rows, n, w.depth], dtype, add.is_some());
        let out = out.unwrap_or(0);
        let scales = Some([w_scales, x_scales]);
        let operands = Operands { add, bias, scales, ..Operands::new(x, w_at, out) };
        if Nvfp4Gemm::supports(&shape, &operands) {
            return cx.check(cx.shared().nvfp4.run(cx, &shape, &operands, [x_blocks, w_blocks]));
        }
        cx.note_slow_product(&shape);
        let grid = [self.rows.div_ceil(TILE), n.div_ceil(TILE)];
        let parameters = GemmNvfp4 {
            x,
            x_blocks,
            x_scales,
            w: w_at,
            w_blocks,
            w_scales,
            bias: bias.unwrap_or(0),
            add: add.unwrap_or(0),
            out,
            rows: int("linear", self.rows)?,
            n: int("linear", n)?,
            depth: int("linear", w.depth)?,
        };
        cx.launch(GEMM_NVFP4.of(dtype), grid, TILE * TILE, 0, &parameters)
    }
}

#[cfg(test)]
mod tests {
    use kiln_ops::Residency;
    use kiln_tensor::packed::encode::{encode_row, max_unscaled};
    use kiln_tensor::packed::{BlockScales, Format, PackedTensor};
    use kiln_tensor::rng::TorchCpu;
    use kiln_tensor::{HostLinear, HostTensor, vector};

    use super::*;
    use crate::ops;
    use crate::options::Options;

    /// Rounds a matrix to nvfp4, as `kiln quantize` does.
    fn quantized(values: &[f32], [rows, cols]: [usize; 2]) -> HostLinear {
        let global = vector::max_abs(values) / max_unscaled(Format::NvFp4).unwrap();
        let (mut bytes, mut scales) = (Vec::new(), Vec::new());
        for row in values.chunks(cols) {
            encode_row(row, Format::NvFp4, Some(global), &mut bytes, &mut scales).unwrap();
        }
        let scales = BlockScales { scales: scales.into(), swizzled: false, high_first: true, global };
        let packed = PackedTensor::new(Format::NvFp4, [rows, cols], bytes.into()).unwrap();
        HostLinear::packed(vec![packed.with_block_scales(scales).unwrap()]).unwrap()
    }

    /// The figures of `docs/quantizing.md`.
    #[test]
    fn rounding_the_input_of_a_layer_costs_as_much_as_rounding_its_weight() {
        let Some(cx) =
            Context::new(&Options::default()).inspect_err(|e| println!("skipped: no GPU: {e}")).ok()
        else {
            return;
        };
        if !cx.gpu().has_nvfp4() {
            return println!("skipped: no nvfp4 products on this GPU");
        }
        let (rows, out, cols) = (64, 128, 1024);
        let mut random = TorchCpu::new(7);
        let (x, w) = (random.randn(rows * cols), random.randn(out * cols));
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let exact: Vec<f64> = x.chunks(cols).flat_map(|x| w.chunks(cols).map(move |w| dot(x, w))).collect();
        let input = HostTensor::from_f32([rows, cols], x.clone()).unwrap();
        let input = ops::upload(&cx, &input, DType::F32).unwrap();
        let error = |layer: HostLinear| {
            let layer = ops::load_weight(&cx, layer, Residency::Device).unwrap();
            let y = ops::download(&cx, &ops::linear(&cx, &input, &layer).unwrap()).unwrap();
            let squares = y
                .to_f32()
                .unwrap()
                .iter()
                .zip(&exact)
                .map(|(y, exact)| (f64::from(*y) - exact).powi(2))
                .sum::<f64>();
            (squares / exact.iter().map(|y| y * y).sum::<f64>()).sqrt()
        };
        let layer = quantized(&w, [out, cols]);
        let (dequantized, both) = (error(layer.clone()), error(layer.with_nvfp4_matmul().unwrap()));
        println!("relative error with f32 inputs {dequantized:.4}, with nvfp4 inputs {both:.4}");
        assert!((0.085..0.105).contains(&dequantized), "{dequantized}");
        assert!((0.125..0.145).contains(&both), "{both}");
    }
}
