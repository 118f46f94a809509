//! Checks of a request's values that need neither the model nor the images.

use kiln_engine::{Field, text};

use super::{SigmaLevels, TrainRequest};
use crate::{Error, Result};

/// No limit of its own.
const ANY: u64 = u64::MAX;

impl TrainRequest {
    /// Checks the values.
    pub fn check(&self) -> Result<()> {
        self.check_counts()?;
        self.check_numbers()?;
        let ranks = self.ranks.len();
        if ranks != 0 && ranks != 4 {
            let hint =
                "double blocks' attention, their MLPs, single blocks' input, their output: 128,64,64,32";
            let what = text![Field::Ranks, format!(" needs four numbers, found {ranks}")];
            return Err(Error::value(what).with_hint(hint));
        }
        match &self.sigmas {
            Some(SigmaLevels::List(levels))
                if levels.iter().any(|level| !(*level > 0.0 && *level <= 1.0)) =>
            {
                Err(Error::value(text![Field::Sigmas, " must be above 0 and at most 1"]))
            }
            _ => Ok(()),
        }
    }

    /// Fields about files of the machine, which clients of a server can't set.
    pub const LOCAL_FIELDS: [&str; 5] = ["data", "cache_dir", "resume", "overwrite", "tensorboard"];

    /// The first of [`TrainRequest::LOCAL_FIELDS`] that is given.
    pub fn local_field(&self) -> Option<&'static str> {
        // What is not given is not written.
        let written = serde_json::to_value(self).ok()?;
        TrainRequest::LOCAL_FIELDS.into_iter().find(|field| written.get(field).is_some())
    }

    fn check_counts(&self) -> Result<()> {
        let number = |number: Option<u32>| number.map(u64::from);
        let ends = |list: &[u32]| [list.iter().min().copied(), list.iter().max().copied()].map(number);
        let [[smallest, largest], [low, high]] = [ends(&self.resolution), ends(&self.ranks)];
        let counts = [
            (Field::Steps, self.steps, 1, 10_000_000),
            (Field::Batch, number(self.batch), 1, 1024),
            (Field::Accumulate, number(self.accumulate), 1, 1024),
            (Field::Repeats, number(self.repeats), 1, 10_000),
            (Field::Resolution, smallest, 64, 2048),
            (Field::Resolution, largest, 64, 2048),
            (Field::Rank, number(self.rank), 1, 1024),
            (Field::Ranks, low, 1, 1024),
            (Field::Ranks, high, 1, 1024),
            (Field::Factor, number(self.factor), 1, 4096),
            (Field::SaveEvery, self.save_every, 1, ANY),
            (Field::SampleSteps, number(self.sample_steps), 1, 1000),
        ];
        for (field, count, min, max) in counts {
            let Some(found) = count.filter(|count| !(min..=max).contains(count)) else { continue };
            let range = if max == ANY { format!("at least {min}") } else { format!("from {min} to {max}") };
            return Err(Error::value(text![field, format!(" must be {range}, found {found}")]));
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<()> {
        let share = |number: f32| (0.0..1.0).contains(&number);
        let positive = |number: f32| number > 0.0 && number.is_finite();
        let not_negative = |number: f32| number >= 0.0 && number.is_finite();
        let [below_one, above_zero, any] = ["from 0, below 1", "above 0", "0 or more"];
        let wrong = |number: Option<f32>, fits: fn(f32) -> bool| number.filter(|number| !fits(*number));
        let numbers = [
            (Field::CaptionDropout, wrong(self.caption_dropout, share), below_one),
            (Field::ReferenceDropout, wrong(self.reference_dropout, share), below_one),
            (Field::Dropout, wrong(self.dropout, share), below_one),
            (Field::Ema, wrong(self.ema, share), below_one),
            (Field::LearningRate, wrong(self.learning_rate, positive), above_zero),
            (Field::Alpha, wrong(self.alpha, positive), above_zero),
            (Field::WeightDecay, wrong(self.weight_decay, not_negative), any),
            (Field::Clip, wrong(self.clip, not_negative), any),
        ];
        if let Some((field, Some(found), range)) = numbers.into_iter().find(|(_, wrong, _)| wrong.is_some()) {
            return Err(Error::value(text![field, format!(" must be {range}, found {found}")]));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused_by_their_field() {
        let request = |json: &str| serde_json::from_str::<TrainRequest>(json).unwrap();
        for (json, words) in [
            (r#"{"steps": 0}"#, "`steps` must be from 1 to 10000000, found 0"),
            (r#"{"save_every": 0}"#, "`save_every` must be at least 1, found 0"),
            (r#"{"resolution": [512, 32]}"#, "`resolution` must be from 64 to 2048, found 32"),
            (r#"{"ranks": [1, 2, 3]}"#, "`ranks` needs four numbers, found 3"),
            (r#"{"ema": 1}"#, "`ema` must be from 0, below 1, found 1"),
            (r#"{"learning_rate": 1e99}"#, "`learning_rate` must be above 0, found inf"),
            (r#"{"clip": -1}"#, "`clip` must be 0 or more, found -1"),
            (r#"{"sigmas": [0.5, 0]}"#, "`sigmas` must be above 0 and at most 1"),
        ] {
            assert_eq!(request(json).check().unwrap_err().to_string(), words);
        }
        assert!(
            request(r#"{"steps": 1, "sample_every": 0, "clip": 0, "ranks": [1, 2, 3, 4]}"#).check().is_ok()
        );
    }

    #[test]
    fn fields_about_files_of_the_machine_are_told_apart() {
        let local = |json: &str| serde_json::from_str::<TrainRequest>(json).unwrap().local_field();
        assert_eq!(local(r#"{"name": "me", "model": "a", "resume": false}"#), None);
        assert_eq!(local(r#"{"name": "me", "cache_dir": "/x"}"#), Some("cache_dir"));
        assert_eq!(local(r#"{"overwrite": true}"#), Some("overwrite"));
    }
}
