//! A backend that computes what [`Reference`] does, but with one fault.

use kiln_ops::signatures::*;
use kiln_ops::{
    AttentionMask, Backend, Reference, RopeLayout, TrainingBackend, backend_methods, shapes, training_methods,
};
use kiln_tensor::LinearWeight;
use kiln_tensor::packed::{BlockScales, PackedTensor, Scales};

/// The fault of a [`FaultyBackend`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// The last element of every result is not written.
    LostTail,
    /// The last element of every result is NaN.
    NotANumber,
    /// Every result is off by this factor.
    Scaled(f32),
    /// Variances as mean(x²) − mean(x)² in f32.
    OnePassVariance,
    /// Softmax without subtracting the maximum, in f32.
    UnshiftedExp,
    /// The causal mask allows padding.
    AttendsToPadding,
    /// Isolated rows attend to all keys.
    NotIsolated,
    /// Query head h uses key head h mod kv_heads.
    InterleavedHeads,
    /// The rotary embedding uses the other layout.
    OtherRopeLayout,
    /// Every row uses the parameters of the first group.
    FirstGroup,
    /// All LoRA deltas start at row 0.
    DeltasAtZero,
    /// int8 scales as if 128 were the largest integer.
    Scale128,
    /// The input of an nvfp4 product is not rounded.
    UnroundedNvfp4,
    /// Blocks of an nvfp4 weight have the scales of their neighbours.
    NeighbourScales,
    /// Top and bottom, and left and right padding are swapped.
    SwappedPadding,
    /// Truncation to bf16 instead of rounding.
    Truncates,
    /// All results are f32.
    AlwaysF32,
    /// Other error messages for invalid arguments.
    OtherMessage,
}

#[derive(Clone)]
pub struct FaultyBackend(pub Fault);

const R: Reference = Reference::new();

/// Forwards a method to the reference; the listed ones may be faulty.
macro_rules! forward {
    ($self:ident, download $args:tt) => { $self.faulty_download $args };
    ($self:ident, download_bytes($x:ident, $scale:ident, $shift:ident)) => {
        R.download_bytes(&$self.faulty_download($x)?, $scale, $shift)
    };
    ($self:ident, load_weight $args:tt) => { $self.faulty_load_weight $args };
    ($self:ident, with_deltas $args:tt) => { $self.faulty_with_deltas $args };
    ($self:ident, cast $args:tt) => { $self.faulty_cast $args };
    ($self:ident, linear $args:tt) => { $self.faulty_linear $args };
    ($self:ident, linear_gated_add $args:tt) => { $self.faulty_linear_gated_add $args };
    ($self:ident, ada_layer_norm $args:tt) => { $self.faulty_ada_layer_norm $args };
    ($self:ident, rms_norm $args:tt) => { $self.faulty_rms_norm $args };
    ($self:ident, norm_rope $args:tt) => { $self.faulty_norm_rope $args };
    ($self:ident, attention $args:tt) => { $self.faulty_attention $args };
    ($self:ident, group_norm $args:tt) => { $self.faulty_group_norm $args };
    ($self:ident, conv2d $args:tt) => { $self.faulty_conv2d $args };
    ($self:ident, $method:ident $args:tt) => { R.$method $args };
}

impl Backend for FaultyBackend {
    type Tensor = HostTensor;
    type Weight = <Reference as Backend>::Weight;
    type Conv = <Reference as Backend>::Conv;
    type GraphCache = ();

    fn name(&self) -> String {
        format!("{:?}", self.0)
    }

    // The provided methods stay at their defaults, which call the faulty operations.
    backend_methods!(required, forward);
}

impl TrainingBackend for FaultyBackend {
    type Quantized = Quantized8;

    training_methods!(required, forward);
}

type Weight = <Reference as Backend>::Weight;
type Conv = <Reference as Backend>::Conv;

/// A layer with the bias and the deltas of another.
fn with_rest_of(layer: HostLinear, other: &HostLinear) -> Result<HostLinear> {
    Ok(layer.with_bias(other.bias().cloned())?.with_deltas(other.deltas().to_vec())?)
}

