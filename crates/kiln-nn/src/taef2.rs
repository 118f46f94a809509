//! TAEF2, the tiny autoencoder for FLUX.2, for previews and as a fast replacement for the full one.
//!
//! Image `[h, w, 3]` in [0, 1] to latent `[h/8, w/8, 32]` and back: three levels of residual blocks with 64 channels.
//!
//! Easy to get wrong: the latent is the *normalised* one that the transformer works on, unpatched; there is no batch norm on
//! either side. Checkpoints number the layers in two ways: upstream's `Sequential` indices (`decoder.1.weight` is the first
//! convolution, 0 the clamp), and `decoder.layers.N` counted from the first convolution.

use kiln_ops::{Activation, Backend, ConvGeometry};
use kiln_tensor::DType;
use kiln_weights::{KnownTensors, Vars};

use crate::{Observer, Result};

const WIDTH: usize = 64;
const POOL_WIDTH: usize = 256;
const POOL_GROUPS: usize = 4;
const POOL_EPS: f32 = 1e-5;
/// Channels of the unpatched latent.
const LATENT: usize = 32;

/// The tiny autoencoder's weights on a backend.
pub struct Taef2<B: Backend> {
    dtype: DType,
    encoder: Vec<Layer<B>>,
    decoder: Vec<Layer<B>>,
}

enum Layer<B: Backend> {
    Conv { conv: B::Conv, geometry: ConvGeometry },
    Block(Box<ResidualBlock<B>>),
    Activation(Activation),
}

/// A residual block of three convolutions, after an optional pool branch.
struct ResidualBlock<B: Backend> {
    pool: Option<PoolBranch<B>>,
    convs: [B::Conv; 3],
}

/// A residual branch: 1×1 convolution to 256 channels, group norm, ReLU, 1×1 convolution back.
struct PoolBranch<B: Backend> {
    widen: B::Conv,
    weight: B::Tensor,
    bias: B::Tensor,
    narrow: B::Conv,
}

/// The layers of the two `Sequential`s.
#[derive(Clone, Copy)]
enum LayerKind {
    ConvIn,
    ConvOut,
    Downsample,
    Upsample,
    Residual,
    /// A residual block with a pool branch.
    Pooled,
    Relu,
    Clamp,
    /// Nearest-neighbour upsampling, done by the convolution that follows.
    Nearest,
}

use LayerKind::*;

/// A tensor that only files with `layers` in their names have.
const LAYERED: &str = "decoder.layers.0.weight";

impl LayerKind {
    fn add_tensors(self, name: &str, [input, out]: [usize; 2], tensors: &mut KnownTensors) {
        match self {
            ConvIn => tensors.add_biased(name, [WIDTH, input, 3, 3]),
            ConvOut => tensors.add_biased(name, [out, WIDTH, 3, 3]),
            Downsample | Upsample => tensors.add(format!("{name}.weight"), [WIDTH, WIDTH, 3, 3]),
            Residual | Pooled => {
                for i in [0, 2, 4] {
                    tensors.add_biased(&format!("{name}.conv.{i}"), [WIDTH, WIDTH, 3, 3]);
                }
            }
            Relu | Clamp | Nearest => {}
        }
        if let Pooled = self {
            tensors.add(format!("{name}.pool.0.weight"), [POOL_WIDTH, WIDTH, 1, 1]);
            tensors.add_biased(&format!("{name}.pool.1"), [POOL_WIDTH]);
            tensors.add(format!("{name}.pool.3.weight"), [WIDTH, POOL_WIDTH, 1, 1]);
        }
    }
}

#[rustfmt::skip]
const ENCODER: [LayerKind; 15] = [
    ConvIn, Residual,
    Downsample, Residual, Residual, Residual,
    Downsample, Residual, Residual, Residual,
    Downsample, Pooled, Pooled, Pooled, ConvOut,
];
#[rustfmt::skip]
const DECODER: [LayerKind; 20] = [
    Clamp, ConvIn, Relu, Pooled, Pooled, Pooled,
    Nearest, Upsample, Residual, Residual, Residual,
    Nearest, Upsample, Residual, Residual, Residual,
    Nearest, Upsample, Residual, ConvOut,
];

impl<B: Backend> Taef2<B> {
    /// Whether these are TAEF2's weights: no other autoencoder has its pool branch.
    pub fn matches(vars: &Vars<'_>) -> bool {
        ["decoder.3.pool.0.weight", "decoder.layers.2.pool.0.weight"].iter().any(|name| vars.contains(name))
    }

    /// Lists all tensors of weights with these names.
    pub fn tensors(vars: &Vars<'_>) -> KnownTensors {
        let layered = vars.contains(LAYERED);
        let mut tensors = KnownTensors::default();
        let halves = [
            ("encoder", &ENCODER[..], 0, [3, LATENT]),
            ("decoder", &DECODER[..], usize::from(layered), [LATENT, 3]),
        ];
        for (half, kinds, skipped, channels) in halves {
            for (i, kind) in kinds.iter().enumerate() {
                let layers = if layered { ".layers" } else { "" };
                let name = format!("{half}{layers}.{}", i.saturating_sub(skipped));
                kind.add_tensors(&name, channels, &mut tensors);
            }
        }
        tensors
    }

