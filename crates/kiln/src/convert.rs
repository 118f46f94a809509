//! `kiln convert`: writes a component of a model with other tensor names, another data type, or in another file format.

use kiln_catalog::export::{ConvertOptions, OutKind, SourceComponent, report_properties};
use kiln_tensor::DType;
use kiln_weights::export::{Storage, TensorNames};

use crate::args::{ConvertArgs, FloatTypeArg, NamingArg};
use crate::error::CliError;
use crate::export::{ExportProgress, threads};
use crate::terminal;

pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    if OutKind::check(&args.out)? != OutKind::Folder && args.shard_size.is_some() {
        return Err(
            CliError::usage("--shard-size needs a folder, OUT is a file").hint("give a folder as OUT")
        );
    }
    let component = SourceComponent::open(&args.input, args.component.map(Into::into), args.variant)?;
    let storage = match args.dtype {
        None => Storage::Keep,
        Some(FloatTypeArg::F32) => Storage::Dense(DType::F32),
        Some(FloatTypeArg::Bf16) => Storage::Dense(DType::BF16),
        Some(FloatTypeArg::F16) => Storage::Dense(DType::F16),
    };
    let names = args.names.map(|names| match names {
        NamingArg::Diffusers => TensorNames::Diffusers,
        NamingArg::Original => TensorNames::Original,
    });
    let threads = threads(args.threads.number);
    let options = ConvertOptions { names, storage, threads, shard_size: args.shard_size };
    let progress = ExportProgress::new(args.quiet);
    let report = component.write(&args.out, &options, &progress);
    progress.finish();
    let report = report?;
    if !args.quiet && report.changed.contains_key(&("nvfp4", "f32")) {
        terminal::tell(
            "note: q, k and v of some layers have unlike scales in nvfp4, so that the layers that fuse them are f32; \
             --names diffusers keeps them apart",
        );
    }
    let properties = report_properties(&args.out, &report, None);
    let text = if args.json { properties.to_json() } else { properties.to_text() };
    if args.quiet { Ok(()) } else { crate::output::print(text.as_bytes()) }
}
