//! `kiln upscale`: `kiln generate` with an image to enlarge.

use std::path::{Path, PathBuf};

use kiln_engine::{ComponentPaths, Recipe, Request};

use crate::args::{GenerateArgs, UpscaleArgs};

/// The same as arguments of `kiln generate`.
pub(super) fn generate_args(mut args: UpscaleArgs) -> GenerateArgs {
    let output = args.output.take().unwrap_or_else(|| free_name(&args.image, &args.scale));
    args.into_generate(output)
}

/// Returns `fox-2x.png` next to `fox.jpg`, or the next such name that is free.
fn free_name(image: &Path, scale: &str) -> PathBuf {
    let stem = image.file_stem().unwrap_or_default().to_string_lossy();
    let name = |n: usize| match n {
        1 => format!("{stem}-{scale}x.png"),
        n => format!("{stem}-{scale}x-{n}.png"),
    };
    let free = (1..).map(name).find(|name| !image.with_file_name(name).exists());
    // A brace in a name of `-o` is written twice.
    let free = free.unwrap_or_else(|| name(1)).replace('{', "{{").replace('}', "}}");
    image.with_file_name(free)
}

/// Takes prompt and model from the recipe of an image to enlarge, if it has one and the request names none.
pub(super) fn fill_from_recipe(request: &mut Request, components: &mut ComponentPaths) {
    let (Some(_), Some(init)) = (request.upscale, &request.init) else { return };
    // An image that can't be read is reported when it is planned.
    let Ok(recipe) = Recipe::read(&init.path) else { return };
    if request.prompts.is_empty() && request.embeds.is_none() {
        request.prompts = recipe.request.prompts;
        if request.negative_prompts.is_empty() {
            request.negative_prompts = recipe.request.negative_prompts;
        }
    }
    if request.model.is_none() && components.transformer.is_none() {
        recipe.model.overrides.fill_missing(components);
        request.model = Some(recipe.model.path.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_stands_next_to_the_image_and_overwrites_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a {fox}.jpg");
        let first = free_name(&image, "2");
        assert_eq!(first, folder.path().join("a {{fox}}-2x.png"));
        std::fs::write(folder.path().join("b-4x.png"), "").unwrap();
        assert_eq!(free_name(&folder.path().join("b.jpg"), "4"), folder.path().join("b-4x-2.png"));
    }
}
