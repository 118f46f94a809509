//! Weights of linear layers and convolutions.
//!
//! A weight stays in the host's (perhaps memory-mapped) bytes and is widened on the fly. Two kinds are rearranged
//! at load: int8 weights into AMX tiles, if there is AMX, and convolution kernels to channels-last.

use kiln_ops::{Error, Residency, Result, shapes};
use kiln_tensor::{DType, HostLinear, HostTensor, LinearWeight, LoraDelta, Rotation};

use crate::Context;
use crate::matrix::StackedMatrix;

/// A linear layer: its weight in the host's (perhaps memory-mapped) bytes, its bias and its low-rank updates.
#[derive(Clone)]
pub struct CpuWeight {
    pub(crate) matrix: StackedMatrix,
    /// The scale of every row of an int8 weight; else empty.
    pub(crate) scales: Vec<f32>,
    /// How the rows of an int8 weight are rotated.
    pub(crate) rotation: Rotation,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) updates: Vec<LowRankUpdate>,
}

/// A LoRA: `y[.., first_col..] += scale * (x · downᵀ) · upᵀ`.
#[derive(Clone)]
pub(crate) struct LowRankUpdate {
    pub first_col: usize,
    pub down: StackedMatrix,
    pub up: StackedMatrix,
    pub scale: f32,
}

impl LowRankUpdate {
    /// The updates of a layer with this many input columns.
    fn from_deltas(deltas: &[LoraDelta], cols: usize) -> Result<Vec<LowRankUpdate>> {
        let update = |delta: &LoraDelta| {
            let rank = delta.rank();
            Ok(LowRankUpdate {
                first_col: delta.row,
                down: StackedMatrix::new("weight", vec![delta.down.clone()], cols)?,
                up: StackedMatrix::new("weight", vec![delta.up.clone()], rank)?,
                scale: delta.scale,
            })
        };
        deltas.iter().filter(|d| d.rank() > 0).map(update).collect()
    }
}

pub(crate) fn load_weight(cx: &Context, linear: HostLinear, _: Residency) -> Result<CpuWeight> {
    let cols = linear.cols();
    if linear.fp8_matmul() {
        return Err(Error::DType { op: "weight", dtype: DType::F8E4M3, backend: "cpu".into() });
    }
    if linear.nvfp4_matmul() {
        return Err(Error::Arguments { op: "weight", what: "no nvfp4 matmul on cpu".into() });
    }
    let updates = LowRankUpdate::from_deltas(linear.deltas(), cols)?;
    let bias = linear.bias().map(|b| to_f32("weight", b)).transpose()?;
    let mut rotation = Rotation::None;
    let (matrix, scales) = match linear.weight() {
        LinearWeight::Dense(matrices) => (StackedMatrix::new("weight", matrices.clone(), cols)?, Vec::new()),
        LinearWeight::Packed(packed) => (StackedMatrix::packed(packed.clone(), cols), Vec::new()),
        LinearWeight::Int8 { rows, scales, rotation: rotated } => {
            rotation = *rotated;
            let scales = scales.iter().map(|s| to_f32("weight", s)).collect::<Result<Vec<_>>>()?;
            (StackedMatrix::new("weight", rows.clone(), cols)?.pack_int8(cx)?, scales.concat())
        }
    };
    Ok(CpuWeight { matrix, scales, rotation, bias, updates })
}

pub(crate) fn with_deltas(_: &Context, w: &CpuWeight, deltas: Vec<LoraDelta>) -> Result<CpuWeight> {
    shapes::with_deltas(&deltas, w.size())?;
    let updates = LowRankUpdate::from_deltas(&deltas, w.matrix.cols)?;
    let (matrix, scales, bias) = (w.matrix.clone(), w.scales.clone(), w.bias.clone());
    Ok(CpuWeight { matrix, scales, rotation: w.rotation, bias, updates })
}

impl CpuWeight {
    /// Whether it is packed as AMX tiles.
    pub(crate) fn is_amx_packed(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.matrix.amx_tiles().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// `[out, in]`.
    pub(crate) fn size(&self) -> [usize; 2] {
        [self.matrix.rows, self.matrix.cols]
    }
}

/// A convolution: its kernel as `[out, height · width · in]`, which is the layout of a patch of a channels-last image, and
/// its bias.
pub struct CpuConv {
    /// `[out, in, height, width]`.
    pub(crate) size: [usize; 4],
    pub(crate) kernel: StackedMatrix,
    pub(crate) bias: Option<Vec<f32>>,
}

pub(crate) fn load_conv(_: &Context, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CpuConv> {
    let size = shapes::load_conv(kernel, bias)?;
    let [out, channels, height, width] = size;
    let taps = height * width;
    let shape = [out, taps * channels];
    // bf16 stays bf16, so that a kernel takes no more memory than its file.
    let kernel = match kernel.dtype() {
        DType::BF16 => HostTensor::from_bf16(shape, channels_last(&kernel.to_bf16()?, channels, taps))?,
        DType::F32 | DType::F16 | DType::F64 => {
            HostTensor::from_f32(shape, channels_last(&kernel.to_f32()?, channels, taps))?
        }
        dtype => return Err(Error::DType { op: "conv", dtype, backend: "cpu".into() }),
    };
    let bias = bias.map(|b| to_f32("conv", b)).transpose()?;
    Ok(CpuConv { size, kernel: StackedMatrix::new("conv", vec![kernel], taps * channels)?, bias })
}

/// Transposes `[out, channels, taps]` to `[out, taps, channels]`.
fn channels_last<T: Copy>(x: &[T], channels: usize, taps: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(x.len());
    for x in x.chunks(channels * taps) {
        for tap in 0..taps {
            out.extend((0..channels).map(|channel| x[channel * taps + tap]));
        }
    }
    out
}

fn to_f32(op: &'static str, x: &HostTensor) -> Result<Vec<f32>> {
    match x.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(x.to_f32()?.into_owned()),
        dtype => Err(Error::DType { op, dtype, backend: "cpu".into() }),
    }
}
