//! Choosing which weights stay in device memory when not all fit.

use std::cell::Cell;

use kiln_ops::{Backend, Residency};
use kiln_tensor::HostLinear;

/// A plan for which weights stay on the device when not all fit. They are spread evenly among the others, so that streaming
/// those overlaps with computation all the time.
///
/// ```
/// use kiln_nn::ResidencyPlan;
/// use kiln_ops::Residency::{Device, Host};
///
/// let plan = ResidencyPlan::new(40 << 20, 80 << 20);
/// assert_eq!([(); 4].map(|()| plan.next(10 << 20)), [Host, Device, Host, Device]);
/// ```
#[derive(Debug)]
pub struct ResidencyPlan {
    /// Bytes that may stay on the device.
    resident: u64,
    /// Bytes of all weights.
    total: u64,
    /// Bytes of the weights so far.
    seen: Cell<u64>,
    /// Bytes of those that stay on the device.
    placed: Cell<u64>,
}

impl ResidencyPlan {
    /// Smaller weights always stay: streaming them costs more than it saves.
    const MIN_STREAMED: u64 = 1 << 20;

    /// Plans for all weights to stay on the device.
    pub fn all_on_device() -> ResidencyPlan {
        ResidencyPlan::new(0, 0)
    }

    /// Plans for `resident` of `total` bytes to stay on the device.
    pub fn new(resident: u64, total: u64) -> ResidencyPlan {
        ResidencyPlan { resident, total, seen: Cell::new(0), placed: Cell::new(0) }
    }

    /// Whether all weights stay on the device.
    pub fn is_all_on_device(&self) -> bool {
        self.resident >= self.total
    }

    /// Decides where the next weight, of `bytes`, is kept. Call it in the order in which the weights are used.
    pub fn next(&self, bytes: u64) -> Residency {
        self.seen.set(self.seen.get() + bytes);
        let share = u128::from(self.resident) * u128::from(self.seen.get());
        let within = u128::from(self.placed.get() + bytes) * u128::from(self.total) <= share;
        if self.is_all_on_device() || bytes < ResidencyPlan::MIN_STREAMED || within {
            self.placed.set(self.placed.get() + bytes);
            return Residency::Device;
        }
        Residency::Host
    }

    /// Loads a linear layer where the plan keeps it. Call it in the order in which the weights are used.
    pub fn load<B: Backend>(&self, b: &B, layer: HostLinear) -> kiln_ops::Result<B::Weight> {
        let residency = self.next(layer.bytes());
        b.load_weight(layer, residency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Residency::{Device, Host};

    #[test]
    fn resident_weights_are_spread_evenly() {
        let plan = ResidencyPlan::new(40 << 20, 80 << 20);
        let residencies: Vec<Residency> = (0..8).map(|_| plan.next(10 << 20)).collect();
        assert_eq!(residencies, [Host, Device, Host, Device, Host, Device, Host, Device]);
        assert!(plan.placed.get() <= 40 << 20);
    }

    #[test]
    fn small_weights_stay_even_if_no_others_do() {
        for all in [ResidencyPlan::new(5, 5), ResidencyPlan::all_on_device()] {
            assert!((0..10).all(|_| all.next(1 << 30) == Device));
        }
        let none = ResidencyPlan::new(0, 80 << 20);
        assert_eq!([2 << 20, 1000, 8 << 20].map(|bytes| none.next(bytes)), [Host, Device, Host]);
    }
}
