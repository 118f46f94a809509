//! Forms with files, as OpenAI's edits send them.

use std::convert::Infallible;

use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures_util::stream;
use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// More fields than any honest form has.
const MOST_FIELDS: usize = 100;

/// A form: its text fields and its files, by name. A name may come several times.
pub(crate) struct Form {
    texts: Vec<(String, Vec<String>)>,
    pub(crate) files: Vec<(String, Bytes)>,
}

impl Form {
    pub(crate) async fn read(headers: &HeaderMap, bytes: Bytes) -> Result<Form, ApiError> {
        let wrong = |error: multer::Error| ApiError::invalid(format!("invalid form: {error}"));
        let content_type =
            headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let boundary = multer::parse_boundary(content_type).map_err(wrong)?;
        let whole = stream::once(async move { Ok::<_, Infallible>(bytes) });
        let mut multipart = multer::Multipart::new(whole, boundary);
        let (mut form, mut count) = (Form { texts: Vec::new(), files: Vec::new() }, 0);
        while let Some(field) = multipart.next_field().await.map_err(wrong)? {
            let name = field.name().unwrap_or_default().trim_end_matches("[]").to_owned();
            let is_file = field.file_name().is_some() || name == "image" || name == "mask";
            let content = field.bytes().await.map_err(wrong)?;
            if is_file {
                form.files.push((name, content));
            } else {
                let text = String::from_utf8(content.to_vec())
                    .map_err(|_| ApiError::invalid(format!("the form's `{name}` is not UTF-8 text")))?;
                match form.texts.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, texts)) => texts.push(text),
                    None => form.texts.push((name, vec![text])),
                }
            }
            count += 1;
            if count > MOST_FIELDS {
                return Err(ApiError::invalid(format!("the form has more than {MOST_FIELDS} fields")));
            }
        }
        Ok(form)
    }

    /// The text fields as JSON. A form has no types: what a text means is what `fits` the field, tried in the order text,
    /// JSON, a list of texts, a list of JSON (from a field that comes several times, or with commas).
    pub(crate) fn fields(&self, fits: impl Fn(&str, &Value) -> bool) -> Fields {
        let value = |(name, texts): &(String, Vec<String>)| {
            let mut meanings = meanings(texts);
            let fitting = meanings.iter().position(|value| fits(name, value));
            // One that fits nowhere is refused as what it looks like.
            (name.clone(), meanings.swap_remove(fitting.unwrap_or(0)))
        };
        self.texts.iter().map(value).collect()
    }
}

fn meanings(texts: &[String]) -> Vec<Value> {
    let list = |values: Vec<Value>| Value::Array(values);
    let as_texts = list(texts.iter().cloned().map(Value::String).collect());
    let all_json =
        |parts: &mut dyn Iterator<Item = &str>| parts.map(json).collect::<Option<Vec<_>>>().map(list);
    match texts {
        [text] => {
            let mut meanings = vec![Value::String(text.clone())];
            meanings.extend(json(text));
            meanings.push(as_texts);
            meanings.extend(all_json(&mut text.split(',')));
            meanings
        }
        _ => {
            let mut meanings = vec![as_texts];
            meanings.extend(all_json(&mut texts.iter().map(String::as_str)));
            meanings
        }
    }
}

fn json(text: &str) -> Option<Value> {
    match text.trim() {
        // Python writes its truth values so.
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        text => serde_json::from_str(text).ok(),
    }
}
