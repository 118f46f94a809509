//! `kiln bench --report`: what this machine is, whether its kernels compute correctly, and how long they take, in one file
//! to send in.
//!
//! The file holds no name of a user or a host, no path and no prompt.

use std::collections::BTreeMap;
use std::path::Path;

use clap::ValueEnum;
use kiln_engine::machine::{self, Cpu, Memory};
use kiln_engine::{Device, GpuProbe, Isa, probe_gpus};
use serde::Serialize;

use super::conformance::{self, Conformance};
use super::measure;
use super::report::BenchReport;
use crate::args::{BenchArgs, SizeArg};
use crate::error::CliError;
use crate::output;
use crate::values::bytes;

/// Changes when a field changes its meaning.
const FORMAT: &str = "kiln-report-1";

/// Memory for klein 4B: one component at a time, and activations.
pub const KLEIN_4B_BYTES: u64 = 14 << 30;

#[derive(Serialize)]
struct MachineReport {
    format: &'static str,
    kiln: &'static str,
    system: System,
    cpu: Processor,
    /// In bytes.
    memory: Option<MemoryBytes>,
    gpus: Vec<Gpu>,
    cuda: Cuda,
    devices: Vec<DeviceReport>,
}

#[derive(Serialize)]
struct System {
    os: &'static str,
    version: Option<String>,
    architecture: &'static str,
}

#[derive(Serialize)]
struct Processor {
    name: String,
    cores: Option<usize>,
    threads: usize,
    /// Instruction sets that Kiln knows, and whether the CPU has them.
    features: BTreeMap<&'static str, bool>,
    kernels: &'static str,
}

#[derive(Serialize)]
struct MemoryBytes {
    total: u64,
    available: u64,
}

#[derive(Serialize)]
struct Gpu {
    device: String,
    name: String,
    capability: String,
    multiprocessors: u32,
    memory: u64,
}

#[derive(Serialize)]
struct Cuda {
    /// NVIDIA's number, such as 580.65.
    driver: Option<String>,
    /// Versions; null for a library that was not found.
    libraries: BTreeMap<&'static str, Option<String>>,
    /// Which kernels are built in and used.
    kernels: String,
    /// The capability that `--cuda-kernels` named.
    forced: Option<String>,
}

/// What was found out on one device.
#[derive(Serialize)]
struct DeviceReport {
    device: String,
    conformance: Option<Conformance>,
    inference: Option<BenchReport>,
    training: Option<BenchReport>,
    /// What failed, and why.
    problems: Vec<String>,
}

/// Measures the machine and writes `file`. What fails on a device is in the file; the others are measured all the same.
pub fn run(args: &BenchArgs, file: &Path) -> Result<(), CliError> {
    let other_file = |error: CliError| error.hint("choose another file with --report");
    output::check_writable(output::parent_folder(file)).map_err(other_file)?;
    let probe = probe_gpus();
    let devices = match &args.machine.device[..] {
        [] | [Device::Auto] if probe.usable => vec![Device::Cuda(0), Device::Cpu],
        [] | [Device::Auto] => vec![Device::Cpu],
        devices => devices.to_vec(),
    };
    let devices = devices.into_iter().map(|device| device_report(args, device)).collect();
    let report = MachineReport::new(args, &probe, devices);
    let json = serde_json::to_string_pretty(&report).unwrap_or_default() + "\n";
    kiln_base::write_atomic(file, json.as_bytes())
        .map_err(|error| other_file(CliError::new(format!("can't write `{}`: {error}", file.display()))))?;
    let text = if args.json { json } else { report.to_text(args.verbose) };
    output::print(text.as_bytes())
}

/// Checks and measures one device.
fn device_report(args: &BenchArgs, device: Device) -> DeviceReport {
    let mut problems = Vec::new();
    let conformance = args.machine.settings_on(device).and_then(|settings| conformance::check(&settings));
    let conformance = keep(conformance, "conformance", &mut problems);
    let mut args = args.clone();
    args.machine.device = vec![device];
    choose_model(&mut args, device);
    let inference = keep(measure::phases(&args), "inference", &mut problems).flatten();
    args.train = true;
    if device == Device::Cpu {
        // A step takes several times as long as one of inference.
        args.size = args.size.map(|(width, height)| (width.min(256), height.min(256)));
    }
    let training = keep(measure::training(&args), "training", &mut problems);
    let [inference, training] = [inference, training].map(|report| report.map(anonymous));
    DeviceReport { device: name(device), conformance, inference, training, problems }
}

