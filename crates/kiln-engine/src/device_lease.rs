//! What a training needs and holds of a device that image jobs use, too, and whether that fits.

use kiln_weights::LinearPrecision;

use crate::model::Model;
use crate::residency::work_bytes;
use crate::shared_device::SharedDevice;

/// Bytes for workspaces, VAEs and recorded graphs.
const RESERVE: u64 = 1 << 30;

/// What a training will hold of its device.
#[derive(Clone, Copy, Debug)]
pub struct TrainingNeeds<'a> {
    /// The device, as `--device` takes it.
    pub device: &'a str,
    /// The model that it trains on.
    pub model: &'a Model,
    /// The precision of its weights.
    pub precision: LinearPrecision,
    /// Bytes of the transformer's weights, unless they are shared.
    pub weights: u64,
    /// Bytes that it holds as long as it runs.
    pub state: u64,
    /// Bytes of activations, within a step.
    pub activations: u64,
}

/// What a training holds of a device.
#[derive(Clone, Debug)]
pub struct DeviceLease {
    /// The device, with the training's transformer.
    pub device: SharedDevice,
    /// Bytes of activations that its next step takes.
    pub activations: u64,
}

/// Whether there is room for what is held, and for the larger of two activations that take turns. Memory whose size is
/// unknown has room only on a CPU.
pub(crate) fn fits(held: u64, activations: [u64; 2], free: Option<u64>, is_cpu: bool) -> bool {
    let work = activations.map(work_bytes).into_iter().max().unwrap_or(0);
    let needed = held.saturating_add(work).saturating_add(RESERVE);
    free.map_or(is_cpu, |free| needed <= free)
}

#[cfg(test)]
mod tests {
    use super::fits;

    const GIB: u64 = 1 << 30;

    #[test]
    fn activations_take_turns_and_everything_else_adds_up() {
        // 8 held, 16 of work, 1 in reserve.
        assert!(fits(8 * GIB, [10 * GIB, 3 * GIB], Some(25 * GIB), false));
        assert!(fits(8 * GIB, [3 * GIB, 10 * GIB], Some(25 * GIB), false));
        assert!(!fits(8 * GIB, [10 * GIB, 3 * GIB], Some(25 * GIB - 1), false));
        assert!(!fits(u64::MAX, [0, 0], Some(GIB), false));
    }

    #[test]
    fn unknown_memory_has_room_on_a_cpu_alone() {
        assert!(fits(GIB, [GIB; 2], None, true) && !fits(0, [0; 2], None, false));
    }
}
