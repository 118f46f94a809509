//! The state of a training on the disk, from which it continues bit for bit.
//!
//! One safetensors file, replaced as a whole: after a crash it is the last state or the one before, never a mixture. Its
//! metadata say what the state belongs to; a resumed training must have the same model, data and settings, but for those
//! that only change the steps to come.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_engine::{Field, hint};
use kiln_weights::{WeightSource, save};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, TrainSettings, TrainerState};

const RECORD: &str = "kiln.training";
const NUMBERS: &str = "kiln.numbers";
const STEP: &str = "kiln.step";

/// What decides the bits of a training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The base model's name or path.
    pub base: String,
    /// Its transformer's fingerprint.
    pub base_fingerprint: String,
    /// The hash of the data.
    pub data: String,
    /// Examples of a batch.
    pub batch: usize,
    /// Batches of a step.
    pub accumulation: usize,
    /// The trainer's settings.
    pub settings: TrainSettings,
}

/// Settings that a resumed training may change: the length and height of its steps, and how the model is multiplied.
const CHANGEABLE: [&str; 4] =
    ["settings.learning_rate.", "settings.max_grad_norm", "settings.bf16", "settings.base"];

impl RunRecord {
    /// Returns what differs from the training that a state was saved by: first a difference that forbids to resume it,
    /// then those that don't.
    fn differences(&self, saved: &RunRecord) -> (Option<String>, Vec<String>) {
        let value = |record: &RunRecord| serde_json::to_value(record).unwrap_or_default();
        let (mut now, mut then) = (value(self), value(saved));
        // The name may differ where the weights are the same.
        [&mut now, &mut then].into_iter().for_each(|record| record["base"] = serde_json::Value::Null);
        let mut fields = Vec::new();
        differing_fields("", &now, &then, &mut fields);
        let (changed, refused): (Vec<_>, Vec<_>) =
            fields.into_iter().partition(|(name, _)| CHANGEABLE.iter().any(|start| name.starts_with(start)));
        let text = |(_, text): (String, String)| text;
        (refused.into_iter().next().map(text), changed.into_iter().map(text).collect())
    }
}

/// Lists the fields that differ: the name of each, and how it differs.
fn differing_fields(
    name: &str,
    now: &serde_json::Value,
    then: &serde_json::Value,
    fields: &mut Vec<(String, String)>,
) {
    match (now.as_object(), then.as_object()) {
        (Some(now), Some(then)) => {
            for (key, value) in now {
                let inner = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                differing_fields(&inner, value, then.get(key).unwrap_or(&serde_json::Value::Null), fields);
            }
        }
        _ if now == then => {}
        _ => {
            let text = match name {
                "base_fingerprint" => "the base model differs".to_owned(),
                "data" => "the images, captions or their options have changed".to_owned(),
                _ => {
                    let name = name.trim_start_matches("settings.");
                    format!("`{name}` was {} and is {}", shown(then), shown(now))
                }
            };
            fields.push((name.to_owned(), text));
        }
    }
}

/// A value as it was given: numbers with a fraction are f32.
fn shown(value: &serde_json::Value) -> String {
    match value.as_f64().filter(|_| value.is_f64()) {
        Some(number) => (number as f32).to_string(),
        None => value.to_string(),
    }
}

/// A loaded state.
#[derive(Debug)]
pub struct SavedState {
    /// The state.
    pub state: TrainerState,
    /// Settings that have changed since it was saved.
    pub changes: Vec<String>,
}

/// Saves a state, whole or not at all.
pub fn save_state(path: &Path, state: &TrainerState, record: &RunRecord) -> Result<()> {
    let metadata = BTreeMap::from([
        (RECORD.to_owned(), json(record)),
        (NUMBERS.to_owned(), json(&bits(&state.numbers))),
        (STEP.to_owned(), state.step.to_string()),
    ]);
    let tensors: Vec<_> =
        state.tensors.iter().map(|(name, values)| (name.as_str(), values.clone())).collect();
    Ok(save::save(path, &tensors, &metadata)?)
}

