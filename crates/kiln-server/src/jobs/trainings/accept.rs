//! Accepts trainings: checks their settings, copies their images, and lets the trainer look at them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_base::{TemporaryFolder, hex, lock};
use kiln_engine::FileRef;
use kiln_train::{SigmaLevels, TrainRequest};
use serde::Deserialize;

use super::record::Record;
use super::state::{TrainingJob, TrainingSnapshot};
use super::task::{TrainingCheck, TrainingTask};
use super::training::Training;
use super::{Trainings, check_unfinished};
use crate::jobs::caller::Caller;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::name;
use crate::jobs::intake::Intake;
use crate::jobs::random::random_bytes;
use crate::jobs::store::now;

/// The most images of a training.
const MAX_IMAGES: usize = 1000;
/// The most trainings that are kept for a client.
const MAX_KEPT: usize = 100;
const MAX_NAME: usize = 64;
const MAX_TRIGGER: usize = 200;
const MAX_STEPS: u64 = 100_000;
const MAX_RANK: u32 = 256;
const MAX_CHECKPOINTS: u64 = 200;
const MAX_SAMPLES: usize = 8;

/// An image to learn.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainingImage {
    /// An image of `/v1/inputs` (`input:…`), a generated one (`image:…`), a data URL or base64.
    image: String,
    /// What it shows.
    #[serde(default)]
    caption: String,
    /// Its file name, for messages.
    #[serde(default)]
    name: String,
}

fn invalid(param: &'static str, message: impl Into<String>) -> JobError {
    JobError::new(ErrorCode::InvalidValue, message).param(param)
}

impl Intake {
    /// Checks a training as if it were to start, and keeps nothing.
    pub(crate) fn check_training(
        &self,
        trainings: &Trainings,
        request: TrainRequest,
        images: Vec<TrainingImage>,
        caller: &Caller,
    ) -> Result<TrainingCheck, JobError> {
        let request = self.complete(trainings, request)?;
        let _turn = trainings.checks.wait()?;
        let folder = TemporaryFolder::create(&trainings.folder).map_err(|error| storage(&error))?;
        self.copy_images(folder.path(), images, caller, u64::MAX)?;
        check(trainings, &request, folder.path())
    }

    /// Accepts a training: it is stored and queued.
    pub(crate) fn accept_training(
        &self,
        trainings: &Trainings,
        request: TrainRequest,
        images: Vec<TrainingImage>,
        caller: &Caller,
    ) -> Result<Arc<Training>, JobError> {
        let request = self.complete(trainings, request)?;
        let turn = trainings.checks.wait()?;
        let room = self.room_for(trainings, caller)?;
        let folder = TemporaryFolder::create(&trainings.folder).map_err(|error| storage(&error))?;
        let (images, image_bytes) = self.copy_images(folder.path(), images, caller, room)?;
        let mut check = check(trainings, &request, folder.path())?;
        drop(turn);
        if self.config.check.is_some() {
            check.warnings.push("no samples: this server checks images before it shows them".into());
        }
        if *self.closing.borrow() {
            return Err(JobError::new(ErrorCode::ShuttingDown, "the server is stopping"));
        }
        let id = hex(random_bytes::<12>());
        let job = TrainingJob {
            id: id.clone(),
            client: caller.client.clone(),
            created: now(),
            request,
            images,
            image_bytes,
            check,
        };
        let record = Record { job, snapshot: TrainingSnapshot::default() };
        record.write(folder.path()).map_err(|error| storage(&error))?;
        let path = trainings.folder.join(&id);
        let training = Arc::new(Training::new(record, &path));
        {
            let mut all = lock(&trainings.all);
            // Others may have come in since the room was measured.
            check_counts(&all, caller)?;
            folder.rename(&path).map_err(|error| storage(&error))?;
            all.push(Arc::clone(&training));
        }
        trainings.wake();
        tracing::info!(training = id, client = caller.client, images, "training queued");
        Ok(training)
    }

    /// Bytes of images that a client may store for another training.
    fn room_for(&self, trainings: &Trainings, caller: &Caller) -> Result<u64, JobError> {
        let all = lock(&trainings.all);
        check_counts(&all, caller)?;
        let own = all.iter().filter(|training| training.client == caller.client);
        let used: u64 = own.map(|training| training.image_bytes).sum();
        let quota = caller.quotas.inputs.unwrap_or(self.config.limits.inputs);
        Ok(quota.saturating_sub(used))
    }

