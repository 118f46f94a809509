//! The networks of the invisible watermark: one makes a pattern that carries 32 bits in a picture, one reads them again.
//!
//! ```text
//! luma [256, 256] ──patches of 4×4──▶ [64, 64, 16] ─┐
//! bits ──▶ carriers [32, 32, 8] ──2×──▶ [64, 64, 16] ┴─blocks──▶ pattern [128, 128]
//!
//! detail [256, 256] ──patches of 4×4──▶ blocks at 64², 32² and 16² ──means of 4×4 places──▶ 32 bits, and whether there are any
//! ```
//! How a picture becomes luma and detail, and what becomes of the pattern, is the engine's part.

use kiln_ops::{Activation, Backend, ConvGeometry};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use crate::Result;

/// Bits of a watermark.
pub const WATERMARK_BITS: usize = 32;
/// Side of the pictures that the networks see.
pub const WATERMARK_SIDE: usize = 256;
/// Side of the pattern.
pub const PATTERN_SIDE: usize = WATERMARK_SIDE / 2;

/// Side of a patch, in pixels.
const PATCH: usize = 4;
/// Side of a picture, in patches.
const PATCHES: usize = WATERMARK_SIDE / PATCH;
/// Side and channels of the carriers, and the channels that a convolution makes of them.
const CARRIERS: [usize; 2] = [32, 8];
const SPREAD: usize = 16;
/// Channels at 64², and below.
const WIDTH: usize = 64;
const DEEP: usize = 128;
/// Side of the reader's last layer, and of the means of it.
const LAST: usize = PATCHES / 4;
const PLACES: usize = 4;
const MEANS: usize = DEEP * PLACES * PLACES;

/// The network that makes patterns.
pub struct WatermarkWriter<B: Backend> {
    message: HostLayer,
    spread: B::Conv,
    layers: Vec<Layer<B>>,
    output: B::Conv,
}

/// The network that reads bits.
pub struct WatermarkReader<B: Backend> {
    layers: Vec<Layer<B>>,
    output: HostLayer,
}

/// What a reader finds in a picture.
#[derive(Clone, Debug)]
pub struct WatermarkLogits {
    /// One for each bit: above 0 for 1, the farther from 0 the surer.
    pub bits: Vec<f32>,
    /// Above 0 if there is a watermark.
    pub presence: f32,
}

/// Layers that end with ReLU.
enum Layer<B: Backend> {
    Conv {
        conv: B::Conv,
        geometry: ConvGeometry,
    },
    /// `second(relu(first(x))) + x`.
    Block {
        first: B::Conv,
        second: B::Conv,
    },
}

/// A linear layer of one row, too small for a device.
struct HostLayer {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl<B: Backend> WatermarkWriter<B> {
    /// Loads the network.
    pub fn load(b: &B, vars: &Vars<'_>) -> Result<Self> {
        let [side, channels] = CARRIERS;
        let mut layers = vec![Layer::conv(b, &vars.at("input"), [WIDTH, PATCH * PATCH + SPREAD], 1)?];
        for i in 0..3 {
            layers.push(Layer::block(b, &vars.at("blocks").at(i), WIDTH)?);
        }
        Ok(WatermarkWriter {
            message: HostLayer::load(&vars.at("message"), [side * side * channels, WATERMARK_BITS])?,
            spread: load_conv(b, &vars.at("spread"), [SPREAD, channels])?,
            layers,
            output: load_conv(b, &vars.at("output"), [4, WIDTH])?,
        })
    }

    /// The pattern of these bits, `[128, 128]`, for a picture's luma, `[256, 256]` in [-1, 1].
    pub fn pattern(&self, b: &B, luma: &[f32], bits: &[bool; WATERMARK_BITS]) -> Result<Vec<f32>> {
        let [side, channels] = CARRIERS;
        let message = self.message.forward(&bits.map(|bit| if bit { 1.0 } else { -1.0 }));
        let carriers = b.upload(&HostTensor::from_f32([side, side, channels], message)?, DType::F32)?;
        let doubled = ConvGeometry { upsample: true, ..ConvGeometry::same(3) };
        let carriers = b.conv2d(&carriers, &self.spread, doubled, None)?;
        let picture = b.upload(&patches(luma)?, DType::F32)?;
        let rows = |x: &B::Tensor, columns: usize| b.reshape(x, [PATCHES * PATCHES, columns].into());
        let x = b.concat_columns(&[&rows(&picture, PATCH * PATCH)?, &rows(&carriers, SPREAD)?])?;
        let x = b.reshape(&x, [PATCHES, PATCHES, PATCH * PATCH + SPREAD].into())?;
        let x = forward(b, &self.layers, x)?;
        let pattern = b.conv2d(&x, &self.output, ConvGeometry::same(3), None)?;
        Ok(b.download(&b.depth_to_space(&pattern)?)?.to_f32()?.into_owned())
    }
}

impl<B: Backend> WatermarkReader<B> {
    /// Loads the network.
    pub fn load(b: &B, vars: &Vars<'_>) -> Result<Self> {
        let layers = &vars.at("layers");
        let layers = vec![
            Layer::conv(b, &layers.at(0), [WIDTH, PATCH * PATCH], 1)?,
            Layer::block(b, &layers.at(1), WIDTH)?,
            Layer::block(b, &layers.at(2), WIDTH)?,
            Layer::conv(b, &layers.at(3), [DEEP, WIDTH], 2)?,
            Layer::block(b, &layers.at(4), DEEP)?,
            Layer::block(b, &layers.at(5), DEEP)?,
            Layer::conv(b, &layers.at(6), [DEEP, DEEP], 2)?,
            Layer::block(b, &layers.at(7), DEEP)?,
        ];
        let output = HostLayer::load(&vars.at("output"), [WATERMARK_BITS + 1, MEANS])?;
        Ok(WatermarkReader { layers, output })
    }

