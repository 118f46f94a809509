//! The settings of a training.

use kiln_engine::{Device, Isa, Model, Precision, Settings};
use kiln_family::{Family, default_family};
use kiln_tensor::DType;
use kiln_weights::LinearPrecision;
use serde::{Deserialize, Serialize};

/// The settings of a training. [`TrainSettings::default`] is a LoRA of rank 16 on all layers of the blocks, trained with
/// AdamW at 1e-4.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSettings {
    /// The model's family; files of a training don't repeat it.
    #[serde(skip)]
    pub family: &'static Family,
    /// The adapter.
    pub adapter: AdapterSettings,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate over the steps.
    pub learning_rate: LearningRate,
    /// Gradients of a larger norm, over all tensors, are scaled down to it; `None` leaves them.
    pub max_grad_norm: Option<f32>,
    /// Decay per step of the adapter's exponential moving average; `None` keeps no average.
    pub ema_decay: Option<f32>,
    /// The noise levels that are trained.
    pub sigmas: SigmaSampling,
    /// The guidance input, for models that have one (dev).
    pub guidance: f32,
    /// Whether a block's activations are computed again in the backward pass instead of kept: less memory, a third more time.
    pub checkpointing: bool,
    /// How the frozen model's linear layers are multiplied.
    pub base: BasePrecision,
    /// Whether activations are bf16; else f32. Adapters, their gradients and the optimizer's state are always f32.
    pub bf16: bool,
    /// Seed of the adapter's initial values, the noise, the noise levels and dropout.
    pub seed: u64,
}

impl Default for TrainSettings {
    fn default() -> Self {
        TrainSettings {
            family: default_family(),
            adapter: AdapterSettings::default(),
            optimizer: Optimizer::default(),
            learning_rate: LearningRate::default(),
            max_grad_norm: Some(1.0),
            ema_decay: None,
            sigmas: SigmaSampling::default(),
            guidance: 1.0,
            checkpointing: false,
            base: BasePrecision::Stored,
            bf16: true,
            seed: 0,
        }
    }
}

impl TrainSettings {
    /// The defaults on this machine: its precision decides how the model is multiplied, and whether activations are bf16.
    pub fn for_machine(model: &Model, machine: &Settings) -> TrainSettings {
        TrainSettings {
            family: model.variant.family,
            base: match machine.precision {
                Precision::Fp8 => BasePrecision::Fp8,
                Precision::Int8 => BasePrecision::Int8,
                _ => BasePrecision::Stored,
            },
            bf16: is_bf16(model, machine),
            ..TrainSettings::default()
        }
    }

    /// The dtype of activations.
    pub fn dtype(&self) -> DType {
        if self.bf16 { DType::BF16 } else { DType::F32 }
    }
}

/// Whether activations are bf16: on a GPU, and on a CPU that multiplies it.
fn is_bf16(model: &Model, machine: &Settings) -> bool {
    match machine.precision {
        Precision::F32 => false,
        Precision::Bf16 | Precision::Fp8 => true,
        _ if matches!(machine.device, Device::Cuda(_)) => true,
        _ => machine.isa.unwrap_or_else(Isa::best).multiplies_bf16() && model.trained_sides().is_none(),
    }
}

/// How the linear layers of the frozen model's blocks are multiplied. Gradients pass through their dequantized values,
/// in the dtype of activations; with fp8 they are quantized, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BasePrecision {
    /// In the dtype of activations, from whatever the files store.
    Stored,
    /// In fp8, quantized when they are loaded.
    Fp8,
    /// In int8, quantized when they are loaded.
    Int8,
}

impl BasePrecision {
    /// What weights are loaded as; `threads` quantize them.
    pub fn linear(self, threads: usize) -> LinearPrecision {
        match self {
            BasePrecision::Stored => LinearPrecision::Float,
            BasePrecision::Fp8 => LinearPrecision::Fp8,
            BasePrecision::Int8 => LinearPrecision::Int8 { threads },
        }
    }
}

/// The kind of adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum AdapterKind {
    /// Two low-rank matrices for each layer: W + alpha/rank · B · A
    Lora,
    /// A Kronecker product, W + alpha/rank · (w1 ⊗ w2), the second factor low-rank where that is smaller: smaller files
    Lokr,
    /// LoRA with a learned magnitude for each output
    Dora,
}

