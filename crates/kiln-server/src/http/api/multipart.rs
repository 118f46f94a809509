//! Multipart forms, as clients of OpenAI's API send them for edits.

use std::convert::Infallible;

use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures_util::stream;
use serde_json::Value;

use super::body::check_values;
use super::error::ApiError;
use super::fields::Fields;

/// Maximum number of fields of a form.
const MAX_FIELDS: usize = 100;

/// A form: its text fields and its files, by name. A name may occur several times.
pub(crate) struct Form {
    texts: Vec<(String, Vec<String>)>,
    pub(crate) files: Vec<(String, Bytes)>,
}

impl Form {
    pub(crate) async fn read(headers: &HeaderMap, bytes: Bytes) -> Result<Form, ApiError> {
        let invalid = |error: multer::Error| ApiError::invalid(format!("invalid form: {error}"));
        let content_type =
            headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let boundary = multer::parse_boundary(content_type).map_err(invalid)?;
        let body = stream::once(async move { Ok::<_, Infallible>(bytes) });
        let mut multipart = multer::Multipart::new(body, boundary);
        let (mut form, mut count) = (Form { texts: Vec::new(), files: Vec::new() }, 0);
        while let Some(field) = multipart.next_field().await.map_err(invalid)? {
            let name = field.name().unwrap_or_default().trim_end_matches("[]").to_owned();
            let is_file = field.file_name().is_some() || name == "image" || name == "mask";
            let content = field.bytes().await.map_err(invalid)?;
            if is_file {
                form.files.push((name, content));
            } else {
                let text = String::from_utf8(content.to_vec())
                    .map_err(|_| ApiError::invalid(format!("form field `{name}` is not valid UTF-8")))?;
                match form.texts.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, texts)) => texts.push(text),
                    None => form.texts.push((name, vec![text])),
                }
            }
            count += 1;
            if count > MAX_FIELDS {
                return Err(ApiError::invalid(format!("the form has more than {MAX_FIELDS} fields")));
            }
        }
        let texts = form.texts.iter().flat_map(|(_, texts)| texts).map(String::as_bytes);
        check_values(&texts.collect::<Vec<_>>())?;
        Ok(form)
    }

    /// The text fields as JSON. A form has no types, so each text is read as the first of these that `fits` the field: a
    /// string, JSON, a list of strings, a list of JSON values (from a repeated field, or separated by commas).
    pub(crate) fn fields(&self, fits: impl Fn(&str, &Value) -> bool) -> Fields {
        let value = |(name, texts): &(String, Vec<String>)| {
            let mut candidates = candidates(texts);
            let fitting = candidates.iter().position(|value| fits(name, value));
            // If none fits, the first one gives the error message.
            (name.clone(), candidates.swap_remove(fitting.unwrap_or(0)))
        };
        self.texts.iter().map(value).collect()
    }
}

/// The ways to read a field's texts as JSON, in the order of [`Form::fields`].
fn candidates(texts: &[String]) -> Vec<Value> {
    let list = |values: Vec<Value>| Value::Array(values);
    let as_texts = list(texts.iter().cloned().map(Value::String).collect());
    let all_json =
        |parts: &mut dyn Iterator<Item = &str>| parts.map(json).collect::<Option<Vec<_>>>().map(list);
    match texts {
        [text] => {
            let mut candidates = vec![Value::String(text.clone())];
            candidates.extend(json(text));
            candidates.push(as_texts);
            candidates.extend(all_json(&mut text.split(',')));
            candidates
        }
        _ => {
            let mut candidates = vec![as_texts];
            candidates.extend(all_json(&mut texts.iter().map(String::as_str)));
            candidates
        }
    }
}

fn json(text: &str) -> Option<Value> {
    match text.trim() {
        // Python's spelling of booleans.
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        text => serde_json::from_str(text).ok(),
    }
}
