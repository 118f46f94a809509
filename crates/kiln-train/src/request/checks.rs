//! Checks of a request's values that need neither the model nor the pictures.

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
            let what = format!("`ranks` needs four numbers, found {ranks}");
            return Err(Error::value("ranks", what).hint(hint));
        }
        match &self.sigmas {
            Some(SigmaLevels::List(levels))
                if levels.iter().any(|level| !(*level > 0.0 && *level <= 1.0)) =>
            {
                Err(Error::value("sigmas", "`sigmas` must be above 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }

    fn check_counts(&self) -> Result<()> {
        let number = |number: Option<u32>| number.map(u64::from);
        let ends = |list: &[u32]| [list.iter().min().copied(), list.iter().max().copied()].map(number);
        let [[smallest, largest], [low, high]] = [ends(&self.resolution), ends(&self.ranks)];
        let counts = [
            ("steps", self.steps, 1, 10_000_000),
            ("batch", number(self.batch), 1, 1024),
            ("accumulate", number(self.accumulate), 1, 1024),
            ("repeats", number(self.repeats), 1, 10_000),
            ("resolution", smallest, 64, 2048),
            ("resolution", largest, 64, 2048),
            ("rank", number(self.rank), 1, 1024),
            ("ranks", low, 1, 1024),
            ("ranks", high, 1, 1024),
            ("factor", number(self.factor), 1, 4096),
            ("save_every", self.save_every, 1, ANY),
            ("sample_steps", number(self.sample_steps), 1, 1000),
        ];
        for (field, count, min, max) in counts {
            let Some(found) = count.filter(|count| !(min..=max).contains(count)) else { continue };
            let range = if max == ANY { format!("at least {min}") } else { format!("from {min} to {max}") };
            return Err(Error::value(field, format!("`{field}` must be {range}, found {found}")));
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<()> {
        let share = |number: f32| (0.0..1.0).contains(&number);
        let positive = |number: f32| number > 0.0 && number.is_finite();
        let not_negative = |number: f32| number >= 0.0 && number.is_finite();
        let [below_one, above_zero, any] = ["from 0, below 1", "above 0", "0 or more"];
        let numbers: [(_, _, fn(f32) -> bool, _); 8] = [
            ("caption_dropout", self.caption_dropout, share, below_one),
            ("reference_dropout", self.reference_dropout, share, below_one),
            ("dropout", self.dropout, share, below_one),
            ("ema", self.ema, share, below_one),
            ("learning_rate", self.learning_rate, positive, above_zero),
            ("alpha", self.alpha, positive, above_zero),
            ("weight_decay", self.weight_decay, not_negative, any),
            ("clip", self.clip, not_negative, any),
        ];
        for (field, number, fits, range) in numbers {
            let Some(found) = number.filter(|number| !fits(*number)) else { continue };
            return Err(Error::value(field, format!("`{field}` must be {range}, found {found}")));
        }
        Ok(())
    }
}
