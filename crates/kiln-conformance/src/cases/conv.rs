//! Convolutions: kernels, strides, paddings, upsampling, residuals.

use kiln_ops::{Activation, Backend, ConvGeometry, Result, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use super::list::CaseList;
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

/// The VAE's downsampling: stride 2, padded at the bottom and right only.
const DOWNSAMPLE: ConvGeometry = ConvGeometry { stride: 2, padding: [0, 1, 0, 1], upsample: false };
/// TAEF2's downsampling.
const DOWNSAMPLE_EVEN: ConvGeometry = ConvGeometry { stride: 2, padding: [1; 4], upsample: false };
const UPSAMPLE: ConvGeometry = ConvGeometry { stride: 1, padding: [1; 4], upsample: true };
const UNPADDED: ConvGeometry = ConvGeometry { stride: 1, padding: [0; 4], upsample: false };

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    let base = |kernel, geometry| Conv { kernel, geometry, ..Conv::default() };
    for stored in [DType::F32, DType::BF16, DType::F16] {
        let conv = |conv: Conv| Conv { stored, ..conv };
        list.add(&format!("conv2d/point_{stored}"), conv(base([1, 1], ConvGeometry::same(1))));
        list.add(&format!("conv2d/same_{stored}"), conv(base([3, 3], ConvGeometry::same(3))));
    }
    list.add("conv2d/stride_2_far_padding", base([3, 3], DOWNSAMPLE));
    list.add("conv2d/stride_2_even_padding", base([3, 3], DOWNSAMPLE_EVEN));
    list.add("conv2d/upsample", base([3, 3], UPSAMPLE));
    list.add("conv2d/no_padding", base([3, 3], UNPADDED));
    list.add("conv2d/no_bias", Conv { bias: false, ..base([3, 3], ConvGeometry::same(3)) });
    list.add("conv2d/residual", Conv { residual: true, ..base([3, 3], ConvGeometry::same(3)) });
    list.add("conv2d/residual_after_upsample", Conv { residual: true, ..base([3, 3], UPSAMPLE) });
    list.add("conv2d/residual_of_a_point", Conv { residual: true, ..base([1, 1], ConvGeometry::same(1)) });
    list.add("conv2d/tall_kernel", base([3, 1], ConvGeometry { padding: [1, 1, 0, 0], ..UNPADDED }));
    list.add("conv2d/wide_kernel", base([1, 3], ConvGeometry { padding: [0, 0, 1, 1], ..UNPADDED }));
    list.add("conv2d/large_kernel", base([5, 5], ConvGeometry::same(5)));
    list.add("conv2d/even_kernel", base([2, 2], ConvGeometry { padding: [0, 1, 0, 1], ..UNPADDED }));
    list.add("conv2d/stride_beyond_kernel", base([2, 2], ConvGeometry { stride: 3, ..UNPADDED }));
    list.add("conv2d/stride_2_point", base([1, 1], ConvGeometry { stride: 2, ..UNPADDED }));
    list.add("conv2d/heavy_tailed", Conv { values: HEAVY_TAILED, ..base([3, 3], ConvGeometry::same(3)) });
    let pixel = vec![[1, 1, 3, 5], [1, 1, 32, 32], [1, 1, 33, 1]];
    list.add("conv2d/single_pixel", Conv { sizes: pixel.clone(), ..base([3, 3], ConvGeometry::same(3)) });
    list.add("conv2d/single_pixel_upsampled", Conv { sizes: pixel, ..base([3, 3], UPSAMPLE) });
    // Several blocks of pixels and of channels, the last ones incomplete.
    let blocks = vec![[18, 35, 72, 136], [17, 16, 16, 3], [34, 18, 512, 16]];
    let several = Conv { sizes: blocks, residual: true, ..base([3, 3], ConvGeometry::same(3)) };
    list.add("conv2d/several_blocks", several);
    let upsampled = Conv { sizes: vec![[18, 35, 72, 136], [16, 17, 64, 16]], ..base([3, 3], UPSAMPLE) };
    list.add("conv2d/several_blocks_upsampled", upsampled);
    // More blocks of 128 pixels and channels than a GPU has multiprocessors, the last ones incomplete.
    let many = vec![[93, 93, 8, 136], [91, 95, 12, 129]];
    list.add("conv2d/full_size_many_blocks", Conv { sizes: many, ..base([3, 3], ConvGeometry::same(3)) });
    let many = Conv { sizes: vec![[47, 46, 8, 132]], residual: true, ..base([3, 3], UPSAMPLE) };
    list.add("conv2d/full_size_many_blocks_upsampled", many);
    // The same with a long sum: one row of blocks, since that takes the least work.
    let long = vec![[1, 2105, 512, 12]];
    list.add("conv2d/full_size_long_sums", Conv { sizes: long, ..base([3, 3], ConvGeometry::same(3)) });
    let full = vec![[33, 32, 128, 96]];
    list.add("conv2d/full_size", Conv { sizes: full, ..base([3, 3], ConvGeometry::same(3)) });
    for (name, geometry) in [("", ConvGeometry::same(3)), ("_upsampled", UPSAMPLE)] {
        list.add(&format!("conv2d/then_group_norm{name}"), ThenGroupNorm { geometry });
    }
    list.add_once("invalid_arguments/conv", Invalid);
}

struct Conv {
    kernel: [usize; 2],
    geometry: ConvGeometry,
    /// `[height, width, in, out]`; the input is at least as large as the kernel.
    sizes: Vec<[usize; 4]>,
    values: Distribution,
    stored: DType,
    bias: bool,
    residual: bool,
}

