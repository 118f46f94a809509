//! Fields of A1111's requests that would change the image, and are not offered: a request that uses one is refused.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::http::api::error::ApiError;

/// The fields. Clients send most of them with every request, switched off.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub(super) struct Unsupported {
    /// Not offered: upscale the finished image with `/v1/jobs` instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_hr: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    restore_faces: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    tiling: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    styles: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    script_name: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    alwayson_scripts: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    refiner_checkpoint: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    subseed_strength: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    seed_resize_from_w: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    seed_resize_from_h: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    s_churn: Option<Value>,
    /// Not offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    infotext: Option<Value>,
}

impl Unsupported {
    /// Fails if a field asks for something.
    pub(super) fn refuse(&self) -> Result<(), ApiError> {
        let upscale = "high-resolution fix is not offered; generate the image, then upscale it: \
                       POST /v1/jobs with {\"init\": \"image:ID\", \"upscale\": 2}";
        let fields = [
            ("enable_hr", &self.enable_hr, upscale),
            ("restore_faces", &self.restore_faces, "face restoration is not offered"),
            ("tiling", &self.tiling, "tiling is not offered"),
            ("styles", &self.styles, "styles are not offered; write them into the prompt"),
            ("script_name", &self.script_name, "scripts are not offered"),
            ("alwayson_scripts", &self.alwayson_scripts, "scripts and extensions are not offered"),
            ("refiner_checkpoint", &self.refiner_checkpoint, "refiners are not offered"),
            ("subseed_strength", &self.subseed_strength, "variation seeds are not offered"),
            ("seed_resize_from_w", &self.seed_resize_from_w, "resizing of the seed's noise is not offered"),
            ("seed_resize_from_h", &self.seed_resize_from_h, "resizing of the seed's noise is not offered"),
            ("s_churn", &self.s_churn, "churn is not offered: noise is added once, at the start"),
            ("infotext", &self.infotext, "settings in a text are not offered; send them as fields"),
        ];
        match fields.into_iter().find(|(_, value, _)| value.as_ref().is_some_and(asks)) {
            Some((name, _, message)) => Err(ApiError::invalid(format!("{name}: {message}")).param(name)),
            None => Ok(()),
        }
    }
}

/// Whether a value asks for something: clients switch fields off with false, 0, -1, `None`, and empty texts and lists.
fn asks(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(flag) => *flag,
        Value::Number(number) => number.as_f64().is_some_and(|number| number > 0.0),
        Value::String(text) => !text.is_empty() && !text.eq_ignore_ascii_case("none"),
        Value::Array(values) => values.iter().any(asks),
        Value::Object(fields) => fields.values().any(asks),
    }
}