    /// Links or copies the images into the folder of a training; returns their number and bytes.
    fn copy_images(
        &self,
        folder: &Path,
        images: Vec<TrainingImage>,
        caller: &Caller,
        room: u64,
    ) -> Result<(usize, u64), JobError> {
        match images.len() {
            0 => return Err(invalid("images", "a training needs images")),
            count if count > MAX_IMAGES => {
                let message = format!("a training has at most {MAX_IMAGES} images, found {count}");
                return Err(invalid("images", message));
            }
            _ => {}
        }
        let images_folder = Training::images_folder(folder);
        fs::create_dir(&images_folder).map_err(|error| storage(&error))?;
        let (count, mut bytes) = (images.len(), 0);
        for (number, item) in (1..).zip(images) {
            let limit = self.config.limits.prompt;
            if item.caption.len() > limit {
                let message = format!("the caption of image {number} has more than {limit} bytes");
                return Err(invalid("images", message));
            }
            let mut file = FileRef::from(PathBuf::from(item.image));
            self.store_input_image(&mut file, &format!("image {number}"), caller)?;
            let source = self.store.inputs().path(name(&file.path));
            let source = source.ok_or_else(|| {
                JobError::new(ErrorCode::InputsFull, "the images are more than what is kept for you")
            })?;
            let path = images_folder.join(file_name(number, &item.name));
            // The file of an input never changes.
            if fs::hard_link(&source, &path).is_err() {
                fs::copy(&source, &path).map_err(|error| storage(&error))?;
            }
            bytes += fs::metadata(&path).map_or(0, |metadata| metadata.len());
            if bytes > room {
                let message = format!(
                    "the images of your trainings have more bytes than you may store, {room} are left; delete \
                     trainings, or use smaller images"
                );
                return Err(JobError::new(ErrorCode::InputsFull, message));
            }
            let caption = item.caption.trim();
            if !caption.is_empty() {
                fs::write(path.with_extension("txt"), caption).map_err(|error| storage(&error))?;
            }
        }
        Ok((count, bytes))
    }

    /// Fills in what a request leaves out, and checks its values.
    fn complete(&self, trainings: &Trainings, request: TrainRequest) -> Result<TrainRequest, JobError> {
        let mut request = complete(trainings, request)?;
        request.check().map_err(|error| JobError::explained(&error))?;
        self.check_limits(&request)?;
        // They would be shown unchecked.
        if self.config.check.is_some() {
            request.sample_every = Some(0);
        }
        Ok(request)
    }

