//! What a model is trained on: one image with its text and references, encoded.

use kiln_tensor::HostTensor;

/// One image to learn, with the conditioning it is learned for.
#[derive(Clone, Debug)]
pub struct Example {
    /// Clean latents, patched and batch-normed, row by row: `[height · width, channels]`, a float type.
    pub latents: HostTensor,
    /// Height in tokens.
    pub height: usize,
    /// Width in tokens.
    pub width: usize,
    /// Reference images, in order; the first is at t = 10, the second at t = 20, … There is no loss on them.
    pub references: Vec<ReferenceLatents>,
    /// Text states, padding included: `[text tokens, joint_attention_dim]`, a float type.
    pub text: HostTensor,
}

/// The latents of a reference image, as those of [`Example`].
#[derive(Clone, Debug)]
pub struct ReferenceLatents {
    /// `[height · width, channels]`.
    pub latents: HostTensor,
    /// Height in tokens.
    pub height: usize,
    /// Width in tokens.
    pub width: usize,
}
