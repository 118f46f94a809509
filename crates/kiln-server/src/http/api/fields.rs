//! Parses JSON fields with the deserializer of `Request`, so that every API accepts all of its fields.

use kiln_engine::Request;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::ApiError;
use crate::jobs::random::random_seed;

/// A JSON object's fields.
pub(crate) type Fields = Map<String, Value>;

/// Deserializes these fields; an error names the field.
pub(crate) fn parse_fields<T: for<'de> Deserialize<'de>>(fields: &Fields) -> Result<T, ApiError> {
    T::deserialize(fields).map_err(|error| {
        let wrong = fields.iter().find_map(|(name, value)| {
            let error = T::deserialize(&single_field(name, value)).err()?.to_string();
            let named = error.contains(&format!("`{name}`"));
            Some((name, if named { error } else { format!("{name}: {error}") }))
        });
        match wrong {
            Some((name, message)) => {
                ApiError::invalid(format!("invalid request: {message}")).param(name.clone())
            }
            None => ApiError::invalid(format!("invalid request: {error}")),
        }
    })
}

/// Parses these fields as a request. A seed of -1 is a random one.
pub(crate) fn parse_request(fields: &Fields) -> Result<Request, ApiError> {
    let is_random = |seed: &Value| seed.as_i64() == Some(-1);
    let (all, some) = match fields.get("seed") {
        Some(Value::Array(seeds)) => (false, seeds.iter().any(is_random)),
        Some(seed) => (is_random(seed), false),
        None => (false, false),
    };
    if !all && !some {
        return parse_fields(fields);
    }
    let mut fields = fields.clone();
    if all {
        fields.remove("seed");
    } else if let Some(Value::Array(seeds)) = fields.get_mut("seed") {
        for seed in seeds.iter_mut().filter(|seed| is_random(seed)) {
            *seed = random_seed().into();
        }
    }
    parse_fields(&fields)
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
    fn a_seed_of_minus_one_is_random() {
        let seeds = |json: &str| parse_request(&serde_json::from_str(json).unwrap()).unwrap().seed;
        assert!(seeds(r#"{"prompt": "a", "seed": -1}"#).is_empty(), "chosen at submission");
        let list = seeds(r#"{"prompt": "a", "seed": [7, -1]}"#);
        assert!(list.len() == 2 && list[0] == 7 && list[1] <= u32::MAX.into(), "{list:?}");
    }

    #[test]
    fn errors_name_the_field() {
        assert!(
            error(r#"{"prompt": "a", "widht": 16}"#).starts_with("invalid request: unknown field `widht`")
        );
        assert!(error(r#"{"prompt": "a", "seed": -2}"#).starts_with("invalid request: seed: "));
        assert!(error(r#"{"prompt": "a", "rng": "dice"}"#).contains("rng: unknown variant `dice`"));
        assert!(error(r#"{"sigmas": [1, "half"]}"#).contains("sigmas: invalid type: string \"half\""));
        assert!(error(r#"{"prompt": 7}"#).starts_with("invalid request: prompt: "));
    }
}
