//! The double block, forth and back.

use kiln_ops::{RopeTable, Tensor as _, TrainingBackend};

use super::attention::{self, Attended, Blocks};
use super::conditioning::Conditioning;
use super::linear::{Adapters, Saved};
use crate::Result;
use crate::transformer::double::{DoubleBlock, Stream};
use crate::transformer::modulation::DoubleModulation;

/// Rows of text and of the image.
pub(super) type Streams<B> = [<B as kiln_ops::Backend>::Tensor; 2];

/// Queries, keys and values.
type Qkv<B> = [<B as kiln_ops::Backend>::Tensor; 3];

/// What a double block keeps.
pub(super) struct DoubleTape<B: TrainingBackend, A: Adapters<B>> {
    text: StreamTape<B, A>,
    image: StreamTape<B, A>,
    attended: Attended<B>,
}

/// What one stream keeps.
struct StreamTape<B: TrainingBackend, A: Adapters<B>> {
    /// The block's input.
    x: B::Tensor,
    /// Queries and keys before their norms, and values.
    qkv: [B::Tensor; 3],
    /// The output of the attention for this stream.
    attended: B::Tensor,
    /// The sum after the attention.
    middle: B::Tensor,
    /// The MLP's gate and value.
    gate_up: B::Tensor,
    saved: StreamSaved<B, A>,
}

struct StreamSaved<B: TrainingBackend, A: Adapters<B>> {
    qkv: Saved<B, A>,
    to_out: Saved<B, A>,
    linear_in: Saved<B, A>,
    linear_out: Saved<B, A>,
}

/// The modulation and rotary table of one stream.
struct StreamConditioning<'a, B: TrainingBackend> {
    m: &'a DoubleModulation<B>,
    rope: &'a RopeTable<B::Tensor>,
}

fn unmodulated() -> kiln_ops::Error {
    kiln_ops::Error::Arguments { op: "double block", what: "its model has no modulation for it".into() }
}

impl<B: TrainingBackend> Conditioning<B> {
    fn of_text(&self) -> Result<StreamConditioning<'_, B>> {
        let [_, m] = self.double.as_ref().ok_or_else(unmodulated)?;
        Ok(StreamConditioning { m, rope: &self.rope.text })
    }

    fn of_image(&self) -> Result<StreamConditioning<'_, B>> {
        let [m, _] = self.double.as_ref().ok_or_else(unmodulated)?;
        Ok(StreamConditioning { m, rope: &self.rope.image })
    }
}

impl<B: TrainingBackend> DoubleBlock<B> {
    pub(super) fn is_adapted<A: Adapters<B>>(&self, adapters: &A) -> bool {
        let layers = [&self.text, &self.image]
            .into_iter()
            .flat_map(|s| [&s.qkv, &s.to_out, &s.linear_in, &s.linear_out]);
        layers.into_iter().any(|linear| linear.is_adapted(adapters))
    }

    pub(super) fn forward_training<A: Adapters<B>>(
        &self,
        b: &B,
        [text, image]: [&B::Tensor; 2],
        c: &Conditioning<B>,
        adapters: &A,
    ) -> Result<(Streams<B>, DoubleTape<B, A>)> {
        let (text_c, image_c) = (c.of_text()?, c.of_image()?);
        let (text_qkv, text_saved) = self.text.project_training(b, text, &text_c, adapters)?;
        let (image_qkv, image_saved) = self.image.project_training(b, image, &image_c, adapters)?;
        let [q_text, k_text] = self.text.rotated(b, &text_qkv, &text_c)?;
        let [q_image, k_image] = self.image.rotated(b, &image_qkv, &image_c)?;
        let blocks = [[&q_text, &q_image], [&k_text, &k_image], [&text_qkv[2], &image_qkv[2]]];
        let attended = attention::forward(b, &c.rows, blocks.map(Blocks::Streams), &c.spec)?;
        drop([q_text, k_text, q_image, k_image]);
        let [of_text, of_image] = attention::split_streams(b, &c.rows, &attention::joined(b, &attended)?)?;
        let (new_text, text) =
            self.text.residual_training(b, text, text_qkv, text_saved, of_text, &text_c, adapters)?;
        let (new_image, image) =
            self.image.residual_training(b, image, image_qkv, image_saved, of_image, &image_c, adapters)?;
        Ok(([new_text, new_image], DoubleTape { text, image, attended }))
    }

