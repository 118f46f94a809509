//! A backend that computes what the reference does, but with one fault.

use std::ops::Range;

use kiln_ops::{
    Activation, AttentionSpec, Backend, ConvGeometry, Groups, Mask, Reference, Residency, Result, RopePairs,
    RopeTable,
};
use kiln_tensor::{DType, Delta, HostTensor, LinearMatrix, LinearParts, Shape};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// The last element of every result is left as it was allocated.
    LostTail,
    /// The last element of every result is not a number.
    NotANumber,
    /// Every result is off by this factor.
    Scaled(f32),
    /// Variances as mean(x²) − mean(x)² in f32.
    OnePassVariance,
    /// exp without the common shift, in f32.
    PlainExp,
    /// Causal, but padding is seen.
    SeesPadding,
    /// The isolated rows see everything.
    NotIsolated,
    /// Query head h uses key head h mod kv_heads.
    InterleavedHeads,
    /// The other pairs of elements are turned.
    OtherPairs,
    /// Every row takes the parameters of the first group.
    FirstGroup,
    /// LoRA deltas all begin at row 0.
    DeltasAtZero,
    /// The scales of 8-bit rows as if 128 were the largest integer.
    Scale128,
    /// Padding on the near sides where it belongs on the far ones.
    NearPadding,
    /// bf16 by cutting bits off.
    Truncates,
    /// Results claim to be f32.
    AlwaysF32,
    /// Bad arguments are refused in other words.
    OwnWords,
}

#[derive(Clone)]
pub struct Faulty(pub Fault);

const R: Reference = Reference::new();

impl Faulty {
    fn groups(&self, groups: &Groups, x: &HostTensor) -> Result<(Groups, HostTensor)> {
        match self.0 {
            Fault::FirstGroup if groups.count() > 1 && groups.rows() > 0 => {
                Ok((Groups::one(groups.rows()), x.rows(0..1)?))
            }
            _ => Ok((groups.clone(), x.clone())),
        }
    }
}

fn truncated(x: &HostTensor) -> Result<HostTensor> {
    let bits = x.to_f32()?.iter().map(|v| kiln_tensor::bf16::from_bits((v.to_bits() >> 16) as u16)).collect();
    Ok(HostTensor::from_bf16(x.shape(), bits)?)
}

/// Mean and variance in f32, in one pass.
fn one_pass(values: impl Iterator<Item = f32>) -> (f32, f32) {
    let (mut count, mut sum, mut squares) = (0.0f32, 0.0f32, 0.0f32);
    for v in values {
        count += 1.0;
        sum += v;
        squares += v * v;
    }
    (sum / count, squares / count - (sum / count).powi(2))
}

impl Backend for Faulty {
    type Tensor = HostTensor;
    type Weight = <Reference as Backend>::Weight;
    type Conv = <Reference as Backend>::Conv;
    type Replays = ();

    fn name(&self) -> String {
        format!("{:?}", self.0)
    }

    fn upload(&self, host: &HostTensor, dtype: DType) -> Result<HostTensor> {
        R.upload(host, dtype)
    }

