//! Describes a model, a weight file or an image.

mod components;
mod image;
mod model;
mod weights;

use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};
use crate::folders::ModelFolders;
use crate::location::ModelLocation;
pub use crate::properties::Description;

/// Describes what is at a path or has this name.
pub fn describe(path: &Path) -> Result<Description> {
    match ModelFolders::from_env().resolve(Some(path)) {
        Ok(model) if model.name().is_some() || model.is_whole_model() => {
            let file = model.path().filter(|path| path.is_file());
            // A name may also lead to a weight file that is not a model.
            return model::describe(&model).or_else(|error| match file {
                Some(file) => weights::describe(file).map_err(|_| error),
                None => Err(error),
            });
        }
        Err(error) if !path.exists() && path.extension().is_none() => return Err(error),
        _ => {}
    }
    if path.is_dir() {
        // A folder of several files may be a model, too.
        return weights::describe(path).or_else(|error| {
            let location = ModelLocation::Path(path.to_path_buf());
            model::describe(&location).map_err(|_| error)
        });
    }
    if is_image(path)? { image::describe(path) } else { weights::describe(path) }
}

/// Returns whether a file is an image, by its first bytes: a checkpoint of many gigabytes must not be read for this.
fn is_image(path: &Path) -> Result<bool> {
    let mut head = Vec::new();
    let read = kiln_base::open_regular(path).and_then(|file| file.take(512).read_to_end(&mut head));
    read.map_err(|e| Error::missing(format!("can't read `{}`: {e}", path.display()), "check the path"))?;
    Ok(!matches!(kiln_image::read_recipe(&head), Err(kiln_image::Error::NotAnImage { .. })))
}
