//! Why a job or a training has no result: a code for programs, and what the code means over HTTP and to the engine.

use std::borrow::Cow;

use kiln_engine::ErrorKind;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! codes {
    ($($(#[$doc:meta])* $code:ident = $name:literal $status:literal $kind:ident,)*) => {
        /// A stable code for programs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ErrorCode {
            $($(#[$doc])* $code,)*
        }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &[ErrorCode] = &[$(ErrorCode::$code,)*];

            /// Returns the code as clients and records have it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(ErrorCode::$code => $name,)*
                }
            }

            /// Returns its status over HTTP.
            pub const fn status(self) -> u16 {
                match self {
                    $(ErrorCode::$code => $status,)*
                }
            }

            /// Returns what kind of error it is.
            pub const fn kind(self) -> ErrorKind {
                match self {
                    $(ErrorCode::$code => ErrorKind::$kind,)*
                }
            }
        }
    };
}

codes! {
    /// A field is out of its range, or does not fit the others.
    InvalidValue = "invalid_value" 400 Value,
    /// The request can't be read or fulfilled.
    InvalidRequest = "invalid_request" 400 Request,
    /// A prompt exceeds the limit.
    PromptTooLong = "prompt_too_long" 400 Value,
    /// An image can't be read.
    InvalidImage = "invalid_image" 400 Input,
    /// An image exceeds the limit.
    ImageTooLarge = "image_too_large" 400 TooLarge,
    /// A LoRA does not fit the model.
    LoraUnfit = "lora_unfit" 400 Lora,
    /// The images or settings of a training are unusable.
    Unusable = "unusable" 400 Data,
    /// The check refused an image.
    ImageRefused = "image_refused" 400 Request,
    /// The same for OpenAI's clients.
    ContentPolicyViolation = "content_policy_violation" 400 Request,
    /// The API key does not allow it.
    NotAllowed = "not_allowed" 400 Request,
    /// The server does not offer it.
    NotAvailable = "not_available" 400 Request,
    /// The server is not set up for it.
    NotSupported = "not_supported" 400 Request,
    /// The `Host` header is not this server's.
    InvalidHost = "invalid_host" 400 Request,
    /// The key is missing or wrong.
    InvalidApiKey = "invalid_api_key" 401 Request,
    /// Only an administrator may do it.
    AdminOnly = "admin_only" 403 Request,
    /// A page of another site sent it.
    Foreign = "foreign" 403 Request,
    /// The licence of a model must be accepted first.
    LicenseNotAccepted = "license_not_accepted" 403 Request,
    /// The LoRA was not trained here.
    NotTrainedHere = "not_trained_here" 403 Request,
    /// It belongs to another client.
    NotYours = "not_yours" 403 Request,
    /// The key does not allow training.
    TrainingNotAllowed = "training_not_allowed" 403 Request,
    /// The server does not train.
    TrainingOff = "training_off" 403 Request,
    /// There is no such thing.
    NotFound = "not_found" 404 Input,
    /// There is no such model.
    ModelNotFound = "model_not_found" 404 Input,
    /// There is no such LoRA.
    LoraNotFound = "lora_not_found" 404 Input,
    /// There is no such VAE.
    VaeNotFound = "vae_not_found" 404 Input,
    /// There is no such image.
    InputNotFound = "input_not_found" 404 Input,
    /// The image has no recipe.
    NoRecipe = "no_recipe" 404 Input,
    /// The route has no such method.
    Method = "method" 405 Request,
    /// The body arrives too slowly.
    TooSlow = "too_slow" 408 Request,
    /// It was cancelled.
    Cancelled = "cancelled" 409 Cancelled,
    /// The job is too far to be stopped.
    AtItsEnd = "at_its_end" 409 Request,
    /// The job has no result yet.
    NotDone = "not_done" 409 Request,
    /// The training is in another state.
    WrongState = "wrong_state" 409 Request,
    /// The body exceeds the limit.
    TooLarge = "too_large" 413 Request,
    /// No more images are kept for the client.
    InputsFull = "inputs_full" 413 Request,
    /// The body has another type.
    MediaType = "media_type" 415 Request,
    /// The range is outside the file.
    Range = "range" 416 Request,
    /// The key was used for another request.
    IdempotencyKey = "idempotency_key" 422 Request,
    /// No more trainings are accepted.
    TrainingsFull = "trainings_full" 429 Request,
    /// No more jobs are accepted.
    QueueFull = "queue_full" 429 Request,
    /// The key submits too fast.
    RateLimited = "rate_limited" 429 Request,
    /// Too many wrong keys.
    TooManyAttempts = "too_many_attempts" 429 Request,
    /// Generating failed.
    GenerationFailed = "generation_failed" 500 Internal,
    /// The model can't be used.
    ModelFailed = "model_failed" 500 Model,
    /// The memory is used up.
    OutOfMemory = "out_of_memory" 500 OutOfMemory,
    /// The result holds NaN or infinity.
    NotFinite = "not_finite" 500 NotFinite,
    /// The image can't be encoded.
    Encoding = "encoding" 500 Internal,
    /// A bug.
    Panicked = "panicked" 500 Internal,
    /// The process ended meanwhile.
    Interrupted = "interrupted" 500 Internal,
    /// Its record is gone.
    Lost = "lost" 500 File,
    /// Its record can't be read.
    UnreadableJob = "unreadable_job" 500 File,
    /// A download failed.
    DownloadFailed = "download_failed" 500 Download,
    /// The prompt was not rewritten.
    UpsampleFailed = "upsample_failed" 500 Internal,
    /// A training failed.
    TrainingFailed = "training_failed" 500 Diverged,
    /// Too much is going on.
    Busy = "busy" 503 Internal,
    /// The server is stopping.
    ShuttingDown = "shutting_down" 503 Internal,
    /// The disk or the queue can't be used.
    Storage = "storage" 503 File,
    /// It took too long.
    Timeout = "timeout" 504 Internal,
}

