//! Where images come from: the AI mark, the credentials and the watermark of files that anybody sends, and of the server's own.

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
    /// All of it in a line.
    summary: String,
    /// What the file's metadata say of AI, which anybody may have written; null if nothing.
    ai_mark: Option<AiMarkView>,
    /// The signed statement of its origin (C2PA).
    credentials: CredentialsView,
    /// The invisible watermark of its pixels; null if none is found, or the image is too large to look.
    watermark: Option<WatermarkView>,
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

/// An invisible watermark.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct WatermarkView {
    /// Its bits, as hexadecimal digits: 8 for those of Kiln.
    #[cfg_attr(feature = "schema", schema(example = "4b494c4e"))]
    bits: String,
    /// Whose they are, such as `Kiln`, if they are known. Up to three of Kiln's may be wrong.
    owner: Option<&'static str>,
    /// How sure its reader is: above 4, or above 0.75 for those of other programs.
    certainty: f32,
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

    fn origin(&self, intake: &Intake, file: Held) -> Result<OriginView, ApiError> {
        let mark = match kiln_image::read_ai_mark(&file.bytes) {
            Ok(mark) => mark,
            // A packet that is damaged says nothing.
            Err(kiln_image::Error::Text { .. }) => None,
            Err(error) => return Err(JobError::from(error).into()),
        };
        // Credentials of files that can't be decoded are checked nevertheless.
        let watermark = intake.read_watermark(&file.bytes);
        let report = kiln_credentials::verify(file, &self.trust);
        let credentials =
            CredentialsView { state: report.state.name(), summary: report.summary(), details: report };
        let marked = mark.as_ref().map_or("none".into(), FoundAiMark::summary);
        let watermarked = match &watermark {
            Ok(found) => found.map_or("none".into(), |found| found.summary()),
            Err(_) => "not checked".into(),
        };
        let summary =
            format!("AI mark: {marked}; credentials: {}; watermark: {watermarked}", credentials.summary);
        let watermark = watermark.ok().flatten().map(|found| WatermarkView {
            bits: found.bits(),
            owner: found.owner(),
            certainty: found.certainty(),
        });
        let view = |mark: FoundAiMark| AiMarkView {
            is_ai: mark.is_ai(),
            source: mark.source,
            system: mark.system,
            version: mark.version,
        };
        Ok(OriginView { summary, ai_mark: mark.map(view), credentials, watermark })
    }
}

/// Says where an image file comes from: its AI mark, whether its credentials (C2PA) are valid, and its watermark. The body is
/// the file. The operator can open this route to all (`--public-verify`).
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/verify", tag = "server", request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = OriginView))))]
pub(crate) async fn verify(
    State(verifier): State<Arc<Verifier>>,
    State(intake): State<Intake>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    let turn = verifier.turn().await?;
    reply(move || verifier.origin(&intake, Held { bytes: body.bytes, _turn: turn, _body: Some(body.permit) }))
        .await
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
    let inputs = intake.clone();
    let path = run_blocking(move || Ok(inputs.input_path(&id, &caller)?)).await?;
    of_file(verifier, intake, path, missing).await
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
    let images = intake.clone();
    let path = run_blocking(move || {
        let row = images.image(&id, &caller)?.ok_or_else(|| ApiError::not_found("image", &id))?;
        Ok(images.files.path(FileKind::Image, &row.file)?)
    });
    let path = path.await?;
    of_file(verifier, intake, path, missing).await
}

async fn of_file(
    verifier: Arc<Verifier>,
    intake: Intake,
    path: Option<std::path::PathBuf>,
    missing: ApiError,
) -> Result<Response, ApiError> {
    let turn = verifier.turn().await?;
    reply(move || {
        let bytes = path.and_then(|path| std::fs::read(path).ok()).ok_or(missing)?;
        verifier.origin(&intake, Held { bytes: bytes.into(), _turn: turn, _body: None })
    })
    .await
}
