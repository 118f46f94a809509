//! TAEF2, the tiny autoencoder for FLUX.2: previews, and a fast stand-in for the real one.
//!
//! It works on the *normalised* latent that the transformer emits, unpatched to `[h/8, w/8, 32]`: no batch norm on
//! either side. Pictures are in [0, 1]. Two ways of numbering its layers are in use: upstream's `Sequential` indices
//! (`decoder.1.weight` is the first convolution, 0 the clamp) and `decoder.layers.N` counted from the first convolution.

use kiln_ops::{Activation, Backend, ConvGeometry};
use kiln_tensor::DType;
use kiln_weights::Vars;

use crate::{Observer, Result};

const WIDTH: usize = 64;
const POOL: usize = 256;
const POOL_GROUPS: usize = 4;
const POOL_EPS: f32 = 1e-5;
/// Channels of the unpatched latent.
const LATENT: usize = 32;

/// The tiny autoencoder on a backend.
pub struct Taef2<B: Backend> {
    dtype: DType,
    encoder: Vec<Layer<B>>,
    decoder: Vec<Layer<B>>,
}

enum Layer<B: Backend> {
    Conv { conv: B::Conv, geometry: ConvGeometry },
    Block(Box<Block<B>>),
    Activation(Activation),
}

/// Three convolutions around the input, after an optional pooled branch.
struct Block<B: Backend> {
    pool: Option<Pool<B>>,
    convs: [B::Conv; 3],
}

struct Pool<B: Backend> {
    widen: B::Conv,
    weight: B::Tensor,
    bias: B::Tensor,
    narrow: B::Conv,
}

/// What stands at a place of the two `Sequential`s.
#[derive(Clone, Copy)]
enum Kind {
    In,
    Out,
    Down,
    Up,
    Plain,
    Pooled,
    Relu,
    Clamp,
    /// Doubles the picture; done by the convolution after it.
    Nearest,
}

use Kind::*;

#[rustfmt::skip]
const ENCODER: [Kind; 15] = [
    In, Plain, Down, Plain, Plain, Plain, Down, Plain, Plain, Plain, Down, Pooled, Pooled, Pooled, Out,
];
#[rustfmt::skip]
const DECODER: [Kind; 20] = [
    Clamp, In, Relu, Pooled, Pooled, Pooled, Nearest, Up, Plain, Plain, Plain, Nearest, Up, Plain, Plain, Plain,
    Nearest, Up, Plain, Out,
];

impl<B: Backend> Taef2<B> {
    /// Whether these weights are TAEF2's: its pooled branch is found nowhere else.
    pub fn recognise(vars: &Vars<'_>) -> bool {
        ["decoder.3.pool.0.weight", "decoder.layers.2.pool.0.weight"].iter().any(|name| vars.contains(name))
    }

    /// Loads both halves; activations will be `dtype`.
    pub fn load(b: &B, vars: &Vars<'_>, dtype: DType) -> Result<Self> {
        let layered = vars.contains("decoder.layers.0.weight");
        let scope = |half: &str| if layered { vars.at(half).at("layers") } else { vars.at(half) };
        let encoder = load_half(b, &scope("encoder"), &ENCODER, 0, [3, LATENT])?;
        let decoder = load_half(b, &scope("decoder"), &DECODER, usize::from(layered), [LATENT, 3])?;
        Ok(Taef2 { dtype, encoder, decoder })
    }

    /// What its activations are.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The normalised latent, `[h/8, w/8, 32]`, of a picture, `[h, w, 3]` in [0, 1].
    pub fn encode(&self, b: &B, picture: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        forward(b, &self.encoder, picture, observer)
    }

    /// The picture, `[8h, 8w, 3]` in about [0, 1], of a normalised latent, `[h, w, 32]`.
    pub fn decode(&self, b: &B, latent: B::Tensor, observer: &mut dyn Observer<B>) -> Result<B::Tensor> {
        forward(b, &self.decoder, latent, observer)
    }
}

/// The file's numbers leave out the first `skipped` places of `kinds`, which have no weights.
fn load_half<B: Backend>(
    b: &B,
    vars: &Vars<'_>,
    kinds: &[Kind],
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
            In => conv([WIDTH, input], same, true)?,
            Out => conv([out, WIDTH], same, true)?,
            Down => conv([WIDTH; 2], ConvGeometry { stride: 2, ..same }, false)?,
            Up => conv([WIDTH; 2], ConvGeometry { upsample: true, ..same }, false)?,
            Plain => Layer::Block(Box::new(Block::load(b, &vars, false)?)),
            Pooled => Layer::Block(Box::new(Block::load(b, &vars, true)?)),
            Relu => Layer::Activation(Activation::Relu),
            Clamp => Layer::Activation(Activation::SoftClamp),
            Nearest => continue,
        });
    }
    Ok(layers)
}

fn load_conv<B: Backend>(b: &B, vars: &Vars<'_>, [out, input]: [usize; 2], bias: bool) -> Result<B::Conv> {
    let bias = bias.then(|| vars.tensor("bias", [out])).transpose()?;
    Ok(b.conv(&vars.tensor("weight", [out, input, 3, 3])?, bias.as_ref())?)
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
        observer.see(&format!("taef2.layer{i}"), &x)?;
    }
    Ok(x)
}

impl<B: Backend> Block<B> {
    fn load(b: &B, vars: &Vars<'_>, pooled: bool) -> Result<Self> {
        let conv = |i: usize| load_conv(b, &vars.at("conv").at(i), [WIDTH; 2], true);
        let pool = pooled.then(|| Pool::load(b, &vars.at("pool"))).transpose()?;
        Ok(Block { pool, convs: [conv(0)?, conv(2)?, conv(4)?] })
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

impl<B: Backend> Pool<B> {
    fn load(b: &B, vars: &Vars<'_>) -> Result<Self> {
        let norm =
            |name: &str| Ok::<_, crate::Error>(b.upload(&vars.at(1).tensor(name, [POOL])?, DType::F32)?);
        Ok(Pool {
            widen: b.conv(&vars.at(0).tensor("weight", [POOL, WIDTH, 1, 1])?, None)?,
            weight: norm("weight")?,
            bias: norm("bias")?,
            narrow: b.conv(&vars.at(3).tensor("weight", [WIDTH, POOL, 1, 1])?, None)?,
        })
    }

    fn forward(&self, b: &B, x: &B::Tensor) -> Result<B::Tensor> {
        let point = ConvGeometry::same(1);
        let h = b.conv2d(x, &self.widen, point, None)?;
        let h = b.group_norm(&h, POOL_GROUPS, &self.weight, &self.bias, POOL_EPS, Some(Activation::Relu))?;
        Ok(b.conv2d(&h, &self.narrow, point, Some(x))?)
    }
}