    /// Checks what a server limits in a request that is complete.
    fn check_limits(&self, request: &TrainRequest) -> Result<(), JobError> {
        check_name(request.output.to_str().unwrap_or_default())?;
        if let Some(field) = request.local_field() {
            let message = format!("{field} is not supported over HTTP: it is about files on the server");
            return Err(invalid(field, message));
        }
        let least = request.step_count().div_ceil(MAX_CHECKPOINTS);
        let number = |number: Option<u32>| number.map(u64::from);
        let numbers = [
            ("steps", request.steps, 1, MAX_STEPS),
            ("rank", number(request.rank), 1, MAX_RANK.into()),
            ("ranks", number(request.ranks.iter().max().copied()), 1, MAX_RANK.into()),
            ("batch", number(request.batch), 1, 32),
            ("accumulate", number(request.accumulate), 1, 64),
            ("repeats", number(request.repeats), 1, 100),
            ("save_every", request.save_every, least, MAX_STEPS),
            ("sample_every", request.sample_every.filter(|every| *every > 0), least, MAX_STEPS),
            ("sample_steps", number(request.sample_steps), 1, 100),
        ];
        for (name, number, min, max) in numbers {
            if let Some(found) = number.filter(|number| *number < min || *number > max) {
                return Err(invalid(name, format!("{name} must be between {min} and {max}, found {found}")));
            }
        }
        if request.learning_rate.is_some_and(|rate| rate > 10.0) {
            return Err(invalid("learning_rate", "learning_rate must be at most 10"));
        }
        let sigmas = match &request.sigmas {
            Some(SigmaLevels::List(levels)) => levels.len(),
            _ => 0,
        };
        let lists = [
            ("resolution", request.resolution.len(), 4),
            ("sigmas", sigmas, 50),
            ("sample_prompts", request.sample_prompts.len(), MAX_SAMPLES),
        ];
        if let Some((name, count, most)) = lists.into_iter().find(|(_, count, most)| count > most) {
            return Err(invalid(name, format!("{name} has {count} values, the limit is {most}")));
        }
        let trigger = request.trigger.as_deref().unwrap_or_default();
        if trigger.len() > MAX_TRIGGER || trigger.contains(char::is_control) {
            return Err(invalid(
                "trigger",
                format!("the trigger is one line of at most {MAX_TRIGGER} bytes"),
            ));
        }
        let limit = self.config.limits.prompt;
        if request.sample_prompts.iter().any(|prompt| prompt.len() > limit) {
            return Err(invalid("sample_prompts", format!("a sample prompt has more than {limit} bytes")));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "._*".contains(c);
        let length: usize = request.targets.iter().map(String::len).sum();
        if length > 1000 || !request.targets.iter().all(|target| target.chars().all(plain)) {
            return Err(invalid("targets", "targets are `full`, `style`, `identity`, or names of layers"));
        }
        Ok(())
    }
}

fn check_counts(all: &[Arc<Training>], caller: &Caller) -> Result<(), JobError> {
    check_unfinished(all, &caller.client, caller)?;
    if all.iter().filter(|training| training.client == caller.client).count() >= MAX_KEPT {
        let message = format!("{MAX_KEPT} trainings are kept for you; delete some");
        return Err(JobError::new(ErrorCode::TrainingsFull, message));
    }
    Ok(())
}

/// Lets the trainer look at the images and settings.
fn check(trainings: &Trainings, request: &TrainRequest, folder: &Path) -> Result<TrainingCheck, JobError> {
    let (images, folder) = (Training::images_folder(folder), Training::run_folder(folder));
    trainings.trainer.check(TrainingTask { request, images: &images, folder: &folder })
}

/// Fills in what a request leaves out: the model, and the settings of its preset.
fn complete(trainings: &Trainings, mut request: TrainRequest) -> Result<TrainRequest, JobError> {
    let models = trainings.trainer.models();
    let found = match &request.model {
        Some(name) => {
            let name = name.to_str().unwrap_or_default();
            let distilled = || trainings.trainer.distilled_model(name).filter(|_| request.distilled_anyway);
            models.iter().find(|model| model.name == name).cloned().or_else(distilled).ok_or_else(|| {
                let name: String = name.chars().take(80).collect();
                let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
                let message = format!(
                    "there is no base model `{name}` to train on; available: {}. Distilled models are left out: training \
                     undoes their distillation",
                    if names.is_empty() { "none".into() } else { names.join(", ") }
                );
                JobError::new(ErrorCode::ModelNotFound, message).param("model")
            })
        }
        None => models.first().cloned().ok_or_else(|| {
            let message = "this server has no base model to train on, such as klein-base-4b";
            JobError::new(ErrorCode::ModelNotFound, message).param("model")
        }),
    }?;
    let preset = Some(request.preset.unwrap_or_default());
    let Some(preset) = found.presets.iter().find(|settings| settings.preset == preset) else {
        return Err(invalid("preset", "the model has no such preset"));
    };
    request.fill_in(preset);
    request.model = Some(found.name.into());
    request.output = request.output.to_string_lossy().trim().into();
    let trigger = request.trigger.map(|trigger| trigger.trim().to_owned());
    request.trigger = trigger.filter(|text| !text.is_empty());
    let steps = request.step_count();
    request.save_every.get_or_insert((steps / 10).clamp(10, 250).max(steps / MAX_CHECKPOINTS));
    request.sample_every.get_or_insert(steps.div_ceil(5).max(10));
    Ok(request)
}

/// A LoRA's name becomes a file's name.
fn check_name(name: &str) -> Result<(), JobError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, ' ' | '.' | '-' | '_');
    let ends = [name.chars().next(), name.chars().last()];
    let fits = !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(plain);
    let fits = fits && ends.iter().flatten().all(char::is_ascii_alphanumeric);
    // Paths of the API beside `/v1/loras/NAME`, and devices of Windows.
    if ["details", "preview"].contains(&name) || fits && kiln_base::windows_name_problem(name).is_some() {
        return Err(invalid(
            "name",
            format!("a LoRA can't be called `{name}` on a server; choose another name"),
        ));
    }
    if fits {
        return Ok(());
    }
    let message = format!(
        "the name of a LoRA has 1 to {MAX_NAME} letters, digits, spaces, `.`, `-` and `_`, and begins and ends with a \
         letter or digit"
    );
    Err(invalid("name", message))
}

/// The file name of an image: its number and what is harmless of its own name. The content decides the format.
fn file_name(number: usize, own: &str) -> String {
    let own = own.rsplit(['/', '\\']).next().unwrap_or_default();
    let (stem, extension) = own.rsplit_once('.').unwrap_or((own, ""));
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' };
    let stem: String = stem.chars().take(40).map(plain).collect();
    let extension = extension.to_ascii_lowercase();
    let known = ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"].contains(&extension.as_str());
    format!("{number:04}-{stem}.{}", if known { &extension } else { "png" })
}

fn storage(error: &std::io::Error) -> JobError {
    JobError::new(ErrorCode::Storage, format!("can't store the training: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_harmless() {
        for (name, expected) in [
            ("fox.JPG", "0007-fox.jpg"),
            ("../../etc/passwd", "0007-passwd.png"),
            ("a\\b/c d\u{0}é.webp", "0007-c_d__.webp"),
            ("metadata.jsonl", "0007-metadata.png"),
            ("", "0007-.png"),
        ] {
            assert_eq!(file_name(7, name), expected);
        }
    }

    #[test]
    fn a_lora_needs_a_plain_name() {
        for good in ["me", "My style v1.2", "a-b_c"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "details",
            "con",
            "Aux.1",
            ".",
            "..",
            "../x",
            "a/b",
            "a\\b",
            " a",
            "a.",
            "nul\0",
            "é",
            &"x".repeat(65),
        ] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
