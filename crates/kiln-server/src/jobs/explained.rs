//! Errors of the engine, of models and of training, as clients see them.

use kiln_engine::{Explain, Field, FieldGroup, Request, Text};
use kiln_train::TrainRequest;

use crate::jobs::error::JobError;

impl JobError {
    /// The error of a job or a training, with what its client can do about it. Folders are cut off.
    pub fn explained(error: &impl Explain) -> JobError {
        if error.is_cancelled() {
            return JobError::cancelled();
        }
        let text = error.message();
        let hint = error.hint().and_then(|hint| hint.say(&name)).map(|hint| format!("; {hint}"));
        let message = text.say(&name) + &hint.unwrap_or_default();
        let message = kiln_base::without_folders(&message).into_owned();
        let param = text.fields().find(|field| name(*field, None).is_some());
        JobError {
            param: param.map(|field| field.name().into()),
            ..JobError::new(error.kind().into(), message)
        }
    }

    /// A value that the server refuses; the first field that the text names is at fault.
    pub(crate) fn value(what: Text) -> JobError {
        JobError::explained(&kiln_engine::Error::value(what))
    }
}

/// Says a field as it is in JSON: `"dtype": "f32"`; `None` if clients can't set it.
fn name(field: Field, value: Option<&str>) -> Option<String> {
    let name = field.name();
    let is_sent = match field.group() {
        FieldGroup::Request => !Request::LOCAL_FIELDS.contains(&name),
        FieldGroup::Training => field != Field::Output && !TrainRequest::LOCAL_FIELDS.contains(&name),
        FieldGroup::Rewriting => field == Field::Temperature,
        // What the operator decides.
        FieldGroup::Machine | FieldGroup::Command => false,
    };
    is_sent.then(|| match value {
        None => format!("\"{name}\""),
        Some(value) if value == "true" || value.parse::<f64>().is_ok() => format!("\"{name}\": {value}"),
        Some(text) => format!("\"{name}\": {text:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_reads_of_the_fields_that_it_can_send() {
        let error =
            kiln_engine::Error::value(kiln_engine::text![Field::Rho, " needs ", Field::Schedule.to("power")])
                .with_hint(kiln_engine::hint!["use ", Field::Dtype.to("f32"); "leave out ", Field::Rho]);
        let error = JobError::explained(&error);
        assert_eq!(error.message, "\"rho\" needs \"schedule\": \"power\"; leave out \"rho\"");
        assert_eq!(error.param.as_deref(), Some("rho"));
    }
}
