//! From the command line to the settings of a training.

use kiln_engine::{Model, Settings};
use kiln_tensor::DType;
use kiln_train::dataset::DataOptions;
use kiln_train::{
    AdapterKind, AdapterSettings, LayerGroup, LearningRate, LoraFormat, Optimizer, RunOptions, SigmaSampling,
    TargetPreset, Targets, TrainSettings,
};
use kiln_weights::LoraNaming;

use crate::args::{
    AdapterArgs, KindArg, LayoutArg, OptimizerArg, PictureArgs, SaveTypeArg, ScheduleArg, SigmaArg, StepArgs,
    TrainArgs,
};
use crate::error::CliError;

/// Checks options that clap can't.
pub fn check(args: &TrainArgs) -> Result<(), CliError> {
    let ranks = args.adapter.ranks.len();
    if ranks != 0 && ranks != 4 {
        return Err(CliError::usage(format!("--ranks needs four numbers, found {ranks}"))
            .hint("double blocks' attention, their MLPs, single blocks' input, their output: 128,64,64,32"));
    }
    Ok(())
}

/// How pictures are used.
pub fn data(args: &PictureArgs, model: &Model) -> DataOptions {
    let default = || DataOptions::for_model(model).resolutions;
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
        checkpointing: args.steps.checkpointing == crate::args::CheckpointingArg::On,
        seed,
        ..TrainSettings::for_machine(model, machine)
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
    let name = match args.optimizer {
        OptimizerArg::Adamw => "adamw",
        OptimizerArg::Adamw8bit => "adamw8bit",
        OptimizerArg::Prodigy => "prodigy",
    };
    Optimizer::named(name, args.weight_decay).unwrap_or_default()
}

fn learning_rate(args: &StepArgs) -> LearningRate {
    LearningRate {
        peak: args.lr.unwrap_or_else(|| optimizer(args).usual_rate()),
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
