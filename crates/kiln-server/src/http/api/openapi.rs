//! What every operation of the OpenAPI description needs and utoipa's macros leave out: refusals,
//! descriptions of all responses, unique ids, and the ways to authenticate.

use kiln_engine::Request;
use kiln_train::TrainRequest;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{ContentBuilder, ObjectBuilder, OpenApi, Ref, RefOr, ResponseBuilder, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::openai::{ImagesRequest, OpenAiFields};
use crate::http::auth::PLAIN_COOKIE;
use crate::jobs::priority::Priority;

/// Completes the description. Routes that are `public` need no key.
pub(super) fn complete(api: &mut OpenApi, is_public: fn(&str) -> bool) {
    let http = |scheme, text: &str| {
        SecurityScheme::Http(HttpBuilder::new().scheme(scheme).description(Some(text)).build())
    };
    let session = ApiKeyValue::with_description(PLAIN_COOKIE, "A browser's session, from `/v1/session`.");
    let schemes = [
        ("bearer", http(HttpAuthScheme::Bearer, "The server's API key.")),
        ("basic", http(HttpAuthScheme::Basic, "The server's API key as the password, with any user name.")),
        ("session", SecurityScheme::ApiKey(ApiKey::Cookie(session))),
    ];
    let requirement = |name: &str| SecurityRequirement::new(name, Vec::<String>::new());
    // The empty one: a server without a key asks for none.
    let mut any: Vec<SecurityRequirement> = schemes.iter().map(|(name, _)| requirement(name)).collect();
    any.push(SecurityRequirement::default());
    let components = api.components.get_or_insert_default();
    components.security_schemes.extend(schemes.map(|(name, scheme)| (name.to_owned(), RefOr::T(scheme))));
    api.security = Some(any);
    let local = [
        ("Request", &Request::LOCAL_FIELDS[..]),
        ("JobRequest", &Request::LOCAL_FIELDS),
        ("ImagesRequest", &Request::LOCAL_FIELDS),
        ("TrainRequest", &TrainRequest::LOCAL_FIELDS),
    ];
    for (name, fields) in local {
        if let Some(RefOr::T(Schema::Object(request))) = components.schemas.get_mut(name) {
            fields.iter().for_each(|field| drop(request.properties.remove(*field)));
        }
    }
    for (path, item) in &mut api.paths.paths {
        for operation in operations(item) {
            complete_operation(operation);
            if is_public(path) {
                operation.security = Some(Vec::new());
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.post, &mut item.put, &mut item.patch, &mut item.delete].into_iter().flatten()
}

fn complete_operation(operation: &mut Operation) {
    let tag = operation.tags.iter().flatten().next();
    if let (Some(tag), Some(id)) = (tag, &operation.operation_id) {
        operation.operation_id = Some(format!("{tag}_{id}"));
    }
    // Any request may be refused: for its key, its fields, its size.
    let refused = || {
        let body = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
        ResponseBuilder::new().content("application/json", body).build().into()
    };
    operation.responses.responses.entry("4XX".into()).or_insert_with(refused);
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && response.description.is_empty()
        {
            let description = if status.starts_with('2') { "Done" } else { "The request is refused" };
            response.description = description.into();
        }
    }
}

/// A job to submit: a request, its priority, and whom to tell about its end.
pub(crate) struct JobRequest;

impl PartialSchema for JobRequest {
    fn schema() -> RefOr<Schema> {
        // One object instead of `allOf`: each part of that would forbid the other's fields.
        let mut request = Request::schema();
        if let RefOr::T(Schema::Object(object)) = &mut request {
            let webhook = ObjectBuilder::new().schema_type(Type::String).description(Some(
                "Address to call when the job has ended, with a signature; only on servers with webhooks.",
            ));
            object.properties.insert("webhook".into(), webhook.build().into());
            let priority = ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some(Priority::ALL.map(Priority::name)))
                .description(Some(
                    "Jobs of a higher priority go first; with API keys, `high` needs one that allows it.",
                ));
            object.properties.insert("priority".into(), priority.build().into());
            object.description =
                Some("A job: a request, its priority, and whom to tell about its end.".into());
        }
        request
    }
}

impl ToSchema for JobRequest {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((Request::name().into_owned(), Request::schema()));
        Request::schemas(schemas);
    }
}

/// The header of a request that may be sent again without a second job.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes the header")]
pub(crate) struct SubmitHeaders {
    /// A key chosen by the client: a request with the same key returns the same job, for 24 hours.
    #[param(rename = "Idempotency-Key")]
    idempotency_key: Option<String>,
}

impl PartialSchema for ImagesRequest {
    fn schema() -> RefOr<Schema> {
        // One object instead of `allOf`: each part of that would forbid the other's fields.
        let mut request = Request::schema();
        if let (RefOr::T(Schema::Object(all)), RefOr::T(Schema::Object(openai))) =
            (&mut request, OpenAiFields::schema())
        {
            all.properties.extend(openai.properties);
            all.description =
                Some("A request in OpenAI's format, with all fields of Kiln's own request.".into());
        }
        request
    }
}

impl ToSchema for ImagesRequest {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Request::schemas(schemas);
        OpenAiFields::schemas(schemas);
    }
}
