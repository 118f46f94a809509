//! `kiln doctor`: the machine's CPU, memory and GPUs, and Kiln's folders.

mod report;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use kiln_catalog::{ModelFolders, user_cache};
use kiln_engine::Isa;
use kiln_engine::machine::{self, Cpu, Memory, slow_cpu};
use kiln_hub::HubSettings;

use crate::args::DoctorArgs;
use crate::error::CliError;
use crate::values::bytes;
use crate::{models, output, preview, settings};
use kiln_catalog::properties::Properties;

pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let machine = machine();
    if let Some(file) = &args.report {
        let file = file.as_deref().unwrap_or(Path::new(report::DEFAULT_FILE));
        return report::write(machine, file, args.json);
    }
    let text = if args.json { machine.to_json() } else { machine.to_text() };
    crate::output::print(text.as_bytes())
}

fn machine() -> Properties {
    let protocol =
        preview::detect().and_then(|protocol| protocol.to_possible_value()).map(|v| v.get_name().to_owned());
    let properties = Properties::default()
        .with("kiln", env!("CARGO_PKG_VERSION"))
        // Set where releases are built.
        .with("commit", option_env!("KILN_COMMIT"))
        .with("system", system())
        .with_group("cpu", cpu());
    let properties = match Memory::detect() {
        Some(memory) => properties.with_group(
            "memory",
            Properties::default().with_amount("total", memory.total, bytes(memory.total)).with_amount(
                "available",
                memory.available,
                bytes(memory.available),
            ),
        ),
        None => properties.with("memory", "unknown"),
    };
    properties
        .with_group("cuda", cuda())
        .with_group("wgpu", wgpu())
        .with_group("folders", folders())
        .with_group("kept", text_cache())
        .with("models", models::folders().names())
        .with("preview", protocol)
}

/// The platform that the program was built for, and the system that it runs on.
fn system() -> String {
    let libc = if cfg!(target_env = "musl") { " musl" } else { "" };
    let version = machine::system_version().map_or(String::new(), |version| format!(" ({version})"));
    format!("{} {}{libc}{version}", std::env::consts::OS, std::env::consts::ARCH)
}

/// Describes the NVIDIA GPUs and CUDA libraries.
fn cuda() -> Properties {
    let gpus = kiln_engine::probe_gpus();
    if !gpus.built_in {
        let why = kiln_base::NO_NVIDIA.unwrap_or("this build has no CUDA backend");
        return Properties::default().with("used", format!("no: {why}"));
    }
    let mut properties = match &gpus.devices {
        None => Properties::default().with("gpus", "unknown: the NVIDIA driver is not loaded"),
        Some(devices) if devices.is_empty() => Properties::default().with("gpus", "none"),
        Some(_) => Properties::default(),
    };
    for (device, gpu) in gpus.devices.iter().flatten() {
        let (major, minor) = gpu.capability;
        let (name, processors, memory) = (&gpu.name, gpu.processors, bytes(gpu.memory));
        let description =
            format!("{name}, compute capability {major}.{minor}, {processors} multiprocessors, {memory}");
        properties = properties.with(device.as_str(), description);
    }
    properties = properties.with("driver", machine::nvidia_driver()).with("kernels", gpus.kernels.as_str());
    for (library, state) in &gpus.libraries {
        properties = properties.with(*library, state.as_str());
    }
    properties.with("used", if gpus.usable { "yes, for models that fit" } else { "no, using the CPU" })
}

/// Describes the adapters of Vulkan, Metal and DirectX.
fn wgpu() -> Properties {
    let properties = Properties::default();
    let Some(adapters) = kiln_engine::probe_adapters() else {
        return properties.with("used", "no: this build has no backend for Vulkan, Metal and DirectX");
    };
    if adapters.is_empty() {
        return properties.with("adapters", "none: no driver was found");
    }
    adapters.iter().fold(properties, |properties, adapter| {
        let lines = [&adapter.description, &adapter.offers, &adapter.used];
        properties.with(adapter.device.as_str(), lines.map(String::as_str).join("; "))
    })
}

fn cpu() -> Properties {
    let cpu = Cpu::detect();
    let with = |present: bool| -> Vec<&str> {
        cpu.features.iter().filter(|(_, has)| *has == present).map(|(name, _)| *name).collect()
    };
    let kernels: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    Properties::default()
        .with("name", &cpu.name)
        .with("cores", cpu.cores)
        .with("threads", cpu.threads)
        .with("has", with(true))
        .with("lacks", with(false))
        .with("kernels", kernels)
        .with("used", Isa::best().name())
        .with("slow", slow_cpu())
}

/// Describes the folders that Kiln writes to.
fn folders() -> Properties {
    let current = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    Properties::default()
        .with("current", folder(&current))
        .with("temporary", folder(&std::env::temp_dir()))
        .with("settings", settings::file().map(|file| settings_file(&file)))
        .with("models", models::folders().paths().iter().map(|path| folder(path)).collect::<Vec<_>>())
        .with("loras", of_server("loras", "KILN_LORAS", "loras"))
        .with("server", of_server("data", "KILN_DATA", "server"))
        .with("downloads", HubSettings::from_env().map(|settings| folder(&settings.cache)))
        .with("cache", user_cache::folder().map(|path| folder(&path)))
}

/// A folder of `kiln serve`, which has this name beside the models unless it is set.
fn of_server(option: &str, variable: &str, name: &str) -> Option<String> {
    let beside = || Some(ModelFolders::own()?.parent()?.join(name));
    settings::serve_folder(option, variable).or_else(beside).map(|path| folder(&path))
}

/// The settings file, and the keys that it sets.
fn settings_file(file: &Path) -> String {
    let keys = settings::read_text(file).and_then(|text| settings::parse(&text, file)).unwrap_or_default();
    let names: Vec<&str> = keys.iter().map(|(key, _)| key.name).collect();
    let state = match names[..] {
        [] if !file.exists() => "not there".to_owned(),
        [] => "nothing set".to_owned(),
        _ => format!("sets {}", names.join(", ")),
    };
    format!("{} ({state})", file.display())
}

/// Describes the cache of encoded texts.
fn text_cache() -> Properties {
    let texts = match user_cache::texts() {
        Ok(Some(texts)) => texts,
        Ok(None) => return Properties::default().with("texts", "no cache folder"),
        Err(error) => return Properties::default().with("problem", error.to_string()),
    };
    let (count, size) = texts.usage();
    Properties::default()
        .with("texts", count)
        .with_amount("bytes", size, bytes(size))
        .with_amount("limit", texts.limit(), bytes(texts.limit()))
        .with("folder", texts.folder())
}

fn folder(path: &Path) -> String {
    // A missing folder is created in its nearest existing ancestor.
    let existing = path.ancestors().find(|p| p.is_dir()).unwrap_or(path);
    let state = match output::check_writable(existing) {
        Ok(()) if existing == path => "writable",
        Ok(()) => "can be created",
        Err(_) => "not writable",
    };
    format!("{} ({state})", path.display())
}
