//! The single block, forth and back.

use kiln_ops::TrainingBackend;

use super::attention::{self, Attended, Blocks};
use super::conditioning::Conditioning;
use super::linear::{Adapters, Saved};
use crate::Result;
use crate::transformer::single::SingleBlock;

/// What a single block keeps.
pub(super) struct SingleTape<B: TrainingBackend, A: Adapters<B>> {
    /// The block's input.
    x: B::Tensor,
    /// Queries and keys before their norms, and values.
    qkv: [B::Tensor; 3],
    /// The MLP's gate and value.
    gate_up: B::Tensor,
    attended: Attended<B>,
    projection: Saved<B, A>,
    to_out: Saved<B, A>,
}

impl<B: TrainingBackend> SingleBlock<B> {
    pub(super) fn is_adapted<A: Adapters<B>>(&self, adapters: &A) -> bool {
        [&self.to_qkv_mlp_proj, &self.to_out].into_iter().any(|linear| linear.is_adapted(adapters))
    }

    pub(super) fn forward_training<A: Adapters<B>>(
        &self,
        b: &B,
        x: &B::Tensor,
        c: &Conditioning<B>,
        adapters: &A,
    ) -> Result<(B::Tensor, SingleTape<B, A>)> {
        let h = self.normed(b, x, c)?;
        let (mut outputs, projection) =
            self.to_qkv_mlp_proj.forward_training(b, &h, &self.widths, adapters)?;
        drop(h);
        let (Some(gate_up), Some(v), Some(k), Some(q)) =
            (outputs.pop(), outputs.pop(), outputs.pop(), outputs.pop())
        else {
            return Err(crate::Error::request("a single block's projection has too few outputs"));
        };
        let qkv = [q, k, v];
        let [q, k] = self.rotated(b, &qkv, c)?;
        let attended = attention::forward(b, &c.rows, [&q, &k, &qkv[2]].map(Blocks::Joined), &c.spec)?;
        drop([q, k]);
        let inner = self.inner(b, &attended, &gate_up)?;
        let (branch, to_out) = self.to_out.forward_training(b, &inner, &[x_width(x)], adapters)?;
        let y = b.gated_add(&branch[0], &c.single.block.gate, &c.single.groups, x)?;
        Ok((y, SingleTape { x: x.clone(), qkv, gate_up, attended, projection, to_out }))
    }

    /// The gradient of the block's input, if it is needed, from that of its output.
    pub(super) fn backward<A: Adapters<B>>(
        &self,
        b: &B,
        tape: SingleTape<B, A>,
        dy: B::Tensor,
        c: &Conditioning<B>,
        adapters: &mut A,
        needs_dx: bool,
    ) -> Result<Option<B::Tensor>> {
        let SingleTape { x, qkv, gate_up, attended, projection, to_out } = tape;
        let below = needs_dx || projection.is_some();
        let d_branch = b.gate_rows(&dy, &c.single.block.gate, &c.single.groups)?;
        let inner = || self.inner(b, &attended, &gate_up);
        let d_inner = self.to_out.backward(b, inner, to_out, &[&d_branch], adapters, below)?;
        let Some(d_inner) = d_inner else { return Ok(None) };
        drop(d_branch);
        let [d_attended, d_gate_up] = b.concat_swiglu_backward(&d_inner, &gate_up)?;
        drop((d_inner, gate_up));
        let [q, k] = self.rotated(b, &qkv, c)?;
        let blocks = [&q, &k, &qkv[2]].map(Blocks::Joined);
        let [dq, dk, dv] =
            attention::backward(b, &c.rows, Blocks::Joined(&d_attended), blocks, &attended, &c.spec)?;
        drop((q, k, d_attended, attended));
        let dq = b.norm_rope_backward(&dq, &qkv[0], Some(&self.norm_q), &c.rope.joined, self.eps)?;
        let dk = b.norm_rope_backward(&dk, &qkv[1], Some(&self.norm_k), &c.rope.joined, self.eps)?;
        drop(qkv);
        let dys = [&dq, &dk, &dv, &d_gate_up];
        let h = || self.normed(b, &x, c);
        let dh = self.to_qkv_mlp_proj.backward(b, h, projection, &dys, adapters, needs_dx)?;
        let Some(dh) = dh else { return Ok(None) };
        let m = &c.single;
        Ok(Some(b.ada_layer_norm_backward(&dh, &x, &m.block.scale, &m.groups, self.eps, Some(&dy))?))
    }

    fn normed(&self, b: &B, x: &B::Tensor, c: &Conditioning<B>) -> Result<B::Tensor> {
        let m = &c.single;
        Ok(b.ada_layer_norm(x, &m.block.scale, &m.block.shift, &m.groups, self.eps)?)
    }

    fn rotated(&self, b: &B, [q, k, _]: &[B::Tensor; 3], c: &Conditioning<B>) -> Result<[B::Tensor; 2]> {
        Ok(b.qk_norm_rope([q, k], Some([&self.norm_q, &self.norm_k]), &c.rope.joined, self.eps)?)
    }

    /// The input of `to_out`.
    fn inner(&self, b: &B, attended: &Attended<B>, gate_up: &B::Tensor) -> Result<B::Tensor> {
        Ok(b.concat_swiglu(&attention::joined(b, attended)?, gate_up)?)
    }
}

fn x_width(x: &impl kiln_ops::Tensor) -> usize {
    x.shape().last()
}
