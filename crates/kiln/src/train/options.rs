//! From the command line to the settings of a training.

use kiln_engine::{Device, Isa, Model, Precision, Settings};
use kiln_tensor::DType;
use kiln_train::dataset::DataOptions;
use kiln_train::{
    AdapterKind, AdapterSettings, BasePrecision, LayerGroup, LearningRate, LoraFormat, Optimizer, RunOptions,
    SigmaSampling, TargetPreset, Targets, TrainSettings,
};
use kiln_weights::LoraNaming;

use crate::args::{
    AdapterArgs, KindArg, LayoutArg, OptimizerArg, PictureArgs, SaveTypeArg, ScheduleArg, SigmaArg, StepArgs,
    TrainArgs,
};
use crate::error::CliError;

/// The resolution of FLUX.2's models, whose own is slow to train at.
const RESOLUTION: u32 = 768;
const BETAS: [f32; 2] = [0.9, 0.999];
const EPS: f32 = 1e-8;

/// Checks options that clap can't.
pub fn check(args: &TrainArgs) -> Result<(), CliError> {
    let is_safetensors = args.output.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors"));
    if !is_safetensors {
        let what = format!("a LoRA is a .safetensors file, -o is `{}`", args.output.display());
        return Err(CliError::usage(what).hint("end the name in .safetensors"));
    }
    let ranks = args.adapter.ranks.len();
    if ranks != 0 && ranks != 4 {
        return Err(CliError::usage(format!("--ranks needs four numbers, found {ranks}"))
            .hint("double blocks' attention, their MLPs, single blocks' input, their output: 128,64,64,32"));
    }
    let is_fused = args.saving.layout != LayoutArg::Diffusers;
    if args.adapter.kind == KindArg::Lokr && is_fused {
        return Err(CliError::usage("a LoKr can't be written with this --layout, which fuses q, k and v")
            .hint("leave out --layout; Kiln and LyCORIS read diffusers' names"));
    }
    Ok(())
}

/// How pictures are used.
pub fn data(args: &PictureArgs, model: &Model) -> DataOptions {
    let default = || vec![model.trained_sides().map_or(RESOLUTION, |_| model.default_size as u32)];
    DataOptions {
        resolutions: if args.resolution.is_empty() { default() } else { args.resolution.clone() },
        trigger: args.trigger.clone(),
        caption_dropout: args.caption_dropout,
        reference_dropout: args.reference_dropout,
        flip: args.flip,
        repeats: args.repeats as usize,
        allow_empty_captions: args.no_captions,
        skip_bad: args.skip_bad,
    }
}

/// The trainer's settings.
pub fn settings(args: &TrainArgs, model: &Model, machine: &Settings) -> TrainSettings {
    let StepArgs { clip, ema, seed, .. } = args.steps;
    TrainSettings {
        adapter: adapter(&args.adapter),
        optimizer: optimizer(&args.steps),
        learning_rate: learning_rate(&args.steps),
        max_grad_norm: (clip > 0.0).then_some(clip),
        ema_decay: ema,
        sigmas: match &args.steps.sigmas {
            SigmaArg::LogitNormal => SigmaSampling::default(),
            SigmaArg::Uniform => SigmaSampling::Uniform,
            SigmaArg::List(sigmas) => SigmaSampling::List { sigmas: sigmas.clone() },
        },
        guidance: 1.0,
        checkpointing: args.steps.checkpointing == crate::args::CheckpointingArg::On,
        base: match machine.precision {
            Precision::Fp8 => BasePrecision::Fp8,
            Precision::Int8 => BasePrecision::Int8,
            _ => BasePrecision::Stored,
        },
        bf16: is_bf16(model, machine),
        seed,
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

fn adapter(args: &AdapterArgs) -> AdapterSettings {
    let groups =
        [LayerGroup::DoubleAttention, LayerGroup::DoubleMlp, LayerGroup::SingleIn, LayerGroup::SingleOut];
    let targets = match &args.targets[..] {
        [one] if one == "full" => Targets::Preset(TargetPreset::Full),
        [one] if one == "style" => Targets::Preset(TargetPreset::Style),
        [one] if one == "identity" => Targets::Preset(TargetPreset::Identity),
        patterns => Targets::Patterns(patterns.to_vec()),
    };
    AdapterSettings {
        kind: match args.kind {
            KindArg::Lora => AdapterKind::Lora,
            KindArg::Lokr => AdapterKind::Lokr,
            KindArg::Dora => AdapterKind::Dora,
        },
        rank: args.rank as usize,
        alpha: args.alpha,
        dropout: args.dropout,
        targets,
        ranks: groups.into_iter().zip(args.ranks.iter().map(|rank| *rank as usize)).collect(),
        factor: args.factor.map(|factor| factor as usize),
    }
}

fn optimizer(args: &StepArgs) -> Optimizer {
    let (betas, eps, weight_decay) = (BETAS, EPS, args.weight_decay);
    match args.optimizer {
        OptimizerArg::Adamw => Optimizer::AdamW { betas, eps, weight_decay },
        OptimizerArg::Adamw8bit => Optimizer::AdamW8bit { betas, eps, weight_decay },
        OptimizerArg::Prodigy => Optimizer::Prodigy { betas, eps, weight_decay, d0: 1e-6, d_coef: 1.0 },
    }
}

fn learning_rate(args: &StepArgs) -> LearningRate {
    let usual = if args.optimizer == OptimizerArg::Prodigy { 1.0 } else { 1e-4 };
    LearningRate {
        peak: args.lr.unwrap_or(usual),
        warmup_steps: args.warmup,
        cosine_steps: (args.schedule == ScheduleArg::Cosine).then_some(args.steps),
        last: 0.0,
    }
}

/// Steps, checkpoints and samples.
pub fn run(args: &TrainArgs) -> RunOptions {
    RunOptions {
        steps: args.steps.steps,
        save_every: args.saving.save_every,
        sample_every: args.samples.sample_every,
        format: LoraFormat {
            naming: match args.saving.layout {
                LayoutArg::Diffusers => LoraNaming::Diffusers,
                LayoutArg::Comfyui => LoraNaming::Original,
                LayoutArg::Kohya => LoraNaming::Kohya,
            },
            dtype: match args.saving.save_dtype {
                SaveTypeArg::Bf16 => DType::BF16,
                SaveTypeArg::F32 => DType::F32,
            },
            trigger: args.pictures.trigger.clone(),
        },
        tensorboard: args.saving.tensorboard,
    }
}
