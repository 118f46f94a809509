//! Parses JSON fields with the deserializer of `Request`, so that every API accepts all of its fields.

use kiln_engine::Request;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::ApiError;

/// A JSON object's fields.
pub(crate) type Fields = Map<String, Value>;

/// Deserializes these fields; an error names the field.
pub(crate) fn parse_fields<T: for<'de> Deserialize<'de>>(fields: &Fields) -> Result<T, ApiError> {
    T::deserialize(fields).map_err(|error| {
        let message = fields.iter().find_map(|(name, value)| {
            let error = T::deserialize(&single_field(name, value)).err()?.to_string();
            let named = error.contains(&format!("`{name}`"));
            Some(if named { error } else { format!("{name}: {error}") })
        });
        ApiError::invalid(format!("invalid request: {}", message.unwrap_or_else(|| error.to_string())))
    })
}

/// Parses these fields as a request.
pub(crate) fn parse_request(fields: &Fields) -> Result<Request, ApiError> {
    parse_fields(fields)
}

/// An object with one field.
pub(crate) fn single_field(name: &str, value: &Value) -> Fields {
    Fields::from_iter([(name.to_owned(), value.clone())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(json: &str) -> String {
        let fields = serde_json::from_str(json).unwrap();
        parse_request(&fields).unwrap_err().body().error.message
    }

    #[test]
    fn errors_name_the_field() {
        assert!(
            error(r#"{"prompt": "a", "widht": 16}"#).starts_with("invalid request: unknown field `widht`")
        );
        assert!(error(r#"{"prompt": "a", "seed": -1}"#).starts_with("invalid request: seed: "));
        assert!(error(r#"{"prompt": "a", "rng": "dice"}"#).contains("rng: unknown variant `dice`"));
        assert!(error(r#"{"sigmas": [1, "half"]}"#).contains("sigmas: invalid type: string \"half\""));
        assert!(error(r#"{"prompt": 7}"#).starts_with("invalid request: prompt: "));
    }
}