/// Loads a state, which must be of the training that `record` describes.
pub fn load_state(path: &Path, record: &RunRecord) -> Result<SavedState> {
    let start_over = || hint!["start over with ", Field::Overwrite.on()];
    // Read instead of mapped: the next checkpoint replaces the file.
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let source = WeightSource::from_bytes(path, bytes).map_err(|_| {
        Error::data(format!("the state of the training, `{}`, is damaged or incomplete", path.display()))
            .with_hint(start_over())
    })?;
    let damaged = || {
        Error::data(format!("`{}` is not the state of a training", path.display())).with_hint(start_over())
    };
    let field = |name: &str| source.metadata().get(name).ok_or_else(damaged);
    let saved: RunRecord = serde_json::from_str(field(RECORD)?).map_err(|_| damaged())?;
    let (refused, changes) = record.differences(&saved);
    if let Some(difference) = refused {
        let what = format!("`{}` can't be resumed: {difference}", path.display());
        return Err(Error::data(what)
            .with_hint(hint!["resume with the same model, images and options"].or(start_over())));
    }
    let mut tensors = BTreeMap::new();
    for name in source.names() {
        tensors.insert(name.to_owned(), source.tensor(name)?);
    }
    let numbers: BTreeMap<String, u64> = serde_json::from_str(field(NUMBERS)?).map_err(|_| damaged())?;
    let state = TrainerState {
        step: field(STEP)?.parse().map_err(|_| damaged())?,
        tensors,
        numbers: numbers.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect(),
    };
    Ok(SavedState { state, changes })
}

/// Numbers as their bits: JSON may round them.
fn bits(numbers: &BTreeMap<String, f64>) -> BTreeMap<&str, u64> {
    numbers.iter().map(|(name, number)| (name.as_str(), number.to_bits())).collect()
}

/// A record or numbers as JSON, which can't fail.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_engine::Explain;
    use kiln_tensor::HostTensor;

    fn record() -> RunRecord {
        RunRecord {
            base: "tiny".into(),
            base_fingerprint: "f".into(),
            data: "d".into(),
            batch: 1,
            accumulation: 2,
            settings: TrainSettings::default(),
        }
    }

    fn state() -> TrainerState {
        let values = HostTensor::from_f32([2], vec![0.1, -3.5e-20]).unwrap();
        TrainerState {
            step: 12,
            tensors: BTreeMap::from([("a.lora_A".to_owned(), values)]),
            numbers: BTreeMap::from([("d".to_owned(), 1e-6 / 3.0)]),
        }
    }

    #[test]
    fn a_state_comes_back_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        save_state(&path, &state(), &record()).unwrap();
        let renamed = RunRecord { base: "elsewhere".into(), ..record() };
        let loaded = load_state(&path, &renamed).unwrap();
        assert_eq!(loaded.changes, [""; 0]);
        let (found, expected) = (loaded.state, state());
        assert_eq!((found.step, &found.numbers), (expected.step, &expected.numbers));
        assert_eq!(found.tensors, expected.tensors);
    }

    #[test]
    fn another_training_is_refused_with_the_difference() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        save_state(&path, &state(), &record()).unwrap();
        for (other, expected) in [
            (RunRecord { data: "e".into(), ..record() }, "captions"),
            (RunRecord { base_fingerprint: "g".into(), ..record() }, "base model"),
            (RunRecord { batch: 2, ..record() }, "`batch` was 1 and is 2"),
            (
                RunRecord { settings: TrainSettings { seed: 3, ..record().settings }, ..record() },
                "`seed` was 0",
            ),
        ] {
            let message = load_state(&path, &other).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn the_steps_to_come_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        save_state(&path, &state(), &record()).unwrap();
        let mut other = record();
        other.settings.learning_rate.peak = 0.5;
        other.settings.learning_rate.cosine_steps = Some(90);
        other.settings.bf16 = false;
        let SavedState { state, changes } = load_state(&path, &other).unwrap();
        assert_eq!((state.step, changes.len()), (12, 3), "{changes:?}");
        assert!(changes.contains(&"`learning_rate.peak` was 0.0001 and is 0.5".to_owned()), "{changes:?}");
    }

    #[test]
    fn a_damaged_state_is_told_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        save_state(&path, &state(), &record()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for length in [0, 7, 100, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = load_state(&path, &record()).unwrap_err();
            let what = error.to_string();
            assert!(what.contains("damaged") && what.contains("state.safetensors"), "{length}: {what}");
            assert_eq!(error.hint(), Some(hint!["start over with ", Field::Overwrite.on()]));
        }
    }
}