    /// Reads a picture's detail, `[256, 256]`.
    pub fn read(&self, b: &B, detail: &[f32]) -> Result<WatermarkLogits> {
        let x = forward(b, &self.layers, b.upload(&patches(detail)?, DType::F32)?)?;
        let mut bits = self.output.forward(&place_means(&b.download(&x)?.to_f32()?));
        let presence = bits.pop().unwrap_or(f32::NEG_INFINITY);
        Ok(WatermarkLogits { bits, presence })
    }
}

impl<B: Backend> Layer<B> {
    fn conv(b: &B, vars: &Vars<'_>, channels: [usize; 2], stride: usize) -> Result<Self> {
        let geometry = ConvGeometry { stride, ..ConvGeometry::same(3) };
        Ok(Layer::Conv { conv: load_conv(b, vars, channels)?, geometry })
    }

    fn block(b: &B, vars: &Vars<'_>, channels: usize) -> Result<Self> {
        let conv = |name: &str| load_conv(b, &vars.at(name), [channels; 2]);
        Ok(Layer::Block { first: conv("first")?, second: conv("second")? })
    }
}

fn load_conv<B: Backend>(b: &B, vars: &Vars<'_>, [out, input]: [usize; 2]) -> Result<B::Conv> {
    let bias = vars.finite_tensor("bias", [out])?;
    Ok(b.load_conv(&vars.finite_tensor("weight", [out, input, 3, 3])?, Some(&bias))?)
}

fn forward<B: Backend>(b: &B, layers: &[Layer<B>], mut x: B::Tensor) -> Result<B::Tensor> {
    let relu = |x: B::Tensor| b.activation(&x, Activation::Relu);
    for layer in layers {
        x = match layer {
            Layer::Conv { conv, geometry } => relu(b.conv2d(&x, conv, *geometry, None)?)?,
            Layer::Block { first, second } => {
                let same = ConvGeometry::same(3);
                let h = relu(b.conv2d(&x, first, same, None)?)?;
                relu(b.conv2d(&h, second, same, Some(&x))?)?
            }
        };
    }
    Ok(x)
}

impl HostLayer {
    fn load(vars: &Vars<'_>, [rows, columns]: [usize; 2]) -> Result<Self> {
        let values = |tensor: HostTensor| Ok::<_, crate::Error>(tensor.to_f32()?.into_owned());
        Ok(HostLayer {
            weight: values(vars.finite_tensor("weight", [rows, columns])?)?,
            bias: values(vars.finite_tensor("bias", [rows])?)?,
        })
    }

    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
        self.weight.chunks_exact(x.len()).zip(&self.bias).map(|(row, bias)| dot(row) + bias).collect()
    }
}

/// `[256, 256]` as `[64, 64, 16]`: channel `4i + j` is pixel `(i, j)` of the patch.
fn patches(picture: &[f32]) -> Result<HostTensor> {
    let mut patches = Vec::with_capacity(picture.len());
    for rows in picture.chunks_exact(PATCH * WATERMARK_SIDE) {
        for column in (0..WATERMARK_SIDE).step_by(PATCH) {
            for row in rows.chunks_exact(WATERMARK_SIDE) {
                patches.extend_from_slice(&row[column..column + PATCH]);
            }
        }
    }
    Ok(HostTensor::from_f32([PATCHES, PATCHES, PATCH * PATCH], patches)?)
}

/// The means over places of `[16, 16, 128]`, channel by channel.
fn place_means(x: &[f32]) -> Vec<f32> {
    const STEP: usize = LAST / PLACES;
    let mut means = vec![0.0; MEANS];
    for (i, pixel) in x.chunks_exact(DEEP).enumerate() {
        let place = i / LAST / STEP * PLACES + i % LAST / STEP;
        for (channel, value) in pixel.iter().enumerate() {
            means[channel * PLACES * PLACES + place] += value / (STEP * STEP) as f32;
        }
    }
    means
}
