//! The JSON schema of a request, for programs that describe its fields at run time.

use utoipa::PartialSchema;

use super::TrainRequest;

impl TrainRequest {
    /// Its fields with their descriptions.
    pub fn json_schema() -> serde_json::Value {
        serde_json::to_value(TrainRequest::schema()).unwrap_or_default()
    }
}