/// An nvfp4 matrix whose scales are moved by one block.
fn with_neighbour_scales(packed: &PackedTensor) -> Result<PackedTensor> {
    let Scales::PerBlock { global, mut scales, high_first } = packed.scales() else {
        return Ok(packed.clone());
    };
    scales.rotate_left(1);
    let scales = BlockScales { scales: scales.into(), swizzled: false, high_first, global };
    let values = PackedTensor::new(packed.format(), packed.shape(), packed.bytes().clone())?;
    Ok(values.with_block_scales(scales)?)
}

impl FaultyBackend {
    /// Groups and their parameters; only the first ones with [`Fault::FirstGroup`].
    fn groups(&self, groups: &RowGroups, x: &HostTensor) -> Result<(RowGroups, HostTensor)> {
        match self.0 {
            Fault::FirstGroup if groups.count() > 1 && groups.rows() > 0 => {
                Ok((RowGroups::single(groups.rows()), x.rows(0..1)?))
            }
            _ => Ok((groups.clone(), x.clone())),
        }
    }

    fn faulty_download(&self, x: &HostTensor) -> Result<HostTensor> {
        let mut values = x.to_f32()?.into_owned();
        let last = values.last_mut();
        match (self.0, last) {
            (Fault::LostTail, Some(last)) => *last = 7.0,
            (Fault::NotANumber, Some(last)) => *last = f32::NAN,
            (Fault::Scaled(factor), _) => values.iter_mut().for_each(|v| *v *= factor),
            (Fault::AlwaysF32, _) => return Ok(HostTensor::from_f32(x.shape(), values)?),
            _ => {}
        }
        Ok(HostTensor::from_f32(x.shape(), values)?.to_dtype(x.dtype())?)
    }

    fn faulty_load_weight(&self, linear: HostLinear, _: Residency) -> Result<Weight> {
        let linear = match (self.0, linear.weight()) {
            (Fault::DeltasAtZero, _) => {
                let at_zero = |delta: &LoraDelta| LoraDelta { row: 0, ..delta.clone() };
                let deltas = linear.deltas().iter().map(at_zero).collect();
                linear.with_deltas(deltas)?
            }
            (Fault::Scale128, LinearWeight::Int8 { rows, scales, rotation }) => {
                let smaller = |scale: &HostTensor| {
                    let values = scale.to_f32()?.iter().map(|s| s * 127.0 / 128.0).collect();
                    HostTensor::from_f32(scale.shape(), values)
                };
                let scales = scales.iter().map(smaller).collect::<Result<_, _>>()?;
                with_rest_of(HostLinear::int8(rows.clone(), scales, *rotation)?, &linear)?
            }
            (Fault::UnroundedNvfp4, LinearWeight::Packed(packed)) if linear.nvfp4_matmul() => {
                with_rest_of(HostLinear::packed(packed.clone())?, &linear)?
            }
            (Fault::NeighbourScales, LinearWeight::Packed(packed)) if linear.nvfp4_matmul() => {
                let packed = packed.iter().map(with_neighbour_scales).collect::<Result<_>>()?;
                with_rest_of(HostLinear::packed(packed)?.with_nvfp4_matmul()?, &linear)?
            }
            _ => linear,
        };
        R.load_weight(linear, Residency::Device)
    }

    fn faulty_with_deltas(&self, w: &Weight, mut deltas: Vec<LoraDelta>) -> Result<Weight> {
        if self.0 == Fault::DeltasAtZero {
            deltas.iter_mut().for_each(|delta| delta.row = 0);
        }
        R.with_deltas(w, deltas)
    }

    fn faulty_cast(&self, x: &HostTensor, dtype: DType) -> Result<HostTensor> {
        match self.0 {
            Fault::Truncates if dtype == DType::BF16 => truncate(x),
            _ => R.cast(x, dtype),
        }
    }

    fn faulty_linear(&self, x: &HostTensor, w: &Weight) -> Result<HostTensor> {
        if self.0 == Fault::Truncates && x.dtype() == DType::BF16 {
            return truncate(&R.linear(&x.to_dtype(DType::F32)?, w)?);
        }
        R.linear(x, w)
    }

