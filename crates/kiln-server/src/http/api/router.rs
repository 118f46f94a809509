//! All routes, and the middleware around them: authentication, request ids, logging and metrics.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post, put};
use kiln_base::hex;
use tracing::Instrument;

use super::a1111::{self, control, lists, options, png_info};
use super::caller::{Gate, Peer, Refusal, identify, unauthorized};
use super::error::ApiError;
use super::{
    downloads, gallery, inputs, job_events, jobs, loras, marks, openai, origin, plots, prompts, queue,
    recipes, status, training_events, trainings,
};
use crate::Server;
use crate::http::page;
use crate::jobs::error::ErrorCode;
use crate::jobs::random::random_bytes;

/// Declares every endpoint once, for the router and for the OpenAPI description.
macro_rules! endpoints {
    ($($method:ident $path:literal $module:ident::$handler:ident;)*) => {
        fn routes() -> Router<Server> {
            Router::new()$(.route($path, $method($module::$handler)))*.merge(earlier_routes())
        }

        #[cfg(feature = "schema")]
        #[derive(utoipa::OpenApi)]
        #[openapi(
            paths($($module::$handler),*),
            info(title = "Kiln", description = "Image generation with FLUX.2 [klein]", license(name = "MIT OR Apache-2.0"))
        )]
        struct ApiDoc;
    };
}

/// The gallery's earlier addresses.
fn earlier_routes() -> Router<Server> {
    Router::new()
        .route("/v1/pictures", get(gallery::list).patch(marks::update))
        .route("/v1/pictures/{id}", get(gallery::details).delete(gallery::delete))
        .route("/v1/pictures/{id}/file", get(gallery::file))
        .route("/v1/pictures/{id}/thumbnail", get(gallery::thumbnail))
        .route("/v1/pictures/{id}/recipe", get(gallery::recipe))
}

endpoints! {
    post "/v1/images/generations" openai::generations;
    post "/v1/images/edits" openai::edits;
    post "/v1/images/variations" openai::variations;
    get "/v1/models" openai::models;
    get "/v1/models/{id}" openai::model;
    post "/v1/jobs" jobs::submit;
    get "/v1/jobs" jobs::list;
    get "/v1/jobs/{id}" jobs::status;
    delete "/v1/jobs/{id}" jobs::cancel;
    get "/v1/jobs/{id}/result" jobs::result;
    get "/v1/jobs/{id}/events" job_events::events;
    get "/v1/queue" queue::list;
    put "/v1/queue" queue::reorder;
    delete "/v1/queue" queue::cancel_all;
    post "/v1/plots" plots::submit;
    get "/v1/plots" plots::list;
    get "/v1/plots/{id}" plots::details;
    post "/v1/prompts/upsample" prompts::upsample;
    post "/v1/inputs" inputs::upload;
    get "/v1/inputs/{id}" inputs::file;
    get "/v1/inputs/{id}/recipe" recipes::of_input;
    get "/v1/inputs/{id}/origin" origin::input_origin;
    get "/v1/images" gallery::list;
    patch "/v1/images" marks::update;
    get "/v1/images/{id}" gallery::details;
    delete "/v1/images/{id}" gallery::delete;
    get "/v1/images/{id}/file" gallery::file;
    get "/v1/images/{id}/thumbnail" gallery::thumbnail;
    get "/v1/images/{id}/recipe" gallery::recipe;
    get "/v1/images/{id}/origin" origin::image_origin;
    post "/v1/verify" origin::verify;
    post "/sdapi/v1/txt2img" a1111::txt2img;
    post "/sdapi/v1/img2img" a1111::img2img;
    get "/sdapi/v1/progress" control::progress;
    post "/sdapi/v1/interrupt" control::interrupt;
    post "/sdapi/v1/skip" control::skip;
    get "/sdapi/v1/options" options::options;
    post "/sdapi/v1/options" options::set_options;
    post "/sdapi/v1/png-info" png_info::png_info;
    get "/sdapi/v1/samplers" lists::samplers;
    get "/sdapi/v1/schedulers" lists::schedulers;
    get "/sdapi/v1/upscalers" lists::upscalers;
    get "/sdapi/v1/latent-upscale-modes" lists::latent_upscale_modes;
    get "/sdapi/v1/sd-models" lists::models;
    get "/sdapi/v1/sd-vae" lists::vaes;
    get "/sdapi/v1/loras" lists::loras;
    get "/sdapi/v1/scripts" lists::scripts;
    get "/sdapi/v1/cmd-flags" lists::cmd_flags;
    post "/sdapi/v1/refresh-checkpoints" lists::refresh_checkpoints;
    post "/sdapi/v1/refresh-loras" lists::refresh_loras;
    post "/sdapi/v1/refresh-vae" lists::refresh_vaes;
    get "/healthz" status::health;
    get "/readyz" status::ready;
    get "/metrics" status::metrics;
    get "/v1/loras" status::loras;
    get "/v1/loras/details" loras::details;
    get "/v1/loras/preview" loras::preview;
    get "/v1/loras/{name}/file" loras::file;
    delete "/v1/loras/{name}" loras::delete;
    get "/v1/downloads" downloads::list;
    post "/v1/downloads" downloads::start;
    delete "/v1/downloads/{model}" downloads::cancel;
    get "/v1/vaes" status::vaes;
    get "/v1/trainings" trainings::list;
    post "/v1/trainings" trainings::start;
    get "/v1/trainings/options" trainings::options;
    post "/v1/trainings/check" trainings::check;
    get "/v1/trainings/{id}" trainings::details;
    delete "/v1/trainings/{id}" trainings::delete;
    post "/v1/trainings/{id}/cancel" trainings::cancel;
    post "/v1/trainings/{id}/resume" trainings::resume;
    get "/v1/trainings/{id}/events" training_events::events;
    get "/v1/trainings/{id}/samples/{step}" trainings::sample;
    get "/v1/about" status::about;
    post "/v1/session" status::session;
    delete "/v1/session" status::logout;
}

