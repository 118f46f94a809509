//! The files of a training: the LoRA itself, and a folder beside it with state, log, checkpoints and samples.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use kiln_base::FileLock;
use kiln_engine::{Field, hint};
use kiln_tensor::DType;
use kiln_weights::{LoraNaming, TrainedModule, lora_contents, save};

use crate::checkpoint::RunRecord;
use crate::{Error, Result};

/// How a LoRA is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraFormat {
    /// The names of its keys.
    pub naming: LoraNaming,
    /// f32 or bf16.
    pub dtype: DType,
    /// The trigger, which programs that load the LoRA show.
    pub trigger: Option<String>,
}

/// The paths of a training's files.
#[derive(Clone, Debug)]
pub struct RunFiles {
    /// The LoRA.
    pub output: PathBuf,
    /// The folder beside it.
    pub folder: PathBuf,
}

/// Keeps other trainings from writing the same files, until it is dropped or the process dies.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunFiles {
    /// Returns the paths for a LoRA at `output`: `me.safetensors` has the folder `me.train`.
    pub fn new(output: &Path) -> RunFiles {
        RunFiles { output: output.to_owned(), folder: output.with_extension("train") }
    }

    /// Checks that nothing is overwritten by accident, creates the folder and locks it. A new training needs `overwrite` if
    /// the LoRA or a state exists; a resumed one needs the state.
    pub fn prepare(&self, resume: bool, overwrite: bool) -> Result<RunLock> {
        // Once before the folder is created, and again when no other training can finish in it.
        self.check(resume, overwrite)?;
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        let lock = self.lock()?;
        self.check(resume, overwrite)?;
        Ok(lock)
    }

    fn lock(&self) -> Result<RunLock> {
        let path = self.folder.join("training.lock");
        let file = File::options().create(true).write(true).truncate(false).open(&path);
        let lock = file.and_then(kiln_base::lock_file).map_err(Error::io("write", &path))?;
        match lock {
            // Without locks, as on some network drives, running only one training is up to the user.
            FileLock::Locked(file) | FileLock::Unsupported(file) => Ok(RunLock { _file: file }),
            FileLock::InUse => Err(Error::InUse { folder: self.folder.clone() }),
        }
    }

    /// Checks that nothing would be overwritten by accident, without creating anything.
    pub fn check(&self, resume: bool, overwrite: bool) -> Result<()> {
        let has_state = self.state().is_file();
        if resume && !has_state {
            let what = format!("there is nothing to resume: `{}` does not exist", self.state().display());
            return Err(Error::data(what).with_hint(hint!["start without ", Field::Resume]));
        }
        if !resume && !overwrite {
            if self.output.exists() {
                let what = format!("`{}` exists already", self.output.display());
                return Err(Error::data(what).with_hint(
                    hint!["choose another ", Field::Output; "replace it with ", Field::Overwrite.on()],
                ));
            }
            if has_state {
                let what = format!("`{}` has the state of an unfinished training", self.folder.display());
                let hint = hint![
                    "continue it with ", Field::Resume.on();
                    "start over with ", Field::Overwrite.on();
                    "choose another ", Field::Output
                ];
                return Err(Error::data(what).with_hint(hint));
            }
        }
        if self.output.is_dir() {
            let what = format!("`{}` is a folder", self.output.display());
            return Err(Error::data(what).with_hint("name a .safetensors file"));
        }
        Ok(())
    }

    /// Checks that the disk has room for files of `bytes` together.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        match kiln_base::free_space(&self.folder) {
            Some(free) if free < bytes => {
                let [need, free] = [bytes, free].map(|bytes| bytes.div_ceil(1 << 20));
                let what = format!(
                    "the disk of `{}` has {free} MiB left, the training writes about {need} MiB",
                    self.folder.display()
                );
                Err(Error::data(what).with_hint(hint!["free some space"; "choose another ", Field::Output]))
            }
            _ => Ok(()),
        }
    }

    /// The state to resume from.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state.safetensors")
    }

    /// The log, one JSON object per step.
    pub fn log(&self) -> PathBuf {
        self.folder.join("log.jsonl")
    }

    /// The folder of TensorBoard's files.
    pub fn tensorboard(&self) -> PathBuf {
        self.folder.join("tensorboard")
    }

    /// The LoRA after a number of steps.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        let stem = self.output.file_stem().unwrap_or_default().to_string_lossy();
        self.folder.join(format!("{stem}-{step:06}.safetensors"))
    }

    /// The folder of sample images.
    pub fn samples(&self) -> PathBuf {
        self.folder.join("samples")
    }
}

