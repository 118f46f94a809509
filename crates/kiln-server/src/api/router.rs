//! Every route, and what all of them share: who is let in, a request id, a line in the log, a count.

use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use bytes::Bytes;
use utoipa::openapi::OpenApi;

use super::error::ApiError;
use super::{a1111, gallery, inputs, jobs, openai, status};
use crate::server::random;
use crate::{Server, auth, page};

/// Every call, once: its route, and its place in the description.
macro_rules! calls {
    ($($method:ident $path:literal $module:ident::$handler:ident;)*) => {
        fn routes() -> Router<Server> {
            Router::new()$(.route($path, $method($module::$handler)))*
        }

        #[derive(utoipa::OpenApi)]
        #[openapi(
            paths($($module::$handler),*),
            info(title = "Kiln", description = "Images from text with FLUX.2 [klein]", license(name = "MIT OR Apache-2.0"))
        )]
        struct Described;
    };
}

calls! {
    post "/v1/images/generations" openai::generations;
    post "/v1/images/edits" openai::edits;
    get "/v1/models" openai::models;
    post "/v1/jobs" jobs::submit;
    get "/v1/jobs" jobs::list;
    get "/v1/jobs/{id}" jobs::status;
    delete "/v1/jobs/{id}" jobs::cancel;
    get "/v1/jobs/{id}/result" jobs::result;
    get "/v1/jobs/{id}/events" jobs::events;
    post "/v1/inputs" inputs::keep;
    get "/v1/inputs/{id}" inputs::file;
    get "/v1/pictures" gallery::list;
    get "/v1/pictures/{id}" gallery::one;
    delete "/v1/pictures/{id}" gallery::delete;
    get "/v1/pictures/{id}/file" gallery::file;
    get "/v1/pictures/{id}/thumbnail" gallery::small;
    get "/v1/pictures/{id}/recipe" gallery::recipe;
    post "/sdapi/v1/txt2img" a1111::txt2img;
    post "/sdapi/v1/img2img" a1111::img2img;
    get "/sdapi/v1/progress" a1111::progress;
    post "/sdapi/v1/interrupt" a1111::interrupt;
    get "/sdapi/v1/options" a1111::options;
    post "/sdapi/v1/options" a1111::set_options;
    get "/sdapi/v1/samplers" a1111::samplers;
    get "/sdapi/v1/sd-models" a1111::models;
    get "/sdapi/v1/loras" a1111::loras;
    get "/healthz" status::health;
    get "/readyz" status::ready;
    get "/metrics" status::metrics;
    get "/v1/loras" status::loras;
    get "/v1/vaes" status::vaes;
    get "/v1/about" status::about;
    post "/v1/session" status::session;
}

/// The description of every call, made from the code that answers them.
///
/// What the server sends is `openapi.json` beside the crate's manifest, which a test holds against this: the code that
/// makes it is half a megabyte, and the program is better off without.
pub fn openapi() -> OpenApi {
    let mut api = <Described as utoipa::OpenApi>::openapi();
    // Filled in with the name of the macro's author.
    api.info.contact = None;
    api
}

static DESCRIPTION: &[u8] = include_bytes!("../../openapi.json");

/// Everything that the server answers.
pub fn router(server: Server) -> Router {
    let description =
        async || super::answer(StatusCode::OK, "application/json", Bytes::from_static(DESCRIPTION));
    routes()
        .route("/openapi.json", get(description))
        .merge(page::routes())
        .fallback(async || {
            ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this address")
        })
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method", "this address takes another method")
        })
        .layer(from_fn_with_state(server.clone(), guard))
        .with_state(server)
}

/// Addresses that need no key: nothing of anybody's is there.
fn is_open(path: &str) -> bool {
    matches!(path, "/" | "/healthz" | "/readyz" | "/openapi.json" | "/favicon.ico")
        || path.starts_with("/page/")
}

async fn guard(State(server): State<Server>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id: String = random::<8>().iter().map(|byte| format!("{byte:02x}")).collect();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route =
        request.extensions().get::<MatchedPath>().map_or("other".to_owned(), |r| r.as_str().to_owned());
    let peer = request.extensions().get::<super::Peer>().map(|peer| peer.0.to_string());
    let mut response = match admit(&server, &request) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    };
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", value);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let (status, took) = (response.status().as_u16(), began.elapsed());
    server.metrics.request(method.as_str(), &route, status, took);
    let ms = (took.as_secs_f64() * 1e4).round() / 10.0;
    let quiet = matches!(path.as_str(), "/healthz" | "/readyz" | "/metrics" | "/sdapi/v1/progress");
    match quiet && status < 400 {
        true => tracing::debug!(request = id, %method, path, status, ms, peer, "request"),
        false => tracing::info!(request = id, %method, path, status, ms, peer, "request"),
    }
    response
}

fn admit(server: &Server, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    if !auth::is_own_page(headers, &server.config.hosts) {
        let message = "the request comes from another site, or asks for a name that is not this server's";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "foreign", message));
    }
    let open = is_open(request.uri().path()) && request.method() == Method::GET;
    if !open && !server.keys.open(headers) {
        let message = "an API key is needed: send it as `Authorization: Bearer KEY`";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message));
    }
    Ok(())
}