/// What is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdapterSettings {
    /// LoRA, LoKr or DoRA.
    pub kind: AdapterKind,
    /// The rank of every layer that has no rank of its own.
    pub rank: usize,
    /// Numerator of the scale `alpha / rank`; `None` is each layer's rank.
    pub alpha: Option<f32>,
    /// Share of the inputs of a LoRA or DoRA that is dropped in a step.
    pub dropout: f32,
    /// The layers.
    pub targets: Targets,
    /// Other ranks for some groups of layers.
    pub ranks: Vec<(LayerGroup, usize)>,
    /// LoKr: size of the first factor; `None` splits widths as evenly as possible.
    pub factor: Option<usize>,
}

impl Default for AdapterSettings {
    fn default() -> Self {
        AdapterSettings {
            kind: AdapterKind::Lora,
            rank: 16,
            alpha: None,
            dropout: 0.0,
            targets: Targets::Preset(TargetPreset::Full),
            ranks: Vec::new(),
            factor: None,
        }
    }
}

/// The layers that get an adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Targets {
    /// A preset.
    Preset(TargetPreset),
    /// Layers of the blocks by diffusers' names, such as `transformer_blocks.0.attn.to_q`: a pattern with `*` matches a whole
    /// name; one without matches a name that is it, or ends in it behind a dot (`attn.to_q`), as in PEFT.
    Patterns(Vec<String>),
}

/// A named choice of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetPreset {
    /// All linear layers of all blocks.
    Full,
    /// All linear layers of the double blocks.
    Style,
    /// All linear layers of single blocks 0 to 12.
    Identity,
}

/// Layers that can have a rank of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerGroup {
    /// The attention of double blocks: projections of both streams, in and out.
    DoubleAttention,
    /// The MLPs of double blocks.
    DoubleMlp,
    /// `to_qkv_mlp_proj` of single blocks.
    SingleIn,
    /// `to_out` of single blocks.
    SingleOut,
}

pub(crate) const BETAS: [f32; 2] = [0.9, 0.999];
pub(crate) const EPS: f32 = 1e-8;

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Optimizer {
    /// AdamW as torch's, with f32 state.
    AdamW {
        /// Decay of the first and of the second moment.
        betas: [f32; 2],
        /// Added to the root of the second moment.
        eps: f32,
        /// Decoupled weight decay, times the learning rate.
        weight_decay: f32,
    },
    /// AdamW whose moments are stored in 8 bits, in blocks of 256 with a scale each.
    AdamW8bit {
        /// As for AdamW.
        betas: [f32; 2],
        /// As for AdamW.
        eps: f32,
        /// As for AdamW.
        weight_decay: f32,
    },
    /// Prodigy, which estimates the step size itself; the learning rate is a factor of it, usually 1.
    Prodigy {
        /// As for AdamW.
        betas: [f32; 2],
        /// As for AdamW.
        eps: f32,
        /// As for AdamW.
        weight_decay: f32,
        /// The first estimate of the distance.
        d0: f32,
        /// Factor of the estimate.
        d_coef: f32,
    },
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer::AdamW { betas: BETAS, eps: EPS, weight_decay: 1e-2 }
    }
}

impl Optimizer {
    /// The usual learning rate; for Prodigy, the factor of its own estimate.
    pub fn usual_rate(&self) -> f32 {
        if matches!(self, Optimizer::Prodigy { .. }) { 1.0 } else { 1e-4 }
    }
}

/// The learning rate: a linear warm-up to `peak`, then constant, or half a cosine down to `last · peak`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRate {
    /// After the warm-up.
    pub peak: f32,
    /// Steps over which it rises to the peak; 0 starts there.
    pub warmup_steps: u64,
    /// Last step of the cosine; `None` stays constant.
    pub cosine_steps: Option<u64>,
    /// Share of the peak at the end of the cosine.
    pub last: f32,
}

impl Default for LearningRate {
    fn default() -> Self {
        LearningRate { peak: 1e-4, warmup_steps: 0, cosine_steps: None, last: 0.0 }
    }
}

/// How the noise level of an example is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum SigmaSampling {
    /// `σ = sigmoid(mean + std · z + mu)` with a normal `z`; `mu` rises with the image's tokens as the family was trained
    /// (FLUX.2: from 0.5 at 256 to 1.15 at 4096), or is 0 without the shift.
    LogitNormal {
        /// Mean of the logit before the shift.
        mean: f32,
        /// Standard deviation of the logit.
        std: f32,
        /// Whether to shift by the number of tokens.
        shift: bool,
    },
    /// Uniform between 0 and 1.
    Uniform,
    /// One of these levels, each equally likely.
    List {
        /// The levels, above 0 and at most 1.
        sigmas: Vec<f32>,
    },
}

impl Default for SigmaSampling {
    fn default() -> Self {
        SigmaSampling::LogitNormal { mean: 0.0, std: 1.0, shift: true }
    }
}