    fn faulty_linear_gated_add(
        &self,
        xs: &[&HostTensor],
        w: &Weight,
        gate: Option<(&HostTensor, &RowGroups)>,
        residual: &HostTensor,
    ) -> Result<HostTensor> {
        let gate = gate.map(|(gate, groups)| self.groups(groups, gate)).transpose()?;
        R.linear_gated_add(xs, w, gate.as_ref().map(|(groups, gate)| (gate, groups)), residual)
    }

    fn faulty_ada_layer_norm(
        &self,
        x: &HostTensor,
        scale: &HostTensor,
        shift: &HostTensor,
        groups: &RowGroups,
        eps: f32,
    ) -> Result<HostTensor> {
        if self.0 == Fault::OnePassVariance {
            shapes::ada_layer_norm(x, scale, shift, groups)?;
            let (values, dim) = (x.to_f32()?, x.shape().last());
            let (scale, shift) = (scale.to_f32()?, shift.to_f32()?);
            let mut y = Vec::new();
            for (i, row) in values.chunks(dim).enumerate() {
                let (mean, variance) = one_pass_variance(row.iter().copied());
                let first = groups.group_of(i) * dim;
                for (j, x) in row.iter().enumerate() {
                    let normed = (x - mean) / (variance + eps).sqrt();
                    y.push(normed * (1.0 + scale[first + j]) + shift[first + j]);
                }
            }
            return Ok(HostTensor::from_f32(x.shape(), y)?.to_dtype(x.dtype())?);
        }
        let (_, scale) = self.groups(groups, scale)?;
        let (groups, shift) = self.groups(groups, shift)?;
        R.ada_layer_norm(x, &scale, &shift, &groups, eps)
    }

    fn faulty_rms_norm(&self, x: &HostTensor, weight: &HostTensor, eps: f32) -> Result<HostTensor> {
        match self.0 {
            Fault::OtherMessage if x.shape().rank() != 2 => {
                Err(kiln_ops::Error::Arguments { op: "rms_norm", what: "x is strange".into() })
            }
            _ => R.rms_norm(x, weight, eps),
        }
    }

    fn faulty_norm_rope(
        &self,
        x: &HostTensor,
        weight: Option<&HostTensor>,
        rope: &RopeTable<HostTensor>,
        eps: f32,
    ) -> Result<HostTensor> {
        let pairs = match (self.0, rope.pairs) {
            (Fault::OtherRopeLayout, RopeLayout::Interleaved) => RopeLayout::HalfSplit,
            (Fault::OtherRopeLayout, RopeLayout::HalfSplit) => RopeLayout::Interleaved,
            (_, pairs) => pairs,
        };
        R.norm_rope(x, weight, &RopeTable { cos: rope.cos.clone(), sin: rope.sin.clone(), pairs }, eps)
    }

    fn faulty_attention(
        &self,
        q: &[&HostTensor],
        k: &[&HostTensor],
        v: &[&HostTensor],
        spec: &AttentionSpec,
    ) -> Result<HostTensor> {
        let size = shapes::attention(q, k, v, spec)?;
        let mut spec = spec.clone();
        match (self.0, &spec.mask) {
            (Fault::AttendsToPadding, AttentionMask::Causal { .. }) => {
                spec.mask = AttentionMask::Causal { valid: size.keys }
            }
            (Fault::NotIsolated, AttentionMask::Isolated { .. }) => spec.mask = AttentionMask::None,
            (Fault::InterleavedHeads, _) if size.kv_heads > 1 && size.heads > size.kv_heads => {
                let interleave = |blocks: &[&HostTensor]| -> Result<HostTensor> {
                    let all = R.concat_rows(blocks)?;
                    let all = all.reshape([size.keys, size.kv_heads, size.head_dim])?;
                    let values = all.to_f32()?;
                    let row = |key: usize, head: usize| {
                        let at = (key * size.kv_heads + head % size.kv_heads) * size.head_dim;
                        values[at..at + size.head_dim].to_vec()
                    };
                    let rows = (0..size.keys).flat_map(|key| (0..size.heads).flat_map(move |h| row(key, h)));
                    let shape = [size.keys, size.heads * size.head_dim];
                    Ok(HostTensor::from_f32(shape, rows.collect())?.to_dtype(all.dtype())?)
                };
                spec.kv_heads = size.heads;
                return R.attention(q, &[&interleave(k)?], &[&interleave(v)?], &spec);
            }
            (Fault::UnshiftedExp, AttentionMask::None) if q.len() == 1 && size.heads == size.kv_heads => {
                return unshifted_attention(q[0], k[0], v[0], size);
            }
            _ => {}
        }
        R.attention(q, k, v, &spec)
    }

