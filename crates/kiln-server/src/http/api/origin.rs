//! Where images come from: the AI mark and the credentials of files that anybody sends, and of the server's own.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use kiln_credentials::{Report, Trust};
use kiln_image::FoundAiMark;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::body::{BodyPermit, RequestBody};
use super::error::{ApiError, BUSY_RETRY_SECONDS};
use super::{Caller, Path, reply, run_blocking};
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::intake::Intake;
use crate::jobs::store::FileKind;

/// Checks at one time: each takes a core, and up to some hundred megabytes for a file that means harm.
const CHECKS: usize = 2;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(20);

/// What checks files.
pub(crate) struct Verifier {
    trust: Trust,
    turns: Arc<Semaphore>,
}

/// A file with what it holds of the server until its check has ended, even if nobody waits for that any more.
struct Held {
    bytes: Bytes,
    _turn: OwnedSemaphorePermit,
    _body: Option<BodyPermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Where an image comes from, as its file says.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct OriginView {
    /// Both in a line.
    summary: String,
    /// What the file's metadata say of AI, which anybody may have written; null if nothing.
    ai_mark: Option<AiMarkView>,
    /// The signed statement of its origin (C2PA).
    credentials: CredentialsView,
}

/// The AI mark of a file: IPTC's properties.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct AiMarkView {
    /// Whether a model made the image, or a part of it.
    is_ai: bool,
    /// IPTC's term, such as `trainedAlgorithmicMedia`.
    source: String,
    /// The program or model.
    system: Option<String>,
    /// Its version.
    version: Option<String>,
}

/// The credentials of a file.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct CredentialsView {
    /// `trusted`, `valid` (of a signer that is not known here), `invalid`, `none`, or `not_checked`.
    #[cfg_attr(feature = "schema", schema(example = "trusted"))]
    state: &'static str,
    /// The state and the signer in words.
    summary: String,
    /// What they say, with the keys of `kiln verify --json`: signer, time, generator, model, actions, ingredients, problems.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    details: Report,
}

impl Verifier {
    pub(crate) fn new(trust: Trust) -> Verifier {
        Verifier { trust, turns: Arc::new(Semaphore::new(CHECKS)) }
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let turn = timeout(PATIENCE, Arc::clone(&self.turns).acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or_else(|| {
            let message = "too many files are being checked; try again later";
            ApiError::new(ErrorCode::Busy, message).retry_after(BUSY_RETRY_SECONDS)
        })
    }

    fn origin(&self, file: Held) -> Result<OriginView, ApiError> {
        let mark = match kiln_image::read_ai_mark(&file.bytes) {
            Ok(mark) => mark,
            // A packet that is damaged says nothing.
            Err(kiln_image::Error::Text { .. }) => None,
            Err(error) => return Err(JobError::from(error).into()),
        };
        let report = kiln_credentials::verify(file, &self.trust);
        let credentials =
            CredentialsView { state: report.state.name(), summary: report.summary(), details: report };
        let marked = mark.as_ref().map_or("none".into(), FoundAiMark::summary);
        let summary = format!("AI mark: {marked}; credentials: {}", credentials.summary);
        let view = |mark: FoundAiMark| AiMarkView {
            is_ai: mark.is_ai(),
            source: mark.source,
            system: mark.system,
            version: mark.version,
        };
        Ok(OriginView { summary, ai_mark: mark.map(view), credentials })
    }
}

/// Says where an image file comes from: its AI mark, and whether its credentials (C2PA) are valid. The body is the file. The
/// operator can open this route to all (`--public-verify`).
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/verify", tag = "server", request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = OriginView))))]
pub(crate) async fn verify(
    State(verifier): State<Arc<Verifier>>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    let turn = verifier.turn().await?;
    reply(move || verifier.origin(Held { bytes: body.bytes, _turn: turn, _body: Some(body.permit) })).await
}

/// Says where an uploaded image comes from, as `/v1/verify` does.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/inputs/{id}/origin", tag = "jobs", params(("id" = String, Path)), responses((status = 200, body = OriginView))))]
pub(crate) async fn input_origin(
    State(verifier): State<Arc<Verifier>>,
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let missing = ApiError::not_found("input", &id);
    let path = run_blocking(move || Ok(intake.input_path(&id, &caller)?)).await?;
    of_file(verifier, path, missing).await
}

/// Says where a generated image comes from, as its file says.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/images/{id}/origin", tag = "gallery", params(("id" = String, Path)), responses((status = 200, body = OriginView))))]
pub(crate) async fn image_origin(
    State(verifier): State<Arc<Verifier>>,
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let missing = ApiError::not_found("image", &id);
    let path = run_blocking(move || {
        let row = intake.image(&id, &caller)?.ok_or_else(|| ApiError::not_found("image", &id))?;
        Ok(intake.files.path(FileKind::Image, &row.file)?)
    });
    let path = path.await?;
    of_file(verifier, path, missing).await
}

async fn of_file(
    verifier: Arc<Verifier>,
    path: Option<std::path::PathBuf>,
    missing: ApiError,
) -> Result<Response, ApiError> {
    let turn = verifier.turn().await?;
    reply(move || {
        let bytes = path.and_then(|path| std::fs::read(path).ok()).ok_or(missing)?;
        verifier.origin(Held { bytes: bytes.into(), _turn: turn, _body: None })
    })
    .await
}
