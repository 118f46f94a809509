//! What every operation of the OpenAPI description needs and utoipa's macros leave out: descriptions of all responses,
//! unique ids, and the ways to authenticate.

use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{OpenApi, RefOr};

use crate::auth::PLAIN_COOKIE;

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
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && response.description.is_empty()
        {
            let description = if status.starts_with('2') { "Done" } else { "The request is refused" };
            response.description = description.into();
        }
    }
}