    fn faulty_group_norm(
        &self,
        x: &HostTensor,
        groups: usize,
        weight: &HostTensor,
        bias: &HostTensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<HostTensor> {
        if self.0 == Fault::OnePassVariance {
            shapes::group_norm(x, groups, weight, bias)?;
            let (channels, values) = (x.shape().last(), x.to_f32()?);
            let (weight, bias) = (weight.to_f32()?, bias.to_f32()?);
            let group = |at: usize| at % channels / (channels / groups);
            let stats: Vec<_> = (0..groups)
                .map(|g| {
                    one_pass_variance(
                        values.iter().enumerate().filter(|(at, _)| group(*at) == g).map(|(_, &v)| v),
                    )
                })
                .collect();
            let y = values.iter().enumerate().map(|(at, x)| {
                let (mean, variance) = stats[group(at)];
                (x - mean) / (variance + eps).sqrt() * weight[at % channels] + bias[at % channels]
            });
            return Ok(HostTensor::from_f32(x.shape(), y.collect())?.to_dtype(x.dtype())?);
        }
        R.group_norm(x, groups, weight, bias, eps, f)
    }

    fn faulty_conv2d(
        &self,
        x: &HostTensor,
        conv: &Conv,
        mut geometry: ConvGeometry,
        residual: Option<&HostTensor>,
    ) -> Result<HostTensor> {
        if self.0 == Fault::SwappedPadding {
            let [top, bottom, left, right] = geometry.padding;
            geometry.padding = [bottom, top, right, left];
        }
        R.conv2d(x, conv, geometry, residual)
    }
}

/// Truncates to bf16.
fn truncate(x: &HostTensor) -> Result<HostTensor> {
    let bits = x.to_f32()?.iter().map(|v| kiln_tensor::bf16::from_bits((v.to_bits() >> 16) as u16)).collect();
    Ok(HostTensor::from_bf16(x.shape(), bits)?)
}

/// Mean and variance in f32, in one pass.
fn one_pass_variance(values: impl Iterator<Item = f32>) -> (f32, f32) {
    let (mut count, mut sum, mut squares) = (0.0f32, 0.0f32, 0.0f32);
    for v in values {
        count += 1.0;
        sum += v;
        squares += v * v;
    }
    (sum / count, squares / count - (sum / count).powi(2))
}

/// Attention without subtracting the maximum score.
fn unshifted_attention(
    q: &HostTensor,
    k: &HostTensor,
    v: &HostTensor,
    size: shapes::AttentionSize,
) -> Result<HostTensor> {
    let (qs, ks, vs) = (q.to_f32()?, k.to_f32()?, v.to_f32()?);
    let (dim, width) = (size.head_dim, size.heads * size.head_dim);
    let mut out = vec![0f32; qs.len()];
    for query in 0..size.queries {
        for head in (0..width).step_by(dim) {
            let at = query * width + head;
            let weight = |key: usize| {
                let k = &ks[key * width + head..][..dim];
                let score: f32 = qs[at..at + dim].iter().zip(k).map(|(q, k)| q * k).sum();
                (score / (dim as f32).sqrt()).exp()
            };
            let weights: Vec<f32> = (0..size.keys).map(weight).collect();
            let total: f32 = weights.iter().sum();
            for (key, weight) in weights.iter().enumerate() {
                let v = &vs[key * width + head..][..dim];
                out[at..at + dim].iter_mut().zip(v).for_each(|(out, v)| *out += weight / total * v);
            }
        }
    }
    Ok(HostTensor::from_f32(size.result(), out)?.to_dtype(q.dtype())?)
}
