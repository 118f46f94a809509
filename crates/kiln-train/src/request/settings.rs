//! From a request to the settings of a training, with the defaults filled in.

use kiln_engine::{Model, Settings};

use super::{Checkpointing, LearningSchedule, TrainRequest};
use crate::dataset::DataOptions;
use crate::{
    AdapterSettings, LayerGroup, LearningRate, LoraFormat, Optimizer, RunOptions, TargetPreset, Targets,
    TrainSettings,
};

impl TrainRequest {
    /// How images are used.
    pub(crate) fn data_options(&self, model: &Model) -> DataOptions {
        let default = DataOptions::for_model(model);
        DataOptions {
            resolutions: if self.resolution.is_empty() {
                default.resolutions
            } else {
                self.resolution.clone()
            },
            trigger: self.trigger.clone(),
            caption_dropout: self.caption_dropout.unwrap_or(default.caption_dropout),
            reference_dropout: self.reference_dropout.unwrap_or(default.reference_dropout),
            flip: self.flip,
            repeats: self.repeats.map_or(default.repeats, |repeats| repeats as usize),
            allow_empty_captions: self.no_captions,
            skip_bad: self.skip_bad,
        }
    }

    /// The trainer's settings.
    pub(crate) fn settings(&self, model: &Model, machine: &Settings) -> TrainSettings {
        let default = TrainSettings::for_machine(model, machine);
        TrainSettings {
            adapter: self.adapter(),
            optimizer: self.optimizer(),
            learning_rate: self.rate(),
            max_grad_norm: self.clip.map_or(default.max_grad_norm, |clip| (clip > 0.0).then_some(clip)),
            ema_decay: self.ema,
            sigmas: self.sigmas.as_ref().map_or(default.sigmas, |sigmas| sigmas.sampling()),
            checkpointing: self.checkpointing == Some(Checkpointing::On),
            seed: self.seed.unwrap_or(default.seed),
            ..default
        }
    }

    fn adapter(&self) -> AdapterSettings {
        let default = AdapterSettings::default();
        let groups =
            [LayerGroup::DoubleAttention, LayerGroup::DoubleMlp, LayerGroup::SingleIn, LayerGroup::SingleOut];
        let targets = match &self.targets[..] {
            [] => default.targets,
            [one] if one == "full" => Targets::Preset(TargetPreset::Full),
            [one] if one == "style" => Targets::Preset(TargetPreset::Style),
            [one] if one == "identity" => Targets::Preset(TargetPreset::Identity),
            patterns => Targets::Patterns(patterns.to_vec()),
        };
        AdapterSettings {
            kind: self.kind.unwrap_or(default.kind),
            rank: self.rank.map_or(default.rank, |rank| rank as usize),
            alpha: self.alpha,
            dropout: self.dropout.unwrap_or(default.dropout),
            targets,
            ranks: groups.into_iter().zip(self.ranks.iter().map(|rank| *rank as usize)).collect(),
            factor: self.factor.map(|factor| factor as usize),
        }
    }

    fn optimizer(&self) -> Optimizer {
        self.optimizer.unwrap_or_default().optimizer(self.weight_decay.unwrap_or(0.01))
    }

    fn rate(&self) -> LearningRate {
        LearningRate {
            peak: self.learning_rate.unwrap_or_else(|| self.optimizer().usual_rate()),
            warmup_steps: self.warmup.unwrap_or(0),
            cosine_steps: (self.schedule == Some(LearningSchedule::Cosine)).then_some(self.step_count()),
            last: 0.0,
        }
    }

    /// The number of steps.
    pub fn step_count(&self) -> u64 {
        self.steps.unwrap_or(1000)
    }

    /// Steps, checkpoints and samples.
    pub(crate) fn run_options(&self) -> RunOptions {
        RunOptions {
            steps: self.step_count(),
            save_every: self.save_every.unwrap_or(250),
            sample_every: self.sample_every.filter(|every| *every > 0),
            format: LoraFormat {
                naming: self.layout.unwrap_or_default().into(),
                dtype: self.save_dtype.unwrap_or_default().into(),
                trigger: self.trigger.clone(),
            },
            tensorboard: self.tensorboard,
        }
    }
}
