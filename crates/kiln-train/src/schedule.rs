//! The learning rate over the steps.

use crate::LearningRate;

impl LearningRate {
    /// The rate of a step, counted from 1.
    pub fn at(&self, step: u64) -> f32 {
        if step <= self.warmup_steps {
            return self.peak * (step as f32 / self.warmup_steps as f32);
        }
        let Some(end) = self.cosine_steps else { return self.peak };
        let length = end.saturating_sub(self.warmup_steps).max(1);
        let done = ((step - self.warmup_steps - 1) as f64 / length as f64).min(1.0);
        let share = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.peak * (f64::from(self.last) + (1.0 - f64::from(self.last)) * share) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_stays_and_falls() {
        let constant = LearningRate { peak: 2.0, warmup_steps: 4, ..LearningRate::default() };
        assert_eq!([1, 2, 4, 5, 900].map(|step| constant.at(step)), [0.5, 1.0, 2.0, 2.0, 2.0]);
        let cosine = LearningRate { cosine_steps: Some(14), last: 0.1, ..constant };
        assert_eq!(cosine.at(5), 2.0);
        assert!((cosine.at(10) - 1.1).abs() < 1e-6, "{}", cosine.at(10));
        assert!((cosine.at(15) - 0.2).abs() < 1e-6 && (cosine.at(100) - 0.2).abs() < 1e-6);
    }
}