    /// Loads both halves; activations will be `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, dtype: DType) -> Result<Self> {
        let layered = vars.contains(LAYERED);
        let scope = |half: &str| if layered { vars.at(half).at("layers") } else { vars.at(half) };
        let encoder = load_half(b, &scope("encoder"), &ENCODER, 0, [3, LATENT])?;
        let decoder = load_half(b, &scope("decoder"), &DECODER, usize::from(layered), [LATENT, 3])?;
        Ok(Taef2 { dtype, encoder, decoder })
    }

    /// The dtype of the activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Encodes an image, `[h, w, 3]` in [0, 1], to the normalised latent, `[h/8, w/8, 32]`.
    pub fn encode(&self, b: &B, image: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        forward(b, &self.encoder, image, observer)
    }

    /// Decodes a normalised latent, `[h, w, 32]`, to an image, `[8h, 8w, 3]` in about [0, 1].
    pub fn decode(&self, b: &B, latent: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        forward(b, &self.decoder, latent, observer)
    }
}

/// Loads the encoder or decoder. The checkpoint's numbering leaves out the first `skipped` layers, which have no weights.
fn load_half<B: Backend>(
    b: &B,
    vars: &Vars<'_>,
    kinds: &[LayerKind],
    skipped: usize,
    [input, out]: [usize; 2],
) -> Result<Vec<Layer<B>>> {
    let mut layers = Vec::new();
    for (i, kind) in kinds.iter().enumerate() {
        let vars = vars.at(i.saturating_sub(skipped));
        let conv = |channels, geometry, bias| {
            load_conv(b, &vars, channels, bias).map(|conv| Layer::Conv { conv, geometry })
        };
        let same = ConvGeometry::same(3);
        layers.push(match kind {
            ConvIn => conv([WIDTH, input], same, true)?,
            ConvOut => conv([out, WIDTH], same, true)?,
            Downsample => conv([WIDTH; 2], ConvGeometry { stride: 2, ..same }, false)?,
            Upsample => conv([WIDTH; 2], ConvGeometry { upsample: true, ..same }, false)?,
            Residual => Layer::Block(Box::new(ResidualBlock::load(b, &vars, false)?)),
            Pooled => Layer::Block(Box::new(ResidualBlock::load(b, &vars, true)?)),
            Relu => Layer::Activation(Activation::Relu),
            Clamp => Layer::Activation(Activation::SoftClamp),
            Nearest => continue,
        });
    }
    Ok(layers)
}

fn load_conv<B: Backend>(b: &B, vars: &Vars<'_>, [out, input]: [usize; 2], bias: bool) -> Result<B::Conv> {
    let bias = bias.then(|| vars.finite_tensor("bias", [out])).transpose()?;
    Ok(b.load_conv(&vars.finite_tensor("weight", [out, input, 3, 3])?, bias.as_ref())?)
}

fn forward<B: Backend>(
    b: &B,
    layers: &[Layer<B>],
    mut x: B::Tensor,
    observer: &mut dyn Observer<B>,
) -> Result<B::Tensor> {
    for (i, layer) in layers.iter().enumerate() {
        x = match layer {
            Layer::Conv { conv, geometry } => b.conv2d(&x, conv, *geometry, None)?,
            Layer::Block(block) => block.forward(b, x)?,
            Layer::Activation(f) => b.activation(&x, *f)?,
        };
        observer.inspect(&format!("taef2.layer{i}"), &x)?;
    }
    Ok(x)
}

impl<B: Backend> ResidualBlock<B> {
    fn load(b: &B, vars: &Vars<'_>, pooled: bool) -> Result<Self> {
        let conv = |i: usize| load_conv(b, &vars.at("conv").at(i), [WIDTH; 2], true);
        let pool = pooled.then(|| PoolBranch::load(b, &vars.at("pool"))).transpose()?;
        Ok(ResidualBlock { pool, convs: [conv(0)?, conv(2)?, conv(4)?] })
    }

    fn forward(&self, b: &B, x: B::Tensor) -> Result<B::Tensor> {
        let x = match &self.pool {
            Some(pool) => pool.forward(b, &x)?,
            None => x,
        };
        let same = ConvGeometry::same(3);
        let [first, second, third] = &self.convs;
        let h = b.activation(&b.conv2d(&x, first, same, None)?, Activation::Relu)?;
        let h = b.activation(&b.conv2d(&h, second, same, None)?, Activation::Relu)?;
        Ok(b.activation(&b.conv2d(&h, third, same, Some(&x))?, Activation::Relu)?)
    }
}

impl<B: Backend> PoolBranch<B> {
    fn load(b: &B, vars: &Vars<'_>) -> Result<Self> {
        let norm = |name: &str| {
            Ok::<_, crate::Error>(b.upload(&vars.at(1).finite_tensor(name, [POOL_WIDTH])?, DType::F32)?)
        };
        Ok(PoolBranch {
            widen: b.load_conv(&vars.at(0).finite_tensor("weight", [POOL_WIDTH, WIDTH, 1, 1])?, None)?,
            weight: norm("weight")?,
            bias: norm("bias")?,
            narrow: b.load_conv(&vars.at(3).finite_tensor("weight", [WIDTH, POOL_WIDTH, 1, 1])?, None)?,
        })
    }

    fn forward(&self, b: &B, x: &B::Tensor) -> Result<B::Tensor> {
        let pointwise = ConvGeometry::same(1);
        let h = b.conv2d(x, &self.widen, pointwise, None)?;
        let h = b.group_norm(&h, POOL_GROUPS, &self.weight, &self.bias, POOL_EPS, Some(Activation::Relu))?;
        Ok(b.conv2d(&h, &self.narrow, pointwise, Some(x))?)
    }
}
