//! Why a job or a training has no result: a code for programs, and what the code means over HTTP and to the engine.

use std::borrow::Cow;

use kiln_engine::ErrorKind;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! codes {
    ($($code:ident = $name:literal $status:literal $kind:ident,)*) => {
        /// A stable code for programs: its name, its status over HTTP, and the kind of error that it is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the names say it")]
        pub enum ErrorCode {
            $($code,)*
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
    // The request is at fault.
    InvalidValue = "invalid_value" 400 Value,
    InvalidRequest = "invalid_request" 400 Request,
    PromptTooLong = "prompt_too_long" 400 Value,
    InvalidImage = "invalid_image" 400 Input,
    ImageTooLarge = "image_too_large" 400 TooLarge,
    LoraUnfit = "lora_unfit" 400 Lora,
    Unusable = "unusable" 400 Data,
    ImageRefused = "image_refused" 400 Request,
    ContentPolicyViolation = "content_policy_violation" 400 Request,
    NotAllowed = "not_allowed" 400 Request,
    NotAvailable = "not_available" 400 Request,
    NotSupported = "not_supported" 400 Request,
    // The caller, or what it may do.
    InvalidHost = "invalid_host" 400 Request,
    InvalidApiKey = "invalid_api_key" 401 Request,
    AdminOnly = "admin_only" 403 Request,
    Foreign = "foreign" 403 Request,
    LicenseNotAccepted = "license_not_accepted" 403 Request,
    NotTrainedHere = "not_trained_here" 403 Request,
    NotYours = "not_yours" 403 Request,
    TrainingNotAllowed = "training_not_allowed" 403 Request,
    TrainingOff = "training_off" 403 Request,
    // What it names, or how it is sent.
    NotFound = "not_found" 404 Input,
    ModelNotFound = "model_not_found" 404 Input,
    LoraNotFound = "lora_not_found" 404 Input,
    VaeNotFound = "vae_not_found" 404 Input,
    InputNotFound = "input_not_found" 404 Input,
    NoRecipe = "no_recipe" 404 Input,
    Method = "method" 405 Request,
    TooSlow = "too_slow" 408 Request,
    Cancelled = "cancelled" 409 Cancelled,
    AtItsEnd = "at_its_end" 409 Request,
    NotDone = "not_done" 409 Request,
    WrongState = "wrong_state" 409 Request,
    TooLarge = "too_large" 413 Request,
    InputsFull = "inputs_full" 413 Request,
    MediaType = "media_type" 415 Request,
    Range = "range" 416 Request,
    IdempotencyKey = "idempotency_key" 422 Request,
    TrainingsFull = "trainings_full" 429 Request,
    QueueFull = "queue_full" 429 Request,
    RateLimited = "rate_limited" 429 Request,
    TooManyAttempts = "too_many_attempts" 429 Request,
    // The server is at fault.
    GenerationFailed = "generation_failed" 500 Internal,
    ModelFailed = "model_failed" 500 Model,
    OutOfMemory = "out_of_memory" 500 OutOfMemory,
    NotFinite = "not_finite" 500 NotFinite,
    Encoding = "encoding" 500 Internal,
    Panicked = "panicked" 500 Internal,
    Interrupted = "interrupted" 500 Internal,
    Lost = "lost" 500 File,
    UnreadableJob = "unreadable_job" 500 File,
    DownloadFailed = "download_failed" 500 Download,
    UpsampleFailed = "upsample_failed" 500 Internal,
    TrainingFailed = "training_failed" 500 Diverged,
    Busy = "busy" 503 Internal,
    ShuttingDown = "shutting_down" 503 Internal,
    SigningFailed = "signing_failed" 503 File,
    Storage = "storage" 503 File,
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

    /// There is no such thing. Its name comes from the client: only the beginning is repeated.
    pub(crate) fn not_found(code: ErrorCode, what: &str, name: &str) -> JobError {
        let name: String = name.chars().take(80).collect();
        JobError::new(code, format!("{what} `{name}` not found"))
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

/// An image of a request that can't be read.
impl From<kiln_image::Error> for JobError {
    fn from(error: kiln_image::Error) -> JobError {
        JobError::new(ErrorCode::InvalidImage, error.to_string())
    }
}

impl JobError {
    /// Why an image has no file: it can't be encoded, or not be signed.
    pub(crate) fn of_file(error: &kiln_engine::Error) -> JobError {
        let code = match error {
            kiln_engine::Error::Credentials(_) => ErrorCode::SigningFailed,
            _ => ErrorCode::Encoding,
        };
        JobError::new(code, error.to_string())
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
