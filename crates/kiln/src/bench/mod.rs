//! `kiln bench`: measures a model phase by phase, whole images through the engine, requests through a server, and training
//! steps; with `--report`, the whole machine.

mod config;
mod conformance;
pub mod image;
mod machine_report;
mod measure;
pub mod memory;
mod peaks;
mod phases;
pub mod plan;
mod report;
pub mod source;
mod table;
mod train;

pub use machine_report::KLEIN_4B_BYTES;

use crate::args::BenchArgs;
use crate::error::CliError;
use crate::output;

pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    if let Some(file) = &args.report {
        return machine_report::run(args, file);
    }
    let report = if args.train { Some(measure::training(args)?) } else { measure::phases(args)? };
    let Some(report) = report else { return Ok(()) };
    let text = if args.json { report.to_json() } else { report.to_text(args.verbose) };
    output::print(text.as_bytes())
}
