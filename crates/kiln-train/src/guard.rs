//! Watches the loss: smooths it, and stops a training that no longer learns.

use crate::{Error, Result, StepReport};

/// Weight of the past in the smoothed loss.
const DECAY: f64 = 0.97;
/// A smoothed loss of this many times the lowest one means that the training has diverged.
const EXPLODED: f64 = 3.0;
/// Steps before the smoothed loss is judged.
const WARM_UP: u64 = 40;

/// The smoothed loss.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossGuard {
    /// Decayed sum of losses, and of their weights.
    sum: f64,
    weight: f64,
    lowest: Option<f64>,
    steps: u64,
}

impl LossGuard {
    /// Forgets the lowest loss, for a training that continues with other settings after it had diverged: its loss is judged
    /// again after some steps.
    pub fn judge_anew(&mut self) {
        (self.lowest, self.steps) = (None, 0);
    }

    /// Adds a step, and returns the smoothed loss. An error stops the training.
    pub fn add(&mut self, report: &StepReport) -> Result<f32> {
        let stop = |what: String| Err(Error::Diverged { what, saved: None });
        if !report.loss.is_finite() || !report.grad_norm.is_finite() {
            let what = if report.loss.is_finite() { "the gradient" } else { "the loss" };
            return stop(format!("{what} of step {} is not a number", report.step));
        }
        self.sum = self.sum * DECAY + f64::from(report.loss) * (1.0 - DECAY);
        self.weight = self.weight * DECAY + (1.0 - DECAY);
        self.steps += 1;
        let smoothed = self.sum / self.weight;
        if self.steps >= WARM_UP {
            let lowest = self.lowest.unwrap_or(smoothed);
            if smoothed > EXPLODED * lowest {
                return stop(format!(
                    "the loss rises: it is {smoothed:.3} at step {}, and was {lowest:.3}",
                    report.step
                ));
            }
            self.lowest = Some(lowest.min(smoothed));
        }
        Ok(smoothed as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: u64, loss: f32) -> StepReport {
        StepReport { step, loss, grad_norm: 1.0, learning_rate: 1e-4 }
    }

    #[test]
    fn noise_passes_and_an_explosion_stops() {
        let mut guard = LossGuard::default();
        for step in 1..=300 {
            // A tenth of the steps has ten times the loss, as low noise levels have.
            let loss = if step % 10 == 0 { 2.0 } else { 0.2 };
            let smoothed = guard.add(&report(step, loss)).unwrap();
            assert!(step < 40 || (0.3..0.6).contains(&smoothed), "{smoothed}");
        }
        let stopped = (301..400).find_map(|step| guard.add(&report(step, 6.0)).err()).unwrap();
        assert!(stopped.to_string().contains("the loss rises"), "{stopped}");
        // Continued, the high loss gets time to fall.
        guard.judge_anew();
        for step in 330..500 {
            guard.add(&report(step, if step < 335 { 6.0 } else { 0.2 })).unwrap();
        }
    }

    #[test]
    fn nan_stops_at_once() {
        let error = LossGuard::default().add(&report(1, f32::NAN)).unwrap_err().to_string();
        assert_eq!(error, "the loss of step 1 is not a number");
    }
}
