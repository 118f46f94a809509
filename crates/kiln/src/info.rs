//! `kiln info`: describes a model, a weight file or an image.

use kiln_catalog::info::describe;

use crate::args::InfoArgs;
use crate::error::CliError;

pub fn run(args: &InfoArgs) -> Result<(), CliError> {
    let description = describe(&args.path)?;
    let properties = &description.properties;
    let text = if args.json { properties.to_json() } else { properties.to_text() };
    crate::output::print(text.as_bytes())?;
    description.problem.map_or(Ok(()), |problem| Err(problem.into()))
}