    /// The gradients of the block's inputs, if they are needed, from those of its outputs.
    pub(super) fn backward<A: Adapters<B>>(
        &self,
        b: &B,
        tape: DoubleTape<B, A>,
        [d_text, d_image]: [B::Tensor; 2],
        c: &Conditioning<B>,
        adapters: &mut A,
        needs_dx: bool,
    ) -> Result<Option<[B::Tensor; 2]>> {
        let DoubleTape { mut text, mut image, attended } = tape;
        let (text_c, image_c) = (c.of_text()?, c.of_image()?);
        let below = needs_dx || text.saved.qkv.is_some() || image.saved.qkv.is_some();
        let text_back = self.text.residual_backward(b, &mut text, d_text, &text_c, adapters, below)?;
        let image_back = self.image.residual_backward(b, &mut image, d_image, &image_c, adapters, below)?;
        let (Some([d_text, da_text]), Some([d_image, da_image])) = (text_back, image_back) else {
            return Ok(None);
        };
        let [q_text, k_text] = self.text.rotated(b, &text.qkv, &text_c)?;
        let [q_image, k_image] = self.image.rotated(b, &image.qkv, &image_c)?;
        let blocks = [[&q_text, &q_image], [&k_text, &k_image], [&text.qkv[2], &image.qkv[2]]];
        let dout = Blocks::Streams([&da_text, &da_image]);
        let gradients =
            attention::backward(b, &c.rows, dout, blocks.map(Blocks::Streams), &attended, &c.spec)?;
        drop((q_text, k_text, q_image, k_image, attended, da_text, da_image));
        let [[q_text, q_image], [k_text, k_image], [v_text, v_image]] = [
            attention::split_streams(b, &c.rows, &gradients[0])?,
            attention::split_streams(b, &c.rows, &gradients[1])?,
            attention::split_streams(b, &c.rows, &gradients[2])?,
        ];
        drop(gradients);
        let text_qkv = [q_text, k_text, v_text];
        let d_text = self.text.project_backward(b, text, text_qkv, &d_text, &text_c, adapters, needs_dx)?;
        let image_qkv = [q_image, k_image, v_image];
        let d_image =
            self.image.project_backward(b, image, image_qkv, &d_image, &image_c, adapters, needs_dx)?;
        Ok(d_text.zip(d_image).map(<[B::Tensor; 2]>::from))
    }
}

impl<B: TrainingBackend> Stream<B> {
    /// Queries, keys and values before norms and rotation.
    fn project_training<A: Adapters<B>>(
        &self,
        b: &B,
        x: &B::Tensor,
        c: &StreamConditioning<'_, B>,
        adapters: &A,
    ) -> Result<(Qkv<B>, Saved<B, A>)> {
        let h = self.attn_normed(b, x, c)?;
        let (outputs, saved) = self.qkv.forward_training(b, &h, &[self.dim; 3], adapters)?;
        let qkv = <[B::Tensor; 3]>::try_from(outputs)
            .map_err(|_| crate::Error::request("a double block's projection has too few outputs"))?;
        Ok((qkv, saved))
    }

    #[expect(clippy::too_many_arguments, reason = "everything that the stream keeps")]
    fn residual_training<A: Adapters<B>>(
        &self,
        b: &B,
        x: &B::Tensor,
        qkv: [B::Tensor; 3],
        qkv_saved: Saved<B, A>,
        attended: B::Tensor,
        c: &StreamConditioning<'_, B>,
        adapters: &A,
    ) -> Result<(B::Tensor, StreamTape<B, A>)> {
        let (branch, to_out) = self.to_out.forward_training(b, &attended, &[self.dim], adapters)?;
        let middle = b.gated_add(&branch[0], &c.m.attn.gate, &c.m.groups, x)?;
        let h = self.mlp_normed(b, &middle, c)?;
        let (mut gate_up, linear_in) = self.linear_in.forward_training(b, &h, &[self.mlp_width], adapters)?;
        drop(h);
        let gate_up = gate_up.remove(0);
        let (branch, linear_out) =
            self.linear_out.forward_training(b, &b.swiglu(&gate_up)?, &[self.dim], adapters)?;
        let y = b.gated_add(&branch[0], &c.m.mlp.gate, &c.m.groups, &middle)?;
        let saved = StreamSaved { qkv: qkv_saved, to_out, linear_in, linear_out };
        Ok((y, StreamTape { x: x.clone(), qkv, attended, middle, gate_up, saved }))
    }