    fn download(&self, x: &HostTensor) -> Result<HostTensor> {
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

    fn download_bytes(&self, x: &HostTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
        R.download_bytes(&self.download(x)?, scale, shift)
    }

    fn weight(&self, parts: LinearParts, _: Residency) -> Result<Self::Weight> {
        R.weight(
            match (self.0, parts.matrix()) {
                (Fault::DeltasAtZero, _) => {
                    let deltas =
                        parts.deltas().iter().map(|delta| Delta { row: 0, ..delta.clone() }).collect();
                    parts.with_deltas(deltas)?
                }
                (Fault::Scale128, LinearMatrix::Int8 { rows, scales }) => {
                    let smaller = |scale: &HostTensor| {
                        let values = scale.to_f32()?.iter().map(|s| s * 127.0 / 128.0).collect();
                        HostTensor::from_f32(scale.shape(), values)
                    };
                    let scales = scales.iter().map(smaller).collect::<Result<_, _>>()?;
                    let (bias, deltas) = (parts.bias().cloned(), parts.deltas().to_vec());
                    LinearParts::int8(rows.clone(), scales)?.with_bias(bias)?.with_deltas(deltas)?
                }
                _ => parts,
            },
            Residency::Device,
        )
    }

    fn with_deltas(&self, w: &Self::Weight, mut deltas: Vec<Delta>) -> Result<Self::Weight> {
        if self.0 == Fault::DeltasAtZero {
            deltas.iter_mut().for_each(|delta| delta.row = 0);
        }
        R.with_deltas(w, deltas)
    }

    fn conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<Self::Conv> {
        R.conv(kernel, bias)
    }

    fn reshape(&self, x: &HostTensor, shape: Shape) -> Result<HostTensor> {
        R.reshape(x, shape)
    }

    fn cast(&self, x: &HostTensor, dtype: DType) -> Result<HostTensor> {
        match self.0 {
            Fault::Truncates if dtype == DType::BF16 => truncated(x),
            _ => R.cast(x, dtype),
        }
    }

    fn slice_rows(&self, x: &HostTensor, range: Range<usize>) -> Result<HostTensor> {
        R.slice_rows(x, range)
    }

    fn concat_rows(&self, parts: &[&HostTensor]) -> Result<HostTensor> {
        R.concat_rows(parts)
    }

    fn concat_columns(&self, parts: &[&HostTensor]) -> Result<HostTensor> {
        R.concat_columns(parts)
    }

    fn linear(&self, x: &HostTensor, w: &Self::Weight) -> Result<HostTensor> {
        if self.0 == Fault::Truncates && x.dtype() == DType::BF16 {
            return truncated(&R.linear(&x.to_dtype(DType::F32)?, w)?);
        }
        R.linear(x, w)
    }

    fn linear_split<const N: usize>(
        &self,
        x: &HostTensor,
        w: &Self::Weight,
        widths: [usize; N],
    ) -> Result<[HostTensor; N]> {
        R.linear_split(x, w, widths)
    }

    fn linear_gated_add(
        &self,
        xs: &[&HostTensor],
        w: &Self::Weight,
        gate: Option<(&HostTensor, &Groups)>,
        residual: &HostTensor,
    ) -> Result<HostTensor> {
        let gate = gate.map(|(gate, groups)| self.groups(groups, gate)).transpose()?;
        R.linear_gated_add(xs, w, gate.as_ref().map(|(groups, gate)| (gate, groups)), residual)
    }

    fn ada_layer_norm(
        &self,
        x: &HostTensor,
        scale: &HostTensor,
        shift: &HostTensor,
        groups: &Groups,
        eps: f32,
    ) -> Result<HostTensor> {
        if self.0 == Fault::OnePassVariance {
            kiln_ops::shapes::ada_layer_norm(x, scale, shift, groups)?;
            let (values, dim) = (x.to_f32()?, x.shape().last());
            let (scale, shift) = (scale.to_f32()?, shift.to_f32()?);
            let mut y = Vec::new();
            for (i, row) in values.chunks(dim).enumerate() {
                let (mean, variance) = one_pass(row.iter().copied());
                let first = groups.of_row(i) * dim;
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

    fn rms_norm(&self, x: &HostTensor, weight: &HostTensor, eps: f32) -> Result<HostTensor> {
        match self.0 {
            Fault::OwnWords if x.shape().rank() != 2 => {
                Err(kiln_ops::Error::Arguments { op: "rms_norm", what: "x is strange".into() })
            }
            _ => R.rms_norm(x, weight, eps),
        }
    }

    fn norm_rope(
        &self,
        x: &HostTensor,
        weight: &HostTensor,
        rope: &RopeTable<Self>,
        eps: f32,
    ) -> Result<HostTensor> {
        let pairs = match (self.0, rope.pairs) {
            (Fault::OtherPairs, RopePairs::Adjacent) => RopePairs::Halves,
            (Fault::OtherPairs, RopePairs::Halves) => RopePairs::Adjacent,
            (_, pairs) => pairs,
        };
        R.norm_rope(x, weight, &RopeTable { cos: rope.cos.clone(), sin: rope.sin.clone(), pairs }, eps)
    }

    fn attention(
        &self,
        q: &[&HostTensor],
        k: &[&HostTensor],
        v: &[&HostTensor],
        spec: &AttentionSpec,
    ) -> Result<HostTensor> {
        let size = kiln_ops::shapes::attention(q, k, v, spec)?;
        let mut spec = spec.clone();
        match (self.0, &spec.mask) {
            (Fault::SeesPadding, Mask::Causal { .. }) => spec.mask = Mask::Causal { valid: size.keys },
            (Fault::NotIsolated, Mask::Isolated { .. }) => spec.mask = Mask::None,
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
            (Fault::PlainExp, Mask::None) if q.len() == 1 && size.heads == size.kv_heads => {
                return plain_exp(q[0], k[0], v[0], size);
            }
            _ => {}
        }
        R.attention(q, k, v, &spec)
    }

    fn swiglu(&self, x: &HostTensor) -> Result<HostTensor> {
        R.swiglu(x)
    }

    fn activation(&self, x: &HostTensor, f: Activation) -> Result<HostTensor> {
        R.activation(x, f)
    }

    fn add(&self, x: &HostTensor, y: &HostTensor) -> Result<HostTensor> {
        R.add(x, y)
    }

    fn add_scaled(&self, x: &HostTensor, y: &HostTensor, s: f32) -> Result<HostTensor> {
        R.add_scaled(x, y, s)
    }

    fn lerp(&self, x: &HostTensor, y: &HostTensor, t: f32) -> Result<HostTensor> {
        R.lerp(x, y, t)
    }

    fn guide(&self, c: &HostTensor, u: &HostTensor, g: f32) -> Result<HostTensor> {
        R.guide(c, u, g)
    }

    fn blend_rows(&self, x: &HostTensor, y: &HostTensor, mask: &HostTensor) -> Result<HostTensor> {
        R.blend_rows(x, y, mask)
    }

    fn affine(&self, x: &HostTensor, scale: &HostTensor, shift: &HostTensor) -> Result<HostTensor> {
        R.affine(x, scale, shift)
    }

    fn space_to_depth(&self, x: &HostTensor) -> Result<HostTensor> {
        R.space_to_depth(x)
    }

    fn depth_to_space(&self, x: &HostTensor) -> Result<HostTensor> {
        R.depth_to_space(x)
    }

    fn group_norm(
        &self,
        x: &HostTensor,
        groups: usize,
        weight: &HostTensor,
        bias: &HostTensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<HostTensor> {
        if self.0 == Fault::OnePassVariance {
            kiln_ops::shapes::group_norm(x, groups, weight, bias)?;
            let (channels, values) = (x.shape().last(), x.to_f32()?);
            let (weight, bias) = (weight.to_f32()?, bias.to_f32()?);
            let group = |at: usize| at % channels / (channels / groups);
            let stats: Vec<_> = (0..groups)
                .map(|g| {
                    one_pass(values.iter().enumerate().filter(|(at, _)| group(*at) == g).map(|(_, &v)| v))
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

    fn conv2d(
        &self,
        x: &HostTensor,
        conv: &Self::Conv,
        mut geometry: ConvGeometry,
        residual: Option<&HostTensor>,
    ) -> Result<HostTensor> {
        if self.0 == Fault::NearPadding {
            let [top, bottom, left, right] = geometry.padding;
            geometry.padding = [bottom, top, right, left];
        }
        R.conv2d(x, conv, geometry, residual)
    }
}

fn plain_exp(
    q: &HostTensor,
    k: &HostTensor,
    v: &HostTensor,
    size: kiln_ops::shapes::AttentionSize,
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
