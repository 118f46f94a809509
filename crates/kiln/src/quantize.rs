//! `kiln quantize`: writes a model folder with one component quantized, or that component as a file.

use kiln_catalog::export::{QuantizeOptions, quantize_model, report_properties};

use crate::args::QuantizeArgs;
use crate::error::CliError;
use crate::export::{ExportProgress, threads};

pub fn run(args: &QuantizeArgs) -> Result<(), CliError> {
    let options = QuantizeOptions {
        to: args.to,
        component: args.component.map(Into::into),
        variant: args.variant,
        threads: threads(args.threads.number),
    };
    let progress = ExportProgress::new(args.quiet);
    let report = quantize_model(&args.model, &args.out, &options, &progress);
    progress.finish();
    let properties = report_properties(&args.out, &report?, Some(args.to.name()));
    let text = if args.json { properties.to_json() } else { properties.to_text() };
    if args.quiet { Ok(()) } else { crate::output::print(text.as_bytes()) }
}
