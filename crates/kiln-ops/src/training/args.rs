//! The arguments of training operations, and linear layers with low-rank updates from their parts.

use super::TrainingBackend;
use crate::{Error, Result, Tensor as _};

/// A low-rank update of some outputs of a linear layer: `y[.., first..first + n] += scale · (x · downᵀ) · upᵀ`.
pub struct LowRank<'a, T> {
    /// The first output column.
    pub first: usize,
    /// `[rank, in]`, f32.
    pub down: &'a T,
    /// `[n, rank]`, f32.
    pub up: &'a T,
    /// Factor of the update.
    pub scale: f32,
    /// Its input, if that is not the layer's, such as one with dropout.
    pub input: Option<&'a T>,
}

impl<T: crate::Tensor> LowRank<'_, T> {
    /// The rows of `up` that belong to `width` columns from `first` on, if any: they must be all of these columns.
    pub fn rows_within(&self, first: usize, width: usize) -> Result<Option<std::ops::Range<usize>>> {
        let (start, end) = (self.first, self.first + self.up.shape().rows());
        if end <= first || first + width <= start {
            return Ok(None);
        }
        if start <= first && first + width <= end {
            return Ok(Some(first - start..first + width - start));
        }
        let columns = format!("{first}..{}", first + width);
        let what = format!("an update of columns {start}..{end} covers a part of columns {columns}");
        Err(Error::Arguments { op: "linear_low_rank", what })
    }
}

/// The result of a linear layer with low-rank updates.
pub struct AdaptedOutput<T> {
    /// The outputs, by columns.
    pub ys: Vec<T>,
    /// `x · downᵀ` of each update.
    pub inner: Vec<T>,
}

/// The gradients of a low-rank update.
pub struct LowRankGradient<T> {
    /// By `down`, f32.
    pub down: T,
    /// By `up`, f32.
    pub up: T,
    /// By the inner product, `[rows, rank]`.
    pub inner: T,
}

/// A tensor that AdamW updates, with its state; all f32 of one shape.
pub struct AdamWTensor<'a, T> {
    /// The parameters.
    pub param: &'a mut T,
    /// Their gradient.
    pub grad: &'a T,
    /// First moment.
    pub m: &'a mut T,
    /// Second moment.
    pub v: &'a mut T,
}

/// A tensor that AdamW updates, with its state in 8 bits.
pub struct QuantizedAdamWTensor<'a, T, Q> {
    /// The parameters, f32.
    pub param: &'a mut T,
    /// Their gradient, f32.
    pub grad: &'a T,
    /// First moment.
    pub m: &'a mut Q,
    /// Second moment.
    pub v: &'a mut Q,
}

/// The numbers of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f32,
    /// Decays of the moments.
    pub betas: [f32; 2],
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub decay: f32,
    /// The step's number, from 1.
    pub step: u64,
    /// Factor of the gradient.
    pub grad_scale: f32,
}

impl AdamWStep {
    /// `lr / (1 - β₁ᵗ)` and `sqrt(1 - β₂ᵗ)`.
    pub fn corrections(&self) -> [f64; 2] {
        let remaining = |beta: f32| 1.0 - f64::from(beta).powf(self.step as f64);
        [f64::from(self.lr) / remaining(self.betas[0]), remaining(self.betas[1]).sqrt()]
    }

    /// The factors of a step that is computed in f32, each rounded once.
    pub fn factors(&self) -> AdamWFactors {
        let [step_size, root] = self.corrections().map(|v| v as f32);
        AdamWFactors {
            rest: self.betas.map(|beta| (1.0 - f64::from(beta)) as f32),
            keep: (1.0 - f64::from(self.lr) * f64::from(self.decay)) as f32,
            step_size,
            root,
        }
    }
}

/// What an AdamW step multiplies and divides by in f32, besides the numbers of [`AdamWStep`].
#[derive(Clone, Copy, Debug)]
pub struct AdamWFactors {
    /// `1 - β₁` and `1 - β₂`.
    pub rest: [f32; 2],
    /// `1 - lr · decay`.
    pub keep: f32,
    /// `lr / (1 - β₁ᵗ)`.
    pub step_size: f32,
    /// `sqrt(1 - β₂ᵗ)`.
    pub root: f32,
}

/// A tensor that Prodigy updates, with its state; all f32 of one shape.
pub struct ProdigyTensor<'a, T> {
    /// The parameters.
    pub param: &'a mut T,
    /// Their gradient.
    pub grad: &'a T,
    /// The parameters before the first step.
    pub start: &'a T,
    /// First moment.
    pub m: &'a mut T,
    /// Second moment.
    pub v: &'a mut T,
    /// Sum of weighted gradients.
    pub s: &'a mut T,
}

