//! The fields of a structure as JSON, for programs that describe them at run time.

use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Returns the fields of `T` by name, each a schema without references: `type`, `description`, and where they apply
/// `enum`, `minimum`, `maximum`.
pub fn json_fields<T: ToSchema>() -> Map<String, Value> {
    let mut schemas = Vec::new();
    T::schemas(&mut schemas);
    let named: Map<String, Value> = schemas
        .into_iter()
        .map(|(name, schema)| (name, serde_json::to_value(schema).unwrap_or_default()))
        .collect();
    let mut own = serde_json::to_value(T::schema()).unwrap_or_default();
    let Some(Value::Object(fields)) = own.get_mut("properties").map(Value::take) else { return Map::new() };
    fields.into_iter().map(|(name, field)| (name, resolved(field, &named))).collect()
}

/// A field that may be absent is one of its schema and `null`; a type of its own is a reference beside the description.
fn resolved(mut field: Value, named: &Map<String, Value>) -> Value {
    if let Some(Value::Array(parts)) = field.get_mut("oneOf").map(Value::take) {
        let schema = parts.into_iter().find(|part| part["type"] != "null");
        field = schema.unwrap_or_default();
    }
    let name = field["$ref"].as_str().and_then(|path| path.rsplit('/').next());
    let Some(mut schema) = name.and_then(|name| named.get(name)).cloned() else { return field };
    schema["description"] = field["description"].take();
    schema
}
