//! `kiln doctor`: what this machine offers.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use kiln_engine::Isa;
use kiln_engine::machine::{Cpu, Memory};

use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::sheet::Sheet;
use crate::values::bytes;
use crate::{cache, models, output, preview};

pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let report = report();
    let text = if args.json { report.to_json() } else { report.to_lines() };
    crate::print(text.as_bytes())
}

fn report() -> Sheet {
    let terminal = preview::guess().to_possible_value().map(|v| v.get_name().to_owned());
    let sheet = Sheet::default()
        .with("kiln", env!("CARGO_PKG_VERSION"))
        .with("system", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH))
        .with_sheet("cpu", cpu());
    let sheet = match Memory::now() {
        Some(memory) => sheet.with_sheet(
            "memory",
            Sheet::default().with_amount("total", memory.total, bytes(memory.total)).with_amount(
                "available",
                memory.available,
                bytes(memory.available),
            ),
        ),
        None => sheet.with("memory", "unknown"),
    };
    sheet
        .with_sheet("cuda", cuda())
        .with_sheet("folders", folders())
        .with_sheet("kept", kept())
        .with("models", models::known(&models::folders()))
        .with("preview", terminal)
}

/// NVIDIA GPUs and the libraries to use them with.
fn cuda() -> Sheet {
    let gpus = kiln_engine::gpus();
    if !gpus.built_in {
        return Sheet::default().with("used", "no CUDA backend in this build: images are made on the CPU");
    }
    let mut sheet = match &gpus.devices {
        None => Sheet::default().with("gpus", "none that can be seen without a driver"),
        Some(devices) if devices.is_empty() => Sheet::default().with("gpus", "none"),
        Some(_) => Sheet::default(),
    };
    for (device, gpu) in gpus.devices.iter().flatten() {
        let (major, minor) = gpu.capability;
        let (name, processors, memory) = (&gpu.name, gpu.processors, bytes(gpu.memory));
        let about =
            format!("{name}, compute capability {major}.{minor}, {processors} multiprocessors, {memory}");
        sheet = sheet.with(device.as_str(), about);
    }
    for (library, state) in &gpus.libraries {
        sheet = sheet.with(*library, state.as_str());
    }
    sheet
        .with("used", if gpus.usable { "yes, for models that fit" } else { "no: images are made on the CPU" })
}

fn cpu() -> Sheet {
    let cpu = Cpu::now();
    let with = |present: bool| -> Vec<&str> {
        cpu.features.iter().filter(|(_, has)| *has == present).map(|(name, _)| *name).collect()
    };
    let kernels: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    Sheet::default()
        .with("name", &cpu.name)
        .with("cores", cpu.cores)
        .with("threads", cpu.threads)
        .with("has", with(true))
        .with("lacks", with(false))
        .with("kernels", kernels)
        .with("used", Isa::best().name())
}

/// Where Kiln may have to write.
fn folders() -> Sheet {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    Sheet::default()
        .with("current", folder(&here))
        .with("temporary", folder(&std::env::temp_dir()))
        .with("settings", config_folder().map(|path| folder(&path)))
        .with("models", models::folders().iter().map(|path| folder(path)).collect::<Vec<_>>())
        .with("cache", cache::folder().map(|path| folder(&path)))
}

/// What is kept of earlier runs.
fn kept() -> Sheet {
    let Some(texts) = cache::texts() else { return Sheet::default().with("texts", "nowhere to keep them") };
    let (count, size) = texts.usage();
    Sheet::default()
        .with("texts", count)
        .with_amount("bytes", size, bytes(size))
        .with_amount("limit", texts.limit(), bytes(texts.limit()))
        .with("folder", texts.folder())
}

fn folder(path: &Path) -> String {
    // Of a folder that is not there yet, the nearest one above decides.
    let existing = path.ancestors().find(|p| p.is_dir()).unwrap_or(path);
    let state = match output::writable(existing) {
        Ok(()) if existing == path => "writable",
        Ok(()) => "can be made",
        Err(_) => "not writable",
    };
    format!("{} ({state})", path.display())
}

/// Where programs of this system keep their settings.
fn config_folder() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = match std::env::consts::OS {
        "windows" => var("APPDATA"),
        "macos" => var("HOME").map(|home| home.join("Library/Application Support")),
        _ => var("XDG_CONFIG_HOME").or_else(|| Some(var("HOME")?.join(".config"))),
    };
    base.map(|base| base.join("kiln"))
}
