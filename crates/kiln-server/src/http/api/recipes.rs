//! Recipes inside uploaded images: the request that generates an image again on this server.

use std::path::{Path as FilePath, PathBuf};

use axum::extract::State;
use axum::response::Response;
use kiln_engine::{FileRef, LoraRef, Recipe, Request};
use serde::Serialize;

use super::error::ApiError;
use super::{Caller, Path, reply};
use crate::jobs::error::ErrorCode;
use crate::jobs::intake::Intake;
use crate::jobs::store::INPUT_PREFIX;

/// Why a recipe is not read.
pub(super) const UNREADABLE: &str = "the recipe is damaged or longer than 1 MiB";

/// A recipe as a request to this server.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct RecipeView {
    /// The request, with this server's names of models, LoRAs and input images.
    request: Request,
    /// Its seed, as a string: it may be too large for JavaScript's numbers.
    seed: Option<String>,
    /// What the recipe names and this server does not have; the request is without it.
    missing: Vec<String>,
}

/// Returns the recipe inside an uploaded image, as a request.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/inputs/{id}/recipe", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "The recipe", body = RecipeView),
    (status = "4XX", description = "No such image, or it has no recipe", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn of_input(
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    reply(move || {
        let path = intake.input_path(&id, &caller)?.ok_or_else(|| ApiError::not_found("input", &id))?;
        let bytes = std::fs::read(path).map_err(|_| ApiError::not_found("input", &id))?;
        let text = match kiln_image::read_recipe(&bytes) {
            Err(kiln_image::Error::Text { .. }) => return Err(ApiError::invalid(UNREADABLE)),
            text => text.ok().flatten(),
        };
        let text = text.ok_or_else(|| ApiError::new(ErrorCode::NoRecipe, "the image has no recipe"))?;
        let recipe = Recipe::parse(&text).map_err(|error| ApiError::invalid(error.to_string()))?;
        translate(&intake, &recipe, &caller)
    })
    .await
}

fn translate(intake: &Intake, recipe: &Recipe, caller: &Caller) -> Result<RecipeView, ApiError> {
    let mut missing = Vec::new();
    let (limits, named) = (&intake.config.limits, &recipe.request);
    if named.images().count() > limits.references || named.loras.len() > limits.loras {
        return Err(ApiError::invalid("the recipe names more images or LoRAs than a request may"));
    }
    let mut prompts = named.prompts.iter().chain(&named.negative_prompts).chain(&named.original_prompts);
    if let Some(prompt) = prompts.find(|prompt| prompt.len() > limits.prompt) {
        let (length, limit) = (prompt.len(), limits.prompt);
        return Err(ApiError::invalid(format!(
            "the recipe has a prompt of {length} bytes; the limit is {limit}"
        )));
    }
    let hashes: Vec<Option<String>> = recipe.request.images().map(|file| file.sha256.clone()).collect();
    let request = recipe.request(&Request::default());
    let mut request = request.map_err(|error| ApiError::invalid(error.to_string()))?;
    let models: Vec<String> = intake.catalogue.models().into_iter().map(|model| model.name).collect();
    request.model = known(FilePath::new(&recipe.model.path), &models, &mut missing).map(PathBuf::from);
    let loras = intake.catalogue.loras();
    request.loras = std::mem::take(&mut request.loras)
        .into_iter()
        .filter_map(|lora| {
            let path = known(&lora.path, &loras, &mut missing)?.into();
            Some(LoraRef { path, sha256: None, ..lora })
        })
        .collect();
    let vaes = intake.catalogue.vaes();
    request.vae = request.vae.take().and_then(|vae| Some(known(&vae.path, &vaes, &mut missing)?.into()));
    // An image that the recipe names is here only if it was uploaded here: its name is its hash.
    for (file, hash) in request.images_mut().zip(hashes) {
        let input = hash.map(|hash| format!("{INPUT_PREFIX}{hash}"));
        let input = input.filter(|input| intake.input_path(input, caller).is_ok_and(|path| path.is_some()));
        if input.is_none() {
            missing.push(file_name(&file.path));
        }
        *file = FileRef::from(input.unwrap_or_default());
    }
    request.references.retain(|file| !file.path.as_os_str().is_empty());
    request.init = request.init.take().filter(|file| !file.path.as_os_str().is_empty());
    request.mask =
        request.mask.take().filter(|file| !file.path.as_os_str().is_empty() && request.init.is_some());
    if request.init.is_none() {
        request.strength = None;
    }
    // These name files of the machine that generated the image.
    (request.embeds, request.noise) = (None, None);
    let seed = request.seed.first().map(u64::to_string);
    Ok(RecipeView { request, seed, missing })
}

/// This server's name for a model or LoRA that a recipe names by name or path.
fn known(path: &FilePath, names: &[String], missing: &mut Vec<String>) -> Option<String> {
    let (whole, file) = (path.to_string_lossy(), file_name(path));
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let found = [&*whole, file.as_str(), stem.as_str()]
        .iter()
        .find_map(|name| names.iter().find(|n| n == name))
        .cloned();
    if found.is_none() {
        missing.push(file);
    }
    found
}

/// The name of a file, of a length that can be shown.
fn file_name(path: &FilePath) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().chars().take(100).collect()
}
