//! The engine's settings: what the options about the machine say, and the user's settings where they say nothing.

use kiln_catalog::user_cache;
use kiln_engine::{Device, Settings};

use super::UserSettings;
use crate::args::MachineArgs;
use crate::error::CliError;

impl MachineArgs {
    /// Fills in what no option gives from the user's settings.
    pub fn fill_missing(&mut self, settings: &UserSettings) {
        if self.device.is_empty() {
            self.device.extend(settings.device);
        }
        self.dtype = self.dtype.or(settings.dtype);
        self.threads.number = self.threads.number.or(settings.threads);
        self.vram_limit = self.vram_limit.or(settings.vram_limit);
    }

    /// Returns the engine's settings. Refuses a `KILN_CUDA_PATH` that names no folder, unless only the CPU is used.
    pub fn settings(&self) -> Result<Settings, CliError> {
        match &self.device[..] {
            [] => self.settings_on(Device::default()),
            [device] => self.settings_on(*device),
            several => Err(CliError::usage(format!("this command uses one device, found {}", several.len()))
                .hint("`kiln serve` and `kiln worker` generate on several")),
        }
    }

    /// Returns the engine's settings for one of the devices.
    pub fn settings_on(&self, device: Device) -> Result<Settings, CliError> {
        if device != Device::Cpu {
            check_cuda_path()?;
        }
        Ok(Settings {
            device,
            vram_limit: self.vram_limit,
            precision: self.dtype.unwrap_or_default(),
            threads: self.threads.number.map(|n| n as usize),
            isa: self.cpu_isa.map(Into::into),
            cuda_kernels: self.cuda_kernels,
            kernel_cache: user_cache::folder().map(|folder| folder.join("cuda")),
            ..Settings::default()
        })
    }
}

fn check_cuda_path() -> Result<(), CliError> {
    const NAME: &str = "KILN_CUDA_PATH";
    let value = std::env::var_os(NAME).unwrap_or_default();
    let mut folders = std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty());
    match folders.find(|path| !path.is_dir()) {
        Some(path) => Err(CliError::usage(format!(
            "the variable {NAME} names `{}`, which is not a folder",
            path.display()
        ))
        .hint("set it to the folder with CUDA's libraries, or unset it")),
        None => Ok(()),
    }
}
