//! A trainer that only counts: a millisecond a step, with a checkpoint every ten. The name of the LoRA selects its behaviour.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_server::{
    ErrorCode, JobError, TrainableModel, Trainer, TrainingCheck, TrainingEnd, TrainingFiles,
    TrainingProgress, TrainingStep, TrainingTask,
};
use kiln_train::{Preset, TrainRequest};

use crate::harness::png;

/// The trainer. `fail` fails at step 5, `panic` panics, `release` ends for image jobs instead of waiting, `slow` takes 5 ms a
/// step.
#[derive(Clone, Default)]
pub struct FakeTrainer {
    /// What happened: `train NAME from STEP`.
    pub events: Arc<Mutex<Vec<String>>>,
    /// Where the LoRAs go, if anywhere.
    pub loras: Option<PathBuf>,
}

impl FakeTrainer {
    pub fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }
}

fn losses(folder: &Path) -> Vec<(u64, f32, f32)> {
    let text = fs::read_to_string(folder.join("log")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).map(|step| (step, 1.0 / step as f32, 0.5)).collect()
}

impl Trainer for FakeTrainer {
    fn models(&self) -> Vec<TrainableModel> {
        let settings = |preset, rank| TrainRequest {
            preset: Some(preset),
            steps: Some(30),
            rank: Some(rank),
            targets: vec!["full".into()],
            resolution: vec![64],
            learning_rate: Some(1e-3),
            ..TrainRequest::default()
        };
        let presets = vec![settings(Preset::Subject, 32), settings(Preset::Full, 16)];
        vec![TrainableModel { name: "small-base".into(), use_with: Some("small".into()), presets }]
    }

    fn check(&self, task: TrainingTask<'_>) -> Result<TrainingCheck, JobError> {
        let files: Vec<_> = fs::read_dir(task.images).unwrap().map(|entry| entry.unwrap().path()).collect();
        let captions = files.iter().filter(|path| path.extension().unwrap() == "txt").count();
        let examples = files.len() - captions;
        if captions < examples && task.request.trigger.is_none() {
            return Err(JobError::new(
                ErrorCode::Unusable,
                format!("{} images have no caption", examples - captions),
            ));
        }
        let cost = format!("rank {}", task.request.rank.unwrap());
        Ok(TrainingCheck {
            examples,
            sizes: vec!["64x64".into()],
            warnings: vec!["a duplicate".into()],
            cost,
        })
    }

    fn train(&self, task: TrainingTask<'_>, progress: &TrainingProgress) -> Result<TrainingEnd, JobError> {
        let name = task.request.output.to_str().unwrap();
        fs::create_dir_all(task.folder).map_err(|e| JobError::new(ErrorCode::Storage, e.to_string()))?;
        let state = task.folder.join("state");
        let first: u64 = fs::read_to_string(&state).map_or(0, |text| text.parse().unwrap());
        self.events.lock().unwrap().push(format!("train {name} from {first}"));
        let save = |step: u64| {
            fs::write(&state, step.to_string()).unwrap();
            fs::write(task.folder.join("log"), (1..=step).map(|n| format!("{n}\n")).collect::<String>())
                .unwrap();
        };
        for done in 0..2 {
            progress.preparing("images", done, 2);
            std::thread::sleep(Duration::from_millis(if name == "slow" { 30 } else { 1 }));
            if progress.is_stopped() {
                return Err(JobError::cancelled());
            }
        }
        progress.starting(first);
        for step in first + 1..=task.request.steps.unwrap() {
            std::thread::sleep(Duration::from_millis(if name == "slow" { 5 } else { 1 }));
            match name {
                "fail" if step == 5 => {
                    return Err(JobError::new(
                        ErrorCode::TrainingFailed,
                        "the loss of step 5 is not a number",
                    ));
                }
                "panic" => panic!("on purpose"),
                _ => {}
            }
            progress.stepped(TrainingStep { step, loss: 1.0 / step as f32, smoothed: 0.5, seconds: 0.001 });
            let stops = progress.is_stopped() || (name == "release" && progress.is_device_wanted());
            if step % 10 == 0 || stops {
                save(step);
            }
            if step % 10 == 0 {
                fs::write(task.folder.join(format!("{step}.png")), png(8, 8)).unwrap();
                progress.sampled();
            }
            if stops {
                return Ok(TrainingEnd::Stopped);
            }
            if name != "release" && progress.is_device_wanted() {
                self.events.lock().unwrap().push("wait".into());
                progress.wait_for_device(&|| false);
            }
        }
        progress.note("it went well");
        let lora = format!("{name}-lora");
        if let Some(loras) = &self.loras {
            fs::write(loras.join(format!("{lora}.safetensors")), format!("weights of {name}")).unwrap();
        }
        Ok(TrainingEnd::Done(lora))
    }

    fn idle_time(&self) -> Duration {
        Duration::from_millis(60)
    }

    fn files(&self, folder: &Path) -> TrainingFiles {
        let sample = |step: u64| (step, folder.join(format!("{step}.png")));
        let samples = (1..=100).map(|n| sample(10 * n)).filter(|(_, path)| path.exists()).collect();
        TrainingFiles { losses: losses(folder), samples, resumable: folder.join("state").exists() }
    }

    fn delete_lora(&self, name: &str) -> std::io::Result<bool> {
        let Some(loras) = &self.loras else { return Ok(false) };
        fs::remove_file(loras.join(format!("{name}.safetensors"))).map(|()| true)
    }
}
