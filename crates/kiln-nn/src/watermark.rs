//! The networks of the invisible watermark: one makes a pattern that carries 32 bits in a picture, one reads them again.
//!
//! ```text
//! luma [256, 256] ──patches of 4×4──▶ [64, 64, 16] ─┐
//! bits ──▶ carriers [32, 32, 8] ──2×──▶ [64, 64, 16] ┴─blocks──▶ pattern [128, 128]
//!
//! detail [256, 256] ──patches of 4×4──▶ blocks at 64², 32² and 16² ──means of 4×4 places──▶ 32 bits, and whether there are any
//! ```
//! How a picture becomes luma and detail, and what becomes of the pattern, is the engine's part.

use kiln_ops::{Activation, Backend, ConvGeometry, Tensor};
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
/// All convolutions have this geometry, or strides besides.
const SAME: ConvGeometry = ConvGeometry::same(3);

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
    /// Each layer's way back.
    back: Vec<Layer<B>>,
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
        let mut layers =
            vec![Layer::conv(b, &vars.at("input"), [WIDTH, PATCH * PATCH + SPREAD], 1, Way::Forward)?];
        for i in 0..3 {
            layers.push(Layer::block(b, &vars.at("blocks").at(i), WIDTH, Way::Forward)?);
        }
        Ok(WatermarkWriter {
            message: HostLayer::load(&vars.at("message"), [side * side * channels, WATERMARK_BITS])?,
            spread: load_conv(b, &vars.at("spread"), [SPREAD, channels], Way::Forward)?,
            layers,
            output: load_conv(b, &vars.at("output"), [4, WIDTH], Way::Forward)?,
        })
    }

    /// The pattern of these bits, `[128, 128]`, for a picture's luma, `[256, 256]` in [-1, 1].
    pub fn pattern(&self, b: &B, luma: &[f32], bits: &[bool; WATERMARK_BITS]) -> Result<Vec<f32>> {
        let [side, channels] = CARRIERS;
        let message = self.message.forward(&bits.map(|bit| if bit { 1.0 } else { -1.0 }));
        let carriers = b.upload(&HostTensor::from_f32([side, side, channels], message)?, DType::F32)?;
        let doubled = ConvGeometry { upsample: true, ..SAME };
        let carriers = b.conv2d(&carriers, &self.spread, doubled, None)?;
        let picture = b.upload(&patches(luma)?, DType::F32)?;
        let rows = |x: &B::Tensor, columns: usize| b.reshape(x, [PATCHES * PATCHES, columns].into());
        let x = b.concat_columns(&[&rows(&picture, PATCH * PATCH)?, &rows(&carriers, SPREAD)?])?;
        let x = b.reshape(&x, [PATCHES, PATCHES, PATCH * PATCH + SPREAD].into())?;
        let x = forward(b, &self.layers, x)?;
        let pattern = b.conv2d(&x, &self.output, SAME, None)?;
        Ok(b.download(&b.depth_to_space(&pattern)?)?.to_f32()?.into_owned())
    }
}

impl<B: Backend> WatermarkReader<B> {
    /// Loads the network.
    pub fn load(b: &B, vars: &Vars<'_>) -> Result<Self> {
        let load = |way: Way| {
            let vars = &vars.at("layers");
            Ok::<_, crate::Error>(vec![
                Layer::conv(b, &vars.at(0), [WIDTH, PATCH * PATCH], 1, way)?,
                Layer::block(b, &vars.at(1), WIDTH, way)?,
                Layer::block(b, &vars.at(2), WIDTH, way)?,
                Layer::conv(b, &vars.at(3), [DEEP, WIDTH], 2, way)?,
                Layer::block(b, &vars.at(4), DEEP, way)?,
                Layer::block(b, &vars.at(5), DEEP, way)?,
                Layer::conv(b, &vars.at(6), [DEEP, DEEP], 2, way)?,
                Layer::block(b, &vars.at(7), DEEP, way)?,
            ])
        };
        let output = HostLayer::load(&vars.at("output"), [WATERMARK_BITS + 1, MEANS])?;
        Ok(WatermarkReader { layers: load(Way::Forward)?, back: load(Way::Back)?, output })
    }