/// The numbers of the first half of a Prodigy step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProdigyStep {
    /// Decays of the moments and of `s`.
    pub betas: [f32; 3],
    /// The estimated distance.
    pub d: f32,
    /// Weight of the gradient in `s`.
    pub s_factor: f32,
    /// Factor of the gradient.
    pub grad_scale: f32,
}

/// 8-bit optimizer state in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized8 {
    /// One code per element.
    pub codes: Vec<u8>,
    /// The largest magnitude of each block of codes.
    pub scales: Vec<f32>,
}

impl Quantized8 {
    /// State of zeros for `count` elements, under a book whose code of 0.0 is `zero`.
    pub fn zeros(count: usize, zero: u8) -> Self {
        Quantized8 { codes: vec![zero; count], scales: vec![0.0; count.div_ceil(super::BLOCK)] }
    }
}

/// Adds low-rank updates to `y`, and splits it.
pub(super) fn add_low_rank<B: TrainingBackend>(
    b: &B,
    x: &B::Tensor,
    y: B::Tensor,
    updates: &[LowRank<'_, B::Tensor>],
    widths: &[usize],
) -> Result<AdaptedOutput<B::Tensor>> {
    let out = y.shape().last();
    super::shapes::low_rank(x, updates, out)?;
    let inner = updates
        .iter()
        .map(|update| b.matmul_nt(update.input.unwrap_or(x), update.down, 1.0, None))
        .collect::<Result<Vec<_>>>()?;
    if let ([update], true) = (updates, covers(updates, out)) {
        let y = b.matmul_nt(&inner[0], update.up, update.scale, Some(&y))?;
        return Ok(AdaptedOutput { ys: split(b, y, widths)?, inner });
    }
    let mut ys = split(b, y, widths)?;
    let mut first = 0;
    for (y, width) in ys.iter_mut().zip(widths) {
        for (update, inner) in updates.iter().zip(&inner) {
            let Some(rows) = update.rows_within(first, *width)? else { continue };
            *y = b.matmul_nt(inner, &b.slice_rows(update.up, rows)?, update.scale, Some(&*y))?;
        }
        first += width;
    }
    Ok(AdaptedOutput { ys, inner })
}

fn split<B: TrainingBackend>(b: &B, y: B::Tensor, widths: &[usize]) -> Result<Vec<B::Tensor>> {
    if widths.len() == 1 && widths[0] == y.shape().last() {
        return Ok(vec![y]);
    }
    b.split_columns(&y, widths)
}

fn covers<T: crate::Tensor>(updates: &[LowRank<'_, T>], out: usize) -> bool {
    updates.iter().all(|update| update.first == 0 && update.up.shape().rows() == out)
}

/// [`TrainingBackend::low_rank_backward`] as one product after the other.
pub fn low_rank_backward<B: TrainingBackend>(
    b: &B,
    dys: &[&B::Tensor],
    x: &B::Tensor,
    updates: &[LowRank<'_, B::Tensor>],
    inner: &[B::Tensor],
    add: &[Option<[&B::Tensor; 2]>],
) -> Result<Vec<LowRankGradient<B::Tensor>>> {
    let out = dys.iter().map(|dy| dy.shape().last()).sum();
    super::shapes::low_rank(x, updates, out)?;
    let mut gradients = Vec::with_capacity(updates.len());
    for ((update, inner), add) in updates.iter().zip(inner).zip(add) {
        let (mut first, mut ups, mut d_inner) = (0, Vec::new(), None);
        for dy in dys {
            let width = dy.shape().last();
            if let Some(rows) = update.rows_within(first, width)? {
                let whole = rows.len() == update.up.shape().rows();
                let up = if whole { update.up.clone() } else { b.slice_rows(update.up, rows.clone())? };
                let earlier = match add {
                    Some([_, up]) if whole => Some((*up).clone()),
                    Some([_, up]) => Some(b.slice_rows(up, rows)?),
                    None => None,
                };
                ups.push(b.matmul_tn(dy, inner, update.scale, earlier.as_ref())?);
                d_inner = Some(b.matmul_nn(dy, &up, update.scale, d_inner.as_ref())?);
            }
            first += width;
        }
        let Some(d_inner) = d_inner else {
            let what = format!("no gradient for the update of columns {}..", update.first);
            return Err(Error::Arguments { op: "low_rank_backward", what });
        };
        let up = if ups.len() == 1 { ups.remove(0) } else { b.concat_rows(&ups.iter().collect::<Vec<_>>())? };
        let down = b.matmul_tn(&d_inner, update.input.unwrap_or(x), 1.0, add.map(|[down, _]| down))?;
        gradients.push(LowRankGradient { down, up, inner: d_inner });
    }
    Ok(gradients)
}
