//! How LoRAs are applied, and to which layers.

use kiln_tensor::DType;

/// A linear layer of a model: its name and the shape of its weight, `[rows, cols]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Without `.weight`.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// How LoRAs are resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraOptions {
    /// Whether to accept LoRAs with modules and keys that the model can't use, as long as it can use some.
    pub partial: bool,
    /// The dtype of matrices that have to be computed for LoKr, LoHa and DoRA: f32, which is exact, or bf16, which takes half
    /// the memory.
    pub dtype: DType,
    /// How DoRAs are applied; if it is not chosen, the default, with a note where the choice matters.
    pub dora_rule: Option<DoraRule>,
}

impl Default for LoraOptions {
    /// Every module and key must match; f32.
    fn default() -> Self {
        LoraOptions { partial: false, dtype: DType::F32, dora_rule: None }
    }
}

/// What a weight other than 1 means for a DoRA, and how it is combined with other LoRAs. With a weight of 1 and alone, both
/// rules are the same.
///
/// `W` is a layer's weight, `Δ` the update at its own scale, `w` the user's weight, `m(X)` the factor that gives the rows or
/// columns of `X` the learned magnitudes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DoraRule {
    /// `W + w · (m(W + Δ) · (W + Δ) − W)`: the weight mixes the changed layer with the unchanged one. Each LoRA is applied
    /// to the model's own weights, and their changes add up.
    #[default]
    ComfyUi,
    /// `m(W + w · Δ) · (V + w · Δ)`, where `V` is the layer with the LoRAs before it: the weight scales the update, as in
    /// PEFT, and a DoRA also rescales what LoRAs before it changed. Magnitudes are those of rows.
    Diffusers,
}