impl Serialize for ErrorCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl From<ErrorKind> for ErrorCode {
    fn from(kind: ErrorKind) -> ErrorCode {
        match kind {
            ErrorKind::Value => ErrorCode::InvalidValue,
            ErrorKind::Request | ErrorKind::Input | ErrorKind::TooLarge => ErrorCode::InvalidRequest,
            ErrorKind::Data => ErrorCode::Unusable,
            ErrorKind::Lora => ErrorCode::LoraUnfit,
            ErrorKind::Model | ErrorKind::Device => ErrorCode::ModelFailed,
            ErrorKind::Download => ErrorCode::DownloadFailed,
            ErrorKind::OutOfMemory => ErrorCode::OutOfMemory,
            ErrorKind::NotFinite => ErrorCode::NotFinite,
            ErrorKind::Diverged => ErrorCode::TrainingFailed,
            ErrorKind::Cancelled => ErrorCode::Cancelled,
            ErrorKind::File | ErrorKind::Internal => ErrorCode::GenerationFailed,
        }
    }
}

/// Why a job ended without its images.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct JobError {
    /// A stable code for programs.
    pub code: ErrorCode,
    /// A message for people.
    pub message: String,
    /// The field of the request that is wrong.
    pub param: Option<Cow<'static, str>>,
}

impl JobError {
    /// Creates an error. The message of a failure of the server is for clients, too: folders in it are cut off.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> JobError {
        let mut error = JobError { code, message: message.into(), param: None };
        if error.is_of_server() {
            error.message = kiln_base::without_folders(&error.message).into_owned();
        }
        error
    }

    /// The job was cancelled.
    pub fn cancelled() -> JobError {
        JobError::new(ErrorCode::Cancelled, "cancelled")
    }

    /// An error that is stored with its code. One that this version does not know becomes a general one of its kind; records
    /// of earlier versions have no kind.
    pub(crate) fn stored(code: &str, kind: Option<&str>, message: String) -> JobError {
        let code = match code {
            "invalid_picture" => "invalid_image",
            "picture_too_large" => "image_too_large",
            code => code,
        };
        let known = ErrorCode::ALL.iter().copied().find(|known| known.name() == code);
        let kind = || ErrorKind::ALL.iter().copied().find(|known| Some(known.name()) == kind);
        let code = known.or_else(|| kind().map(ErrorCode::from)).unwrap_or(ErrorCode::GenerationFailed);
        JobError { code, message, param: None }
    }

    /// Names the field of the request that is wrong.
    #[must_use]
    pub fn param(mut self, name: impl Into<Cow<'static, str>>) -> JobError {
        self.param = Some(name.into());
        self
    }

    /// Whether the caller cancelled the job.
    pub fn is_cancelled(&self) -> bool {
        self.code == ErrorCode::Cancelled
    }

    /// Whether the server failed; the request is in order.
    pub fn is_of_server(&self) -> bool {
        self.code.status() >= 500
    }

    /// Whether the job may succeed on another machine.
    pub(crate) fn may_be_retried(&self) -> bool {
        self.is_of_server() && self.code != ErrorCode::Timeout
    }
}

/// An error in the records of a fleet.
#[derive(Serialize, Deserialize)]
struct ErrorFields<'a> {
    /// Code and message.
    #[serde(default)]
    error: Option<(Cow<'a, str>, Cow<'a, str>)>,
    /// The kind of the code, for programs that don't know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error_kind: Option<Cow<'a, str>>,
    /// The field that is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error_param: Option<Cow<'a, str>>,
}

/// Writes the error of a record as fields of the record.
pub(super) fn write_error<S: Serializer>(error: &Option<JobError>, serializer: S) -> Result<S::Ok, S::Error> {
    let error = error.as_ref();
    ErrorFields {
        error: error.map(|error| (error.code.name().into(), error.message.as_str().into())),
        error_kind: error.map(|error| error.code.kind().name().into()),
        error_param: error.and_then(|error| error.param.as_deref()).map(Into::into),
    }
    .serialize(serializer)
}

/// Reads the error of a record from its fields.
pub(super) fn read_error<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<JobError>, D::Error> {
    let ErrorFields { error, error_kind, error_param } = ErrorFields::deserialize(deserializer)?;
    Ok(error.map(|(code, message)| {
        let error = JobError::stored(&code, error_kind.as_deref(), message.into_owned());
        JobError { param: error_param.map(|param| param.into_owned().into()), ..error }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_other_versions_keep_their_kind() {
        let read = |code, kind| JobError::stored(code, kind, String::new()).code;
        assert_eq!(read("prompt_too_long", None), ErrorCode::PromptTooLong);
        assert_eq!(read("picture_too_large", None), ErrorCode::ImageTooLarge);
        assert_eq!(read("of_tomorrow", Some("Value")), ErrorCode::InvalidValue);
        assert_eq!(read("of_tomorrow", Some("OfTomorrow")), ErrorCode::GenerationFailed);
        assert_eq!(read("of_tomorrow", None), ErrorCode::GenerationFailed);
        for code in ErrorCode::ALL {
            assert_eq!(read(code.name(), None), *code);
            // A program that does not know the code blames the same side.
            let of_kind = JobError::new(code.kind().into(), "");
            assert_eq!(of_kind.is_of_server(), code.status() >= 500, "{code:?}");
        }
    }
}