/// Writes a LoRA with what it was trained on.
pub fn write_lora(
    path: &Path,
    modules: &[TrainedModule],
    record: &RunRecord,
    steps: u64,
    format: &LoraFormat,
) -> Result<()> {
    let refused = |reason: String| {
        Error::data(format!("the adapter can't be written in this layout: {reason}"))
            .with_hint(hint!["write it with ", Field::Layout.to("diffusers")])
    };
    let (tensors, mut metadata) =
        lora_contents(modules, record.settings.family, format.naming, format.dtype).map_err(refused)?;
    metadata.extend(run_metadata(record, steps));
    metadata.extend(format.trigger.clone().map(|trigger| ("modelspec.trigger_phrase".to_owned(), trigger)));
    let tensors: Vec<_> = tensors.iter().map(|(name, values)| (name.as_str(), values.clone())).collect();
    Ok(save::save(path, &tensors, &metadata)?)
}

fn run_metadata(record: &RunRecord, steps: u64) -> BTreeMap<String, String> {
    let settings = serde_json::to_string(&record.settings).unwrap_or_default();
    let fields = [
        ("format", "pt".to_owned()),
        ("kiln.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("kiln.base", record.base.clone()),
        ("kiln.base_fingerprint", record.base_fingerprint.clone()),
        ("kiln.data", record.data.clone()),
        ("kiln.steps", steps.to_string()),
        ("kiln.batch", format!("{}x{}", record.batch, record.accumulation)),
        ("kiln.settings", settings),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainSettings;
    use kiln_tensor::HostTensor;
    use kiln_weights::Lora;

    #[test]
    fn existing_files_are_kept_unless_told_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let files = RunFiles::new(&folder.path().join("me.safetensors"));
        let message = |resume, overwrite| files.prepare(resume, overwrite).unwrap_err().to_string();
        assert!(message(true, false).contains("nothing to resume"));
        files.prepare(false, false).unwrap();
        fs::write(files.state(), "x").unwrap();
        assert!(message(false, false).contains("unfinished training"));
        fs::write(&files.output, "x").unwrap();
        assert!(message(false, false).contains("exists already"));
        files.prepare(true, false).unwrap();
        files.prepare(false, true).unwrap();
        files.check_space(1).unwrap();
        assert!(files.check_space(u64::MAX).unwrap_err().to_string().contains("MiB left"));
    }

    #[test]
    fn a_lora_says_what_it_was_trained_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("me.safetensors");
        let record = RunRecord {
            base: "klein-base-4b".into(),
            base_fingerprint: "f".into(),
            data: "d".into(),
            batch: 1,
            accumulation: 1,
            settings: TrainSettings::default(),
        };
        let tensor = |shape: [usize; 2]| HostTensor::from_f32(shape, vec![0.5; shape[0] * shape[1]]).unwrap();
        let adapter = [TrainedModule {
            layer: "transformer_blocks.0.attn.to_q".into(),
            rank: 2,
            alpha: 4.0,
            tensors: [("lora_A.weight".into(), tensor([2, 8])), ("lora_B.weight".into(), tensor([8, 2]))]
                .into(),
        }];
        let trigger = Some("sks dog".to_owned());
        let format = LoraFormat { naming: LoraNaming::Diffusers, dtype: DType::BF16, trigger };
        write_lora(&path, &adapter, &record, 100, &format).unwrap();
        let lora = Lora::open(&path).unwrap();
        assert_eq!(lora.scale("transformer_blocks.0.attn.to_q"), Some(2.0));
        let metadata = lora.source().metadata();
        assert_eq!(
            (metadata["kiln.base"].as_str(), metadata["kiln.steps"].as_str()),
            ("klein-base-4b", "100")
        );
        assert_eq!(metadata["modelspec.trigger_phrase"], "sks dog");
    }
}
