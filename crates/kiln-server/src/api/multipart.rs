//! Forms with files, as OpenAI's edits send them.

use std::convert::Infallible;

use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures_util::stream;
use serde_json::{Map, Value};

use super::error::ApiError;

/// More fields than any honest form has.
const MOST_FIELDS: usize = 100;
/// Fields that are numbers, truth values or lists; the rest is text.
const NOT_TEXT: [&str; 13] = [
    "n",
    "seed",
    "steps",
    "guidance",
    "strength",
    "stream",
    "partial_images",
    "output_compression",
    "mask_padding",
    "loras",
    "references",
    "width",
    "height",
];

/// A form: its text fields as JSON, and its files by field name.
pub(crate) struct Form {
    pub(crate) fields: Value,
    pub(crate) files: Vec<(String, Bytes)>,
}

impl Form {
    pub(crate) async fn read(headers: &HeaderMap, bytes: Bytes) -> Result<Form, ApiError> {
        let wrong = |error: multer::Error| ApiError::invalid(format!("the form makes no sense: {error}"));
        let content_type =
            headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let boundary = multer::parse_boundary(content_type).map_err(wrong)?;
        let whole = stream::once(async move { Ok::<_, Infallible>(bytes) });
        let mut form = multer::Multipart::new(whole, boundary);
        let (mut fields, mut files) = (Map::new(), Vec::new());
        while let Some(field) = form.next_field().await.map_err(wrong)? {
            let name = field.name().unwrap_or_default().trim_end_matches("[]").to_owned();
            let is_file = field.file_name().is_some() || name == "image" || name == "mask";
            let content = field.bytes().await.map_err(wrong)?;
            if is_file {
                files.push((name, content));
            } else {
                let text = String::from_utf8(content.to_vec())
                    .map_err(|_| ApiError::invalid(format!("the form's `{name}` is not UTF-8 text")))?;
                fields.insert(name.clone(), value(&name, text)?);
            }
            if fields.len() + files.len() > MOST_FIELDS {
                return Err(ApiError::invalid(format!("the form has more than {MOST_FIELDS} fields")));
            }
        }
        Ok(Form { fields: Value::Object(fields), files })
    }
}

fn value(name: &str, text: String) -> Result<Value, ApiError> {
    if !NOT_TEXT.contains(&name) {
        return Ok(Value::String(text));
    }
    // Python writes its truth values so.
    let json = if name == "stream" { text.trim().to_lowercase() } else { text };
    serde_json::from_str(json.trim()).map_err(|_| {
        ApiError::invalid(format!(
            "the form's `{name}` makes no sense: expected a number, a truth value or a list"
        ))
    })
}