/// Without a model: klein 4B where it fits, else Ember; a GPU at its usual size, the CPU at one that takes minutes at most.
fn choose_model(args: &mut BenchArgs, device: Device) {
    let is_cpu = device == Device::Cpu;
    if args.model.is_none() && args.synthetic.is_none() {
        let gpus = probe_gpus().devices.unwrap_or_default();
        let gpu = gpus.iter().find(|(gpu_name, _)| *gpu_name == name(device)).map(|(_, gpu)| gpu.memory);
        let memory = if is_cpu { machine::memory_limit() } else { gpu };
        if memory.is_some_and(|memory| memory >= KLEIN_4B_BYTES) {
            args.synthetic = Some(SizeArg::Klein4b);
        } else {
            args.model = Some("ember".into());
        }
    }
    let side = match (&args.model, is_cpu) {
        (Some(_), _) => 256,
        (None, true) => 512,
        (None, false) => 1024,
    };
    args.size = args.size.or(Some((side, side)));
    args.repeat = args.repeat.or(Some(if is_cpu { 1 } else { 5 }));
}

fn name(device: Device) -> String {
    device.to_string()
}

/// The result, or a line about the problem.
fn keep<T>(result: Result<T, CliError>, what: &str, problems: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| problems.push(without_paths(&format!("{what}: {}", error.message)))).ok()
}

/// Removes the model's path from a report, and paths from its notes.
fn anonymous(mut report: BenchReport) -> BenchReport {
    if let Some((name, _)) = report.model.split_once(" (`") {
        report.model = name.to_owned();
    }
    report.notes = report.notes.iter().map(|note| without_paths(note)).collect();
    report
}

/// Replaces words that may be paths.
fn without_paths(text: &str) -> String {
    let word = |word: &str| if word.contains(['/', '\\']) { "…".to_owned() } else { word.to_owned() };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

impl MachineReport {
    fn new(args: &BenchArgs, probe: &GpuProbe, devices: Vec<DeviceReport>) -> MachineReport {
        let cpu = Cpu::detect();
        let forced = args.machine.cuda_kernels.and_then(|kernels| kernels.to_possible_value());
        let gpu = |(device, gpu): &(String, kiln_engine::GpuInfo)| Gpu {
            device: device.clone(),
            name: gpu.name.clone(),
            capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
            multiprocessors: gpu.processors,
            memory: gpu.memory,
        };
        MachineReport {
            format: FORMAT,
            kiln: env!("CARGO_PKG_VERSION"),
            system: System {
                os: std::env::consts::OS,
                version: machine::system_version(),
                architecture: std::env::consts::ARCH,
            },
            cpu: Processor {
                name: cpu.name,
                cores: cpu.cores,
                threads: cpu.threads,
                features: cpu.features.into_iter().collect(),
                kernels: Isa::best().name(),
            },
            memory: Memory::detect().map(|m| MemoryBytes { total: m.total, available: m.available }),
            gpus: probe.devices.iter().flatten().map(gpu).collect(),
            cuda: Cuda {
                driver: machine::nvidia_driver(),
                libraries: probe.versions.iter().cloned().collect(),
                kernels: probe.kernels.clone(),
                forced: forced.map(|value| value.get_name().to_owned()),
            },
            devices,
        }
    }

    fn to_text(&self, by_size: bool) -> String {
        let mut out = format!("Kiln {} on {} {}\n", self.kiln, self.system.os, self.system.architecture);
        out += &format!("{}, {} threads, {} kernels\n", self.cpu.name, self.cpu.threads, self.cpu.kernels);
        for Gpu { device, name, capability, memory, .. } in &self.gpus {
            out += &format!("{device}: {name}, compute capability {capability}, {}\n", bytes(*memory));
        }
        for device in &self.devices {
            out += &format!("\n{}\n", device.device);
            if let Some(conformance) = &device.conformance {
                out += &conformance_text(conformance);
            }
            for report in [&device.inference, &device.training].into_iter().flatten() {
                out += &format!("\n{}", report.to_text(by_size));
            }
            for problem in &device.problems {
                out += &format!("problem: {problem}\n");
            }
        }
        out
    }
}

fn conformance_text(conformance: &Conformance) -> String {
    let passed = conformance.checked - conformance.failed;
    let mut out = format!("conformance: {passed} of {} cases passed\n", conformance.checked);
    for case in conformance.cases.iter().filter(|case| !case.passed) {
        let why = match (case.error, &case.problem) {
            (Some(error), _) => format!("error {error:.2e}, at most {:.0e}", case.limit),
            (None, Some(problem)) => problem.clone(),
            (None, None) => "not finite".into(),
        };
        out += &format!("  {} {} {}: {why}\n", case.operation, case.size, case.dtype);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_may_be_paths_are_left_out() {
        assert_eq!(without_paths(r"no `/home/me/a b` in C:\x at all"), r"no … b` in … at all");
    }
}
