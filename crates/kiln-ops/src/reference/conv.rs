use kiln_tensor::HostTensor;

use super::linear::floats;
use super::values::{tensor, values};
use crate::{ConvGeometry, Result, shapes};

/// A convolution's kernel and bias.
pub struct Conv {
    /// `[out, in, height, width]`.
    size: [usize; 4],
    kernel: Vec<f64>,
    bias: Vec<f64>,
}

pub(super) fn load_conv(kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<Conv> {
    let size = shapes::load_conv(kernel, bias)?;
    let bias = match bias {
        Some(bias) => floats("conv", bias)?,
        None => vec![0.0; size[0]],
    };
    Ok(Conv { size, kernel: floats("conv", kernel)?, bias })
}

/// The upsampled and zero-padded input.
struct PaddedInput<'a> {
    values: &'a [f64],
    size: [usize; 3],
    geometry: ConvGeometry,
}

impl PaddedInput<'_> {
    /// Channels of the pixel at row `y` and column `x` of the padded input, or `None` in the padding.
    fn pixel(&self, y: usize, x: usize) -> Option<&[f64]> {
        let [height, width, channels] = self.size;
        let [top, _, left, _] = self.geometry.padding;
        let repeat = if self.geometry.upsample { 2 } else { 1 };
        let (y, x) = (y.checked_sub(top)? / repeat, x.checked_sub(left)? / repeat);
        (y < height && x < width).then(|| &self.values[(y * width + x) * channels..][..channels])
    }
}

pub(super) fn conv2d(
    x: &HostTensor,
    conv: &Conv,
    geometry: ConvGeometry,
    residual: Option<&HostTensor>,
) -> Result<HostTensor> {
    let shape = shapes::conv2d(x, conv.size, &geometry, residual)?;
    let [out, channels, kernel_height, kernel_width] = conv.size;
    let dims = x.shape().dims();
    let input = PaddedInput { values: &values(x)?, size: [dims[0], dims[1], channels], geometry };
    let mut y = Vec::with_capacity(shape.numel());
    for row in 0..shape.dims()[0] {
        for column in 0..shape.dims()[1] {
            for o in 0..out {
                let mut sum = conv.bias[o];
                for i in 0..kernel_height {
                    for j in 0..kernel_width {
                        let pixel = input.pixel(row * geometry.stride + i, column * geometry.stride + j);
                        for (c, x) in pixel.unwrap_or_default().iter().enumerate() {
                            let at = ((o * channels + c) * kernel_height + i) * kernel_width + j;
                            sum += x * conv.kernel[at];
                        }
                    }
                }
                y.push(sum);
            }
        }
    }
    if let Some(residual) = residual {
        y.iter_mut().zip(values(residual)?).for_each(|(y, residual)| *y += residual);
    }
    tensor(shape, x.dtype(), y)
}
