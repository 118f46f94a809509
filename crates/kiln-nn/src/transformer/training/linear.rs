//! Linear layers with adapters.

use kiln_ops::TrainingBackend;

use crate::Result;
use crate::transformer::linear::Linear;

/// A linear layer of the model, one or several stacked: the names and rows of its parts.
pub type LayerStack = [(String, usize)];

/// Trainable additions to the linear layers of blocks.
///
/// A layer is identified by the names of its parts, such as the three of `qkv`. Gradients are collected by the implementation:
/// every call of [`Adapters::backward`] adds to them.
pub trait Adapters<B: TrainingBackend> {
    /// What the forward pass of one layer keeps.
    type Saved;

    /// Whether any part of the layer has an adapter.
    fn is_adapted(&self, layer: &LayerStack) -> bool;

    /// The outputs of an adapted layer, split into these widths. `x`: `[rows, in]`; `w`: its frozen weight.
    fn forward(
        &self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        widths: &[usize],
    ) -> Result<(Vec<B::Tensor>, Self::Saved)>;

    /// Adds the gradients of the layer's adapters, and returns that of `x` if it is needed.
    #[expect(clippy::too_many_arguments, reason = "the layer, its input and the gradients of its outputs")]
    fn backward(
        &mut self,
        b: &B,
        layer: &LayerStack,
        w: &B::Weight,
        x: &B::Tensor,
        saved: Self::Saved,
        dys: &[&B::Tensor],
        needs_dx: bool,
    ) -> Result<Option<B::Tensor>>;
}

/// What an adapted layer keeps; `None` if it has no adapter.
pub(super) type Saved<B, A> = Option<<A as Adapters<B>>::Saved>;

/// The outputs of a layer, split, and what it saved.
type Outputs<B, A> = (Vec<<B as kiln_ops::Backend>::Tensor>, Saved<B, A>);

impl<B: TrainingBackend> Linear<B> {
    pub(super) fn is_adapted<A: Adapters<B>>(&self, adapters: &A) -> bool {
        adapters.is_adapted(self.stack())
    }

    /// The outputs for `x`, split into these widths.
    pub(super) fn forward_training<A: Adapters<B>>(
        &self,
        b: &B,
        x: &B::Tensor,
        widths: &[usize],
        adapters: &A,
    ) -> Result<Outputs<B, A>> {
        if self.is_adapted(adapters) {
            let (ys, saved) = adapters.forward(b, self.stack(), self, x, widths)?;
            return Ok((ys, Some(saved)));
        }
        // A split without updates, so that a backend need not join the columns first.
        Ok((b.linear_low_rank(x, self, &[], widths)?.ys, None))
    }

    /// The gradient of the input, if it is needed; adds those of the layer's adapters. `x` gives the input, which only
    /// adapters need.
    pub(super) fn backward<A: Adapters<B>>(
        &self,
        b: &B,
        x: impl FnOnce() -> Result<B::Tensor>,
        saved: Saved<B, A>,
        dys: &[&B::Tensor],
        adapters: &mut A,
        needs_dx: bool,
    ) -> Result<Option<B::Tensor>> {
        match saved {
            Some(saved) => adapters.backward(b, self.stack(), self, &x()?, saved, dys, needs_dx),
            None if needs_dx => Ok(Some(b.linear_backward(dys, self, None)?)),
            None => Ok(None),
        }
    }
}
