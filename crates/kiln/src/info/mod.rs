//! `kiln info`: what a path or a name holds.

mod model;
mod parts;
mod picture;
mod weights;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::args::InfoArgs;
use crate::failure::Failure;
use crate::models::Found;
use crate::sheet::Sheet;

/// A description, and what keeps it from being whole.
struct Description {
    sheet: Sheet,
    problem: Option<Failure>,
}

pub fn run(args: &InfoArgs) -> Result<(), Failure> {
    let description = describe(&args.path)?;
    let sheet = &description.sheet;
    let text = if args.json { sheet.to_json() } else { sheet.to_lines() };
    crate::print(text.as_bytes())?;
    description.problem.map_or(Ok(()), Err)
}

fn describe(path: &Path) -> Result<Description, Failure> {
    match Found::find(Some(path)) {
        Ok(found @ (Found::BuiltIn | Found::Named { .. })) => return model::describe(&found),
        Err(failure) if !path.exists() && path.extension().is_none() => return Err(failure),
        _ => {}
    }
    let set = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) && path.is_file();
    if set || ["model_index.json", "model.toml", "snapshots"].iter().any(|name| path.join(name).exists()) {
        return model::describe(&Found::Path(path.to_path_buf()));
    }
    if path.is_dir() {
        let hint = crate::hints::not_a_model(path);
        return weights::describe(path).map_err(|failure| failure.hint(hint));
    }
    match is_picture(path)? {
        true => picture::describe(path),
        false if is_packed(path) => model::describe(&Found::Path(path.to_path_buf())),
        false => weights::describe(path),
    }
}

/// By content: the start of the file decides, so that a checkpoint of many gigabytes is not read to find out.
fn is_picture(path: &Path) -> Result<bool, Failure> {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(512).read_to_end(&mut head));
    read.map_err(|e| Failure::new(format!("can't read `{}`: {e}", path.display())).hint("check the path"))?;
    Ok(!matches!(kiln_image::read_recipe(&head), Err(kiln_image::Error::NotAPicture { .. })))
}

/// A whole model in one file has the index in its header.
fn is_packed(path: &Path) -> bool {
    kiln_weights::WeightSource::open(path)
        .is_ok_and(|source| source.metadata().contains_key("model_index.json"))
}
