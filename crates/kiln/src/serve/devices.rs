//! The engine's settings for several devices.

use kiln_engine::{Device, Settings};

use crate::args::MachineArgs;
use crate::error::CliError;

/// Returns the engine's settings for the first device, for work beside that of all.
pub fn settings_of_first(machine: &MachineArgs) -> Result<Settings, CliError> {
    machine.settings_on(machine.device.first().copied().unwrap_or_default())
}

/// Returns the engine's settings for each of the devices. Those that are the CPU share its threads.
pub fn settings_of_all(machine: &MachineArgs) -> Result<Vec<Settings>, CliError> {
    if machine.device.len() <= 1 {
        return Ok(vec![machine.settings()?]);
    }
    let cpus = machine.device.iter().filter(|device| **device == Device::Cpu).count().max(1);
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let on = |device: &Device| {
        let settings = machine.settings_on(*device)?;
        let threads = settings.threads.or(Some((all / cpus).max(1)));
        Ok(Settings { threads, ..settings })
    };
    machine.device.iter().map(on).collect()
}