/// The OpenAPI description, generated from the handlers.
///
/// The server itself sends the file `openapi.json` beside the crate's manifest, which a test compares with this: programs
/// need not contain the code that generates it.
#[cfg(feature = "schema")]
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut api = <ApiDoc as utoipa::OpenApi>::openapi();
    // utoipa fills in the package's author.
    api.info.contact = None;
    super::openapi::complete(&mut api, super::caller::is_public);
    api
}

/// Other sites can't show our images.
const CORP: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

/// The router of a worker: probes and metrics.
pub(crate) fn probes(gate: Gate) -> Router {
    Router::new()
        .route("/healthz", get(status::health))
        .route("/readyz", get(status::ready))
        .route("/metrics", get(status::metrics))
        .with_state(gate.jobs.clone())
        .layer(from_fn_with_state(gate, middleware))
}

/// The router of all endpoints and the page.
pub fn router(server: Server) -> Router {
    let gate = Gate {
        config: Arc::clone(&server.config),
        auth: Arc::clone(&server.auth),
        jobs: server.jobs().clone(),
    };
    let packed = kiln_pack::split(include_bytes!(concat!(env!("OUT_DIR"), "/openapi.packed")));
    let packed = packed.get("openapi.json").copied().unwrap_or_default();
    let openapi = page::Packed::new(packed, "application/json");
    let description = async move |headers: HeaderMap| super::cached_while_valid(openapi.respond(&headers));
    routes()
        .route("/openapi.json", get(description))
        .merge(page::routes())
        .fallback(async || ApiError::new(ErrorCode::NotFound, "no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(ErrorCode::Method, "method not allowed for this route")
        })
        .layer(from_fn_with_state(gate, middleware))
        .with_state(server)
}

async fn middleware(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = hex(random_bytes::<8>());
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route =
        request.extensions().get::<MatchedPath>().map_or("other".to_owned(), |r| r.as_str().to_owned());
    let peer = request.extensions().get::<Peer>().map(|peer| peer.address.to_string());
    let mut client = None;
    let mut response = match identify(&gate, &request) {
        Ok(caller) => {
            if let Some(caller) = caller {
                client = Some(caller.client.clone());
                request.extensions_mut().insert(caller);
            }
            next.run(request).instrument(tracing::info_span!("request", request = id)).await
        }
        Err(Refusal::Error(error)) => error.into_response(),
        Err(Refusal::WrongKey(address)) => {
            gate.auth.wrong_keys.delay(address).await;
            unauthorized().into_response()
        }
    };
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", value);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(CORP, HeaderValue::from_static("same-origin"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let (status, took) = (response.status().as_u16(), started.elapsed());
    gate.jobs.metrics.request(method.as_str(), &route, status, took);
    let ms = (took.as_secs_f64() * 1e4).round() / 10.0;
    let quiet = matches!(path.as_str(), "/healthz" | "/readyz" | "/metrics" | "/sdapi/v1/progress");
    if quiet && status < 400 {
        tracing::debug!(request = id, %method, path, status, ms, peer, client, "request");
    } else {
        tracing::info!(request = id, %method, path, status, ms, peer, client, "request");
    }
    response
}