impl Default for Conv {
    fn default() -> Self {
        Conv {
            kernel: [1, 1],
            geometry: UNPADDED,
            sizes: vec![
                [5, 5, 1, 1],
                [6, 7, 3, 32],
                [9, 17, 32, 3],
                [7, 5, 33, 31],
                [16, 8, 64, 65],
                [5, 33, 17, 16],
            ],
            values: NORMAL,
            stored: DType::BF16,
            bias: true,
            residual: false,
        }
    }
}

impl Scenario for Conv {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let [kh, kw] = self.kernel;
        for &[h, w, channels, out] in &self.sizes {
            let terms = channels * kh * kw;
            let x = t.activation(self.values, [h, w, channels])?;
            let spread = NORMAL.scaled(1.0 / (terms as f32).sqrt());
            let kernel = t.stored(spread, [out, channels, kh, kw], self.stored)?;
            let bias = t.stored(NORMAL, [out], self.stored)?;
            let conv = t.b.load_conv(&kernel, self.bias.then_some(&bias))?;
            let residual = match (self.residual, self.geometry.output(h, w, self.kernel)) {
                (true, Some([h, w])) => Some(t.activation(NORMAL, [h, w, out])?),
                _ => None,
            };
            let y = t.b.conv2d(&x, &conv, self.geometry, residual.as_ref())?;
            let tolerance = match self.stored {
                DType::BF16 if !self.residual && !self.geometry.upsample => {
                    Tolerance::sum(terms).rounded(t.dtype)
                }
                _ => Tolerance::sum(terms).rounded_inside(t.dtype),
            };
            t.record(format!("{h}x{w}x{channels} to {out}"), &y, tolerance)?;
        }
        Ok(())
    }
}

/// A convolution and the group norm of its result, whose moments a backend may compute with the convolution.
struct ThenGroupNorm {
    geometry: ConvGeometry,
}

impl Scenario for ThenGroupNorm {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for ([h, w, channels, out], all_groups) in
            [([18, 35, 72, 136], &[34, 17, 4][..]), ([1, 1, 8, 16], &[4])]
        {
            let x = t.activation(NORMAL, [h, w, channels])?;
            let kernel = t.stored(NORMAL.scaled(0.04), [out, channels, 3, 3], DType::BF16)?;
            let conv = t.b.load_conv(&kernel, Some(&t.stored(NORMAL, [out], DType::BF16)?))?;
            let (weight, bias) = (t.parameter(NORMAL, [out])?, t.parameter(NORMAL, [out])?);
            let [oh, ow] = if self.geometry.upsample { [2 * h, 2 * w] } else { [h, w] };
            let residual = t.activation(NORMAL, [oh, ow, out])?;
            let y = t.b.conv2d(&x, &conv, self.geometry, Some(&residual))?;
            // The convolution's result is rounded, too.
            let tolerance =
                Tolerance::sum(9 * channels).conditioned(4.0).rounded_inside(t.dtype).rounded_inside(t.dtype);
            for &groups in all_groups {
                let y = t.b.group_norm(&y, groups, &weight, &bias, 1e-5, Some(Activation::Silu))?;
                t.record(format!("{oh}x{ow}x{out} in {groups} groups"), &y, tolerance)?;
            }
            // Flattened, its pixels have more channels, and other moments.
            let flat = t.b.reshape(&y, [1, oh, ow * out].into())?;
            let (weight, bias) = (t.parameter(NORMAL, [ow * out])?, t.parameter(NORMAL, [ow * out])?);
            let y = t.b.group_norm(&flat, 4, &weight, &bias, 1e-5, None)?;
            t.record(format!("flattened to {}", ow * out), &y, tolerance)?;
        }
        Ok(())
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        t.reject("a kernel of rank 3", b.load_conv(&HostTensor::zeros([2, 3, 3]), None));
        t.reject("an empty kernel", b.load_conv(&HostTensor::zeros([2, 3, 0, 3]), None));
        let kernel = HostTensor::zeros([2, 3, 1, 1]);
        t.reject("a long conv bias", b.load_conv(&kernel, Some(&HostTensor::zeros([3]))));

        let conv = b.load_conv(&HostTensor::zeros([5, 3, 3, 3]), None)?;
        let same = ConvGeometry::same(3);
        let x = t.zeros([4, 6, 3], DType::F32)?;
        t.reject("conv2d: other channels", b.conv2d(&t.zeros([4, 6, 4], DType::F32)?, &conv, same, None));
        t.reject("conv2d: a matrix", b.conv2d(&t.zeros([4, 3], DType::F32)?, &conv, same, None));
        t.reject("conv2d: no stride", b.conv2d(&x, &conv, ConvGeometry { stride: 0, ..same }, None));
        let bare = ConvGeometry { padding: [0; 4], ..same };
        t.reject("conv2d: too low", b.conv2d(&t.zeros([2, 6, 3], DType::F32)?, &conv, bare, None));
        t.reject("conv2d: too narrow", b.conv2d(&t.zeros([6, 2, 3], DType::F32)?, &conv, bare, None));
        let endless = ConvGeometry { padding: [usize::MAX, 1, 1, 1], ..same };
        t.reject("conv2d: endless padding", b.conv2d(&x, &conv, endless, None));
        t.reject(
            "conv2d: a residual of another size",
            b.conv2d(&x, &conv, bare, Some(&t.zeros([4, 6, 5], DType::F32)?)),
        );
        t.reject(
            "conv2d: a residual of other channels",
            b.conv2d(&x, &conv, same, Some(&t.zeros([4, 6, 3], DType::F32)?)),
        );
        t.reject(
            "conv2d: a bf16 residual",
            b.conv2d(&x, &conv, same, Some(&t.zeros([4, 6, 5], DType::BF16)?)),
        );
        Ok(())
    }
}