    /// The gradients of the block's input through the residual sums, and of the attention's output; `None` if nothing below
    /// needs them.
    fn residual_backward<A: Adapters<B>>(
        &self,
        b: &B,
        tape: &mut StreamTape<B, A>,
        dy: B::Tensor,
        c: &StreamConditioning<'_, B>,
        adapters: &mut A,
        below: bool,
    ) -> Result<Option<[B::Tensor; 2]>> {
        let (middle, gate_up, attended) = (&tape.middle, &tape.gate_up, &tape.attended);
        let needs_middle = below || tape.saved.to_out.is_some();
        let needs_gate_up = needs_middle || tape.saved.linear_in.is_some();
        let d_branch = b.gate_rows(&dy, &c.m.mlp.gate, &c.m.groups)?;
        let inner = || -> Result<B::Tensor> { Ok(b.swiglu(gate_up)?) };
        let saved = tape.saved.linear_out.take();
        let d_inner = self.linear_out.backward(b, inner, saved, &[&d_branch], adapters, needs_gate_up)?;
        let Some(d_inner) = d_inner else { return Ok(None) };
        let d_gate_up = b.swiglu_backward(&d_inner, gate_up)?;
        let h = || self.mlp_normed(b, middle, c);
        let saved = tape.saved.linear_in.take();
        let dh = self.linear_in.backward(b, h, saved, &[&d_gate_up], adapters, needs_middle)?;
        let Some(dh) = dh else { return Ok(None) };
        let d_middle =
            b.ada_layer_norm_backward(&dh, middle, &c.m.mlp.scale, &c.m.groups, self.eps, Some(&dy))?;
        let d_branch = b.gate_rows(&d_middle, &c.m.attn.gate, &c.m.groups)?;
        let input = || -> Result<B::Tensor> { Ok(attended.clone()) };
        let saved = tape.saved.to_out.take();
        let d_attended = self.to_out.backward(b, input, saved, &[&d_branch], adapters, below)?;
        Ok(d_attended.map(|d_attended| [d_middle, d_attended]))
    }

    /// The gradient of the block's input, if it is needed; `d_x` is the part through the residual sums.
    #[expect(clippy::too_many_arguments, reason = "the gradients that meet in the block's input")]
    fn project_backward<A: Adapters<B>>(
        &self,
        b: &B,
        tape: StreamTape<B, A>,
        [dq, dk, dv]: [B::Tensor; 3],
        d_x: &B::Tensor,
        c: &StreamConditioning<'_, B>,
        adapters: &mut A,
        needs_dx: bool,
    ) -> Result<Option<B::Tensor>> {
        debug_assert_eq!(dq.shape(), tape.qkv[0].shape());
        let dq = b.norm_rope_backward(&dq, &tape.qkv[0], Some(&self.norm_q), c.rope, self.eps)?;
        let dk = b.norm_rope_backward(&dk, &tape.qkv[1], Some(&self.norm_k), c.rope, self.eps)?;
        let h = || self.attn_normed(b, &tape.x, c);
        let dh = self.qkv.backward(b, h, tape.saved.qkv, &[&dq, &dk, &dv], adapters, needs_dx)?;
        let Some(dh) = dh else { return Ok(None) };
        let scale = &c.m.attn.scale;
        Ok(Some(b.ada_layer_norm_backward(&dh, &tape.x, scale, &c.m.groups, self.eps, Some(d_x))?))
    }

    fn attn_normed(&self, b: &B, x: &B::Tensor, c: &StreamConditioning<'_, B>) -> Result<B::Tensor> {
        Ok(b.ada_layer_norm(x, &c.m.attn.scale, &c.m.attn.shift, &c.m.groups, self.eps)?)
    }

    fn mlp_normed(&self, b: &B, x: &B::Tensor, c: &StreamConditioning<'_, B>) -> Result<B::Tensor> {
        Ok(b.ada_layer_norm(x, &c.m.mlp.scale, &c.m.mlp.shift, &c.m.groups, self.eps)?)
    }

    fn rotated(
        &self,
        b: &B,
        [q, k, _]: &[B::Tensor; 3],
        c: &StreamConditioning<'_, B>,
    ) -> Result<[B::Tensor; 2]> {
        Ok(b.qk_norm_rope([q, k], Some([&self.norm_q, &self.norm_k]), c.rope, self.eps)?)
    }
}