    /// Reads a picture's detail, `[256, 256]`.
    pub fn read(&self, b: &B, detail: &[f32]) -> Result<WatermarkLogits> {
        let x = forward(b, &self.layers, b.upload(&patches(detail)?, DType::F32)?)?;
        self.logits(b, &x)
    }

    /// Reads a picture's detail, and says how a loss changes with each of its pixels. `slopes` says how the loss changes with
    /// each logit, that of presence last; if it gives none, there is nothing to gain.
    pub fn gradient(
        &self,
        b: &B,
        detail: &[f32],
        slopes: impl FnOnce(&WatermarkLogits) -> Option<Vec<f32>>,
    ) -> Result<Option<Vec<f32>>> {
        let mut x = b.upload(&patches(detail)?, DType::F32)?;
        let mut kept = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let (inner, output) = layer.forward(b, &x)?;
            kept.push((inner, x));
            x = output;
        }
        let Some(slopes) = slopes(&self.logits(b, &x)?) else { return Ok(None) };
        let means = self.output.back(&slopes);
        let mut gradient = b.upload(&place_means_back(&means)?, DType::F32)?;
        for (back, (inner, input)) in self.back.iter().zip(kept).rev() {
            gradient = back.back(b, &gradient, inner.as_ref(), &x)?;
            x = input;
        }
        Ok(Some(unpatched(&b.download(&gradient)?.to_f32()?)))
    }

    fn logits(&self, b: &B, x: &B::Tensor) -> Result<WatermarkLogits> {
        let mut bits = self.output.forward(&place_means(&b.download(x)?.to_f32()?));
        let presence = bits.pop().unwrap_or(f32::NEG_INFINITY);
        Ok(WatermarkLogits { bits, presence })
    }
}

/// Which way values go through a layer.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Forward,
    /// That of gradients: from the output to the input.
    Back,
}

impl<B: Backend> Layer<B> {
    fn conv(b: &B, vars: &Vars<'_>, channels: [usize; 2], stride: usize, way: Way) -> Result<Self> {
        let geometry = ConvGeometry { stride, ..SAME };
        Ok(Layer::Conv { conv: load_conv(b, vars, channels, way)?, geometry })
    }

    fn block(b: &B, vars: &Vars<'_>, channels: usize, way: Way) -> Result<Self> {
        let conv = |name: &str| load_conv(b, &vars.at(name), [channels; 2], way);
        Ok(Layer::Block { first: conv("first")?, second: conv("second")? })
    }

    /// The output, and what is between a block's convolutions.
    fn forward(&self, b: &B, x: &B::Tensor) -> Result<(Option<B::Tensor>, B::Tensor)> {
        let relu = |x: B::Tensor| b.activation(&x, Activation::Relu);
        match self {
            Layer::Conv { conv, geometry } => Ok((None, relu(b.conv2d(x, conv, *geometry, None)?)?)),
            Layer::Block { first, second } => {
                let inner = relu(b.conv2d(x, first, SAME, None)?)?;
                let output = relu(b.conv2d(&inner, second, SAME, Some(x))?)?;
                Ok((Some(inner), output))
            }
        }
    }

    /// The gradient of the input by that of the output, in a layer that goes back.
    fn back(
        &self,
        b: &B,
        gradient: &B::Tensor,
        inner: Option<&B::Tensor>,
        output: &B::Tensor,
    ) -> Result<B::Tensor> {
        let gradient = where_active(b, gradient, output)?;
        match self {
            Layer::Conv { conv, geometry } => {
                Ok(b.conv2d(&spread(b, &gradient, geometry.stride)?, conv, SAME, None)?)
            }
            Layer::Block { first, second } => {
                let mut between = b.conv2d(&gradient, second, SAME, None)?;
                if let Some(inner) = inner {
                    between = where_active(b, &between, inner)?;
                }
                Ok(b.conv2d(&between, first, SAME, Some(&gradient))?)
            }
        }
    }
}

fn forward<B: Backend>(b: &B, layers: &[Layer<B>], x: B::Tensor) -> Result<B::Tensor> {
    layers.iter().try_fold(x, |x, layer| Ok(layer.forward(b, &x)?.1))
}

