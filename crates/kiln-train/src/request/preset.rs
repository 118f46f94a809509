//! Presets: the settings that docs/training.md recommends.

use kiln_engine::Model;

use super::{LearningSchedule, OptimizerName, Preset, SigmaLevels, TrainRequest};

impl Preset {
    /// The settings that it means for a model.
    pub fn request(self, model: &Model) -> TrainRequest {
        let (targets, rank, steps, resolution) = match self {
            Preset::Style => ("style", 16, 1500, vec![768]),
            Preset::Subject => ("full", 32, 1500, vec![512, 768]),
            Preset::Full => ("full", 16, 1000, vec![768]),
        };
        let settings = TrainRequest {
            preset: Some(self),
            steps: Some(steps),
            rank: Some(rank),
            targets: vec![targets.into()],
            resolution,
            learning_rate: Some(1e-4),
            ..TrainRequest::default()
        };
        if model.trained_sides().is_none() {
            return settings;
        }
        // A model that was trained for small images, such as Ember: colours and outlines are decided at high noise levels.
        TrainRequest {
            steps: Some(200),
            resolution: vec![model.default_size as u32],
            learning_rate: Some(2e-3),
            sigmas: Some(SigmaLevels::List(vec![1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3])),
            schedule: Some(LearningSchedule::Cosine),
            ..settings
        }
    }
}

impl TrainRequest {
    /// Fills in what it leaves out of the settings of a preset.
    pub fn fill_in(&mut self, preset: &TrainRequest) {
        self.preset = preset.preset;
        self.steps = self.steps.or(preset.steps);
        self.rank = self.rank.or(preset.rank);
        // Prodigy finds the rate itself.
        if self.optimizer != Some(OptimizerName::Prodigy) {
            self.learning_rate = self.learning_rate.or(preset.learning_rate);
        }
        self.schedule = self.schedule.or(preset.schedule);
        if self.sigmas.is_none() {
            self.sigmas.clone_from(&preset.sigmas);
        }
        if self.targets.is_empty() {
            self.targets.clone_from(&preset.targets);
        }
        if self.resolution.is_empty() {
            self.resolution.clone_from(&preset.resolution);
        }
    }
}
