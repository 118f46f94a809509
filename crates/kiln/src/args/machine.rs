//! Arguments about the machine, shared by the commands that compute.

use clap::{Args, ValueEnum};

use kiln_engine::{Device, Isa, Precision, Settings};

use crate::error::CliError;
use crate::settings::UserSettings;

/// More than any machine has: a typo must not start a hundred thousand threads.
pub const MAX_THREADS: i64 = Settings::MAX_THREADS as i64;

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Device: auto, cpu, cuda or cuda:N; auto is a GPU with enough memory for the model, else the CPU; in `bench` it
    /// is the CPU. `serve` and `worker` take several, such as cuda:0,cuda:1, and generate on all of them [default: auto]
    #[arg(long, value_name = "DEVICE", value_parser = Device::parse, value_delimiter = ',')]
    pub device: Vec<Device>,

    /// Limit for GPU memory, such as 6G; weights that don't fit are streamed as they are used
    #[arg(long, value_name = "SIZE", value_parser = crate::values::parse_bytes)]
    pub vram_limit: Option<u64>,

    /// Data type to compute in [default: auto]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Precision>,

    #[command(flatten)]
    pub threads: ThreadArgs,

    /// CPU instruction set to use [default: the best available]
    #[arg(long, value_name = "SET")]
    pub cpu_isa: Option<IsaArg>,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ThreadArgs {
    /// Number of CPU threads [default: all the machine has]
    #[arg(
        long = "threads", value_name = "N", help_heading = "Machine", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_THREADS)
    )]
    pub number: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Portable,
    Neon,
    Avx2,
    Avx512,
    Amx,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Isa {
        match arg {
            IsaArg::Portable => Isa::Portable,
            IsaArg::Neon => Isa::Neon,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Amx => Isa::Amx,
        }
    }
}

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

    /// Returns the engine's settings for the first device, for work beside that of all.
    #[cfg(feature = "serve")]
    pub fn settings_of_first(&self) -> Result<Settings, CliError> {
        self.settings_on(self.device.first().copied().unwrap_or_default())
    }

    /// Returns the engine's settings for each of the devices. Those that are the CPU share its threads.
    #[cfg(feature = "serve")]
    pub fn settings_of_all(&self) -> Result<Vec<Settings>, CliError> {
        if self.device.len() <= 1 {
            return Ok(vec![self.settings()?]);
        }
        let cpus = self.device.iter().filter(|device| **device == Device::Cpu).count().max(1);
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let on = |device: &Device| {
            let settings = self.settings_on(*device)?;
            let threads = settings.threads.or(Some((all / cpus).max(1)));
            Ok(Settings { threads, ..settings })
        };
        self.device.iter().map(on).collect()
    }

    fn settings_on(&self, device: Device) -> Result<Settings, CliError> {
        if device != Device::Cpu {
            check_cuda_path()?;
        }
        Ok(Settings {
            device,
            vram_limit: self.vram_limit,
            precision: self.dtype.unwrap_or_default(),
            threads: self.threads.number.map(|n| n as usize),
            isa: self.cpu_isa.map(Into::into),
            kernel_cache: crate::cache::folder().map(|folder| folder.join("cuda")),
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
