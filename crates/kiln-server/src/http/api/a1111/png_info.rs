//! What an image file says about how it was generated.

use axum::response::Response;
use kiln_engine::Recipe;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::http::api::body::Json;
use crate::http::api::error::ApiError;
use crate::http::api::reply;
use crate::jobs::error::JobError;
use crate::jobs::input_images::decode;

/// An image file.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct PngInfo {
    /// The file as base64 or a data URL.
    image: String,
}

/// What an image file says about itself.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct PngInfoResponse {
    /// A1111's description: prompt, negative prompt, settings; empty if there is none.
    info: String,
    /// The texts in the file.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    items: Map<String, Value>,
    /// The settings of the description, by name.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    parameters: Map<String, Value>,
}

/// Returns the description in an image file, of this server or of A1111.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/png-info", tag = "a1111", request_body = PngInfo, responses((status = 200, body = PngInfoResponse))))]
pub(crate) async fn png_info(Json(body, permit): Json<PngInfo>) -> Result<Response, ApiError> {
    reply(move || {
        let bytes = decode(&body.image, "image")?;
        drop(permit);
        let text = kiln_image::read_parameters(&bytes).map_err(JobError::from)?;
        let recipe = kiln_image::read_recipe(&bytes).map_err(JobError::from)?;
        let info = text.or_else(|| Some(Recipe::parse(recipe.as_deref()?).ok()?.parameters()));
        let mut items = Map::new();
        items.extend(info.clone().map(|info| ("parameters".to_owned(), info.into())));
        items.extend(recipe.map(|recipe| ("kiln".to_owned(), recipe.into())));
        let parameters = info.as_deref().map(parse).unwrap_or_default();
        Ok(PngInfoResponse { info: info.unwrap_or_default(), items, parameters })
    })
    .await
}

/// The parts of a description: the prompts, and the settings in its last line.
fn parse(text: &str) -> Map<String, Value> {
    const NEGATIVE: &str = "Negative prompt: ";
    let (text, settings) = match text.rsplit_once('\n') {
        Some((text, settings)) if settings.contains(": ") && !settings.starts_with(NEGATIVE) => {
            (text, settings)
        }
        _ => (text, ""),
    };
    let (prompt, negative) = text.split_once(&format!("\n{NEGATIVE}")).unwrap_or((text, ""));
    let mut parameters = Map::new();
    parameters.insert("Prompt".into(), prompt.into());
    parameters.insert("Negative prompt".into(), negative.into());
    let pairs = settings.split(", ").filter_map(|pair| pair.split_once(": "));
    parameters.extend(pairs.map(|(name, value)| (name.to_owned(), value.into())));
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_split_into_prompts_and_settings() {
        let parts = parse("a fox\nin snow\nNegative prompt: rain\nSteps: 4, Sampler: Euler, Size: 64x96");
        assert_eq!((&parts["Prompt"], &parts["Negative prompt"]), (&"a fox\nin snow".into(), &"rain".into()));
        assert_eq!((&parts["Steps"], &parts["Size"]), (&"4".into(), &"64x96".into()));
        assert_eq!(parse("only words")["Prompt"], "only words");
    }
}
