//! The arguments of training operations.

use crate::{Error, Result, Tensor};

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

impl<T: Tensor> LowRank<'_, T> {
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