/// A convolution of 3², or the one that takes its gradients back.
fn load_conv<B: Backend>(b: &B, vars: &Vars<'_>, [out, input]: [usize; 2], way: Way) -> Result<B::Conv> {
    let weight = vars.finite_tensor("weight", [out, input, 3, 3])?;
    if way == Way::Forward {
        return Ok(b.load_conv(&weight, Some(&vars.finite_tensor("bias", [out])?))?);
    }
    let weight = weight.to_f32()?;
    let places = (0..input)
        .flat_map(|i| (0..out).flat_map(move |o| (0..9).rev().map(move |k| (o * input + i) * 9 + k)));
    let turned = HostTensor::from_f32([input, out, 3, 3], places.map(|place| weight[place]).collect())?;
    Ok(b.load_conv(&turned, None)?)
}

/// A gradient where ReLU let something through.
fn where_active<B: Backend>(b: &B, gradient: &B::Tensor, output: &B::Tensor) -> Result<B::Tensor> {
    let (values, passed) = (b.download(gradient)?, b.download(output)?);
    let (values, passed) = (values.to_f32()?, passed.to_f32()?);
    let values = values.iter().zip(&*passed).map(|(value, passed)| if *passed > 0.0 { *value } else { 0.0 });
    Ok(b.upload(&HostTensor::from_f32(gradient.shape().clone(), values.collect())?, DType::F32)?)
}

/// The pixels of `[h, w, c]` `stride` apart, zeros between them.
fn spread<B: Backend>(b: &B, x: &B::Tensor, stride: usize) -> Result<B::Tensor> {
    if stride == 1 {
        return Ok(x.clone());
    }
    let values = b.download(x)?;
    let &[height, width, channels] = values.shape().dims() else { return Ok(x.clone()) };
    let mut apart = vec![0.0; height * stride * width * stride * channels];
    for (i, pixel) in values.to_f32()?.chunks_exact(channels).enumerate() {
        let at = (i / width * stride * width + i % width) * stride * channels;
        apart[at..at + channels].copy_from_slice(pixel);
    }
    Ok(b.upload(&HostTensor::from_f32([height * stride, width * stride, channels], apart)?, DType::F32)?)
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

    /// The gradient of the input by that of the output.
    fn back(&self, gradient: &[f32]) -> Vec<f32> {
        let columns = self.weight.len() / self.bias.len();
        let mut back = vec![0.0; columns];
        for (row, slope) in self.weight.chunks_exact(columns).zip(gradient) {
            back.iter_mut().zip(row).for_each(|(back, weight)| *back += weight * slope);
        }
        back
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

/// The way back of `patches`.
fn unpatched(patches: &[f32]) -> Vec<f32> {
    let mut picture = vec![0.0; patches.len()];
    for (i, patch) in patches.chunks_exact(PATCH * PATCH).enumerate() {
        let corner = i / PATCHES * PATCH * WATERMARK_SIDE + i % PATCHES * PATCH;
        for (y, row) in patch.chunks_exact(PATCH).enumerate() {
            picture[corner + y * WATERMARK_SIDE..][..PATCH].copy_from_slice(row);
        }
    }
    picture
}

/// Side of a place of which there is a mean.
const PLACE: usize = LAST / PLACES;

/// Which mean a pixel of the reader's last layer counts for, of those of a channel.
fn place_of(pixel: usize) -> usize {
    pixel / LAST / PLACE * PLACES + pixel % LAST / PLACE
}

/// The means over places of `[16, 16, 128]`, channel by channel.
fn place_means(x: &[f32]) -> Vec<f32> {
    let mut means = vec![0.0; MEANS];
    for (i, pixel) in x.chunks_exact(DEEP).enumerate() {
        for (channel, value) in pixel.iter().enumerate() {
            means[channel * PLACES * PLACES + place_of(i)] += value / (PLACE * PLACE) as f32;
        }
    }
    means
}

/// The way back of `place_means`.
fn place_means_back(gradient: &[f32]) -> Result<HostTensor> {
    let pixels = (0..LAST * LAST).flat_map(|i| {
        (0..DEEP)
            .map(move |channel| gradient[channel * PLACES * PLACES + place_of(i)] / (PLACE * PLACE) as f32)
    });
    Ok(HostTensor::from_f32([LAST, LAST, DEEP], pixels.collect())?)
}
