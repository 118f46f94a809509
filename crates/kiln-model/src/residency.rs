use std::cell::Cell;

use kiln_ops::Residency;
use kiln_tensor::LinearParts;

/// Which of a model's weights stay on the device when not all can. They are spread evenly, so that the copies of the others
/// go on all the time.
///
/// ```
/// use kiln_model::ResidencyPlan;
/// use kiln_ops::Residency::{Device, Host};
///
/// let plan = ResidencyPlan::new(40 << 20, 80 << 20);
/// assert_eq!([(); 4].map(|()| plan.next(10 << 20)), [Host, Device, Host, Device]);
/// ```
#[derive(Debug)]
pub struct ResidencyPlan {
    stay: u64,
    of: u64,
    seen: Cell<u64>,
    stayed: Cell<u64>,
}

impl ResidencyPlan {
    /// Weights below that are not worth their copies.
    const SMALL: u64 = 1 << 20;

    /// Everything stays.
    pub fn whole() -> ResidencyPlan {
        ResidencyPlan::new(0, 0)
    }

    /// `stay` bytes of `of` stay.
    pub fn new(stay: u64, of: u64) -> ResidencyPlan {
        ResidencyPlan { stay, of, seen: Cell::new(0), stayed: Cell::new(0) }
    }

    /// Where the next weight lies, which has so many bytes. The order of the calls is the order in which weights are used.
    pub fn next(&self, bytes: u64) -> Residency {
        self.seen.set(self.seen.get() + bytes);
        let share = u128::from(self.stay) * u128::from(self.seen.get());
        let within = u128::from(self.stayed.get() + bytes) * u128::from(self.of) <= share;
        if self.stay >= self.of || bytes < ResidencyPlan::SMALL || within {
            self.stayed.set(self.stayed.get() + bytes);
            return Residency::Device;
        }
        Residency::Host
    }

    /// Where the weight of a linear layer lies.
    pub(crate) fn place(&self, parts: &LinearParts) -> Residency {
        self.next(parts.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Residency::{Device, Host};

    #[test]
    fn half_of_the_weights_stay_and_they_are_spread() {
        let plan = ResidencyPlan::new(40 << 20, 80 << 20);
        let places: Vec<Residency> = (0..8).map(|_| plan.next(10 << 20)).collect();
        assert_eq!(places, [Host, Device, Host, Device, Host, Device, Host, Device]);
        assert!(plan.stayed.get() <= 40 << 20);
    }

    #[test]
    fn all_stay_or_none_but_the_small_ones() {
        for all in [ResidencyPlan::new(5, 5), ResidencyPlan::whole()] {
            assert!((0..10).all(|_| all.next(1 << 30) == Device));
        }
        let none = ResidencyPlan::new(0, 80 << 20);
        assert_eq!([2 << 20, 1000, 8 << 20].map(|bytes| none.next(bytes)), [Host, Device, Host]);
    }
}
