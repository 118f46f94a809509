//! Errors: a status that is returned, and the text of the last error on each thread.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kiln_engine::{ErrorKind, Explain, Field};

/// How a call ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KilnStatus {
    /// It succeeded.
    #[default]
    Ok = 0,
    /// An argument or a value of the request is wrong: NULL, a freed handle, a size, a value out of range.
    InvalidArgument = 1,
    /// The model does not exist, is damaged, or lacks a component.
    Model = 2,
    /// The device is not available, or can't run this model.
    Device = 3,
    /// The request needs more memory than there is.
    OutOfMemory = 4,
    /// It was cancelled.
    Cancelled = 5,
    /// A file could not be read or written.
    Io = 6,
    /// The function can't be called from inside a callback.
    Reentry = 7,
    /// A bug in the library.
    Internal = 8,
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub status: KilnStatus,
    pub message: String,
    pub hint: Option<String>,
}

impl Failure {
    pub fn new(status: KilnStatus, message: impl Into<String>) -> Failure {
        Failure { status, message: message.into(), hint: None }
    }

    pub fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(KilnStatus::InvalidArgument, message)
    }

    pub fn cancelled() -> Failure {
        Failure::new(KilnStatus::Cancelled, "cancelled")
    }

    pub fn hint(self, hint: impl Into<String>) -> Failure {
        Failure { hint: Some(hint.into()), ..self }
    }
}

impl From<ErrorKind> for KilnStatus {
    fn from(kind: ErrorKind) -> KilnStatus {
        match kind {
            ErrorKind::Value | ErrorKind::Request | ErrorKind::Data => KilnStatus::InvalidArgument,
            ErrorKind::Lora | ErrorKind::Model | ErrorKind::NotFinite | ErrorKind::Diverged => {
                KilnStatus::Model
            }
            ErrorKind::Device => KilnStatus::Device,
            ErrorKind::TooLarge | ErrorKind::OutOfMemory => KilnStatus::OutOfMemory,
            ErrorKind::Cancelled => KilnStatus::Cancelled,
            ErrorKind::Input | ErrorKind::File | ErrorKind::Download => KilnStatus::Io,
            ErrorKind::Internal => KilnStatus::Internal,
        }
    }
}

impl<E: Explain> From<E> for Failure {
    fn from(error: E) -> Failure {
        let mut message = error.message().say(&name);
        error.context().iter().for_each(|doing| message += &format!("\n  while {doing}"));
        Failure { status: error.kind().into(), message, hint: error.hint().and_then(|hint| hint.say(&name)) }
    }
}

/// Says a field as a member of a struct: `.dtype = "f32"`; `None` if there is none.
fn name(field: Field, value: Option<&str>) -> Option<String> {
    let is_member = matches!(
        field,
        Field::Prompt
            | Field::NegativePrompt
            | Field::Loras
            | Field::LoraPartial
            | Field::DoraRule
            | Field::Vae
            | Field::Width
            | Field::Height
            | Field::N
            | Field::Seed
            | Field::MaxTokens
            | Field::References
            | Field::Init
            | Field::Mask
            | Field::Strength
            | Field::MaskPadding
            | Field::Upscale
            | Field::Steps
            | Field::Guidance
            | Field::Cache
            | Field::TextEncoder
            | Field::Tokenizer
            | Field::Device
            | Field::Dtype
            | Field::VramLimit
    );
    let value = match value {
        None => String::new(),
        Some("true") => " = 1".into(),
        Some(number) if number.parse::<f64>().is_ok() => format!(" = {number}"),
        Some(text) => format!(" = {text:?}"),
    };
    is_member.then(|| format!(".{}{value}", field.name()))
}

#[derive(Default)]
struct LastError {
    status: KilnStatus,
    message: CString,
    hint: CString,
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::default();
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of an entry point. Keeps the error for the thread; a panic becomes one.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> KilnStatus {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        // The payload's own destructor may panic, too.
        std::mem::forget(panic);
        Err(Failure::new(KilnStatus::Internal, format!("the library failed unexpectedly: {text}")))
    });
    let Err(failure) = result else { return KilnStatus::Ok };
    let status = failure.status;
    // A thread that ends has no last error any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = failure.into());
    status
}

/// As [`guard`], for functions that wait for the model: called from inside a callback they would wait for themselves.
pub(crate) fn guard_blocking(call: impl FnOnce() -> Result<(), Failure>) -> KilnStatus {
    guard(|| {
        if IN_CALLBACK.get() {
            return Err(Failure::new(
                KilnStatus::Reentry,
                "this function can't be called from inside a callback, which it would wait for",
            )
            .hint("call it after kiln_generate has returned, or from another thread that the callback doesn't wait for"));
        }
        call()
    })
}

/// Runs a callback of the caller's. Functions that would wait are refused inside it.
pub(crate) fn in_callback<T>(callback: impl FnOnce() -> T) -> T {
    let outer = IN_CALLBACK.replace(true);
    let result = callback();
    IN_CALLBACK.set(outer);
    result
}

impl From<Failure> for LastError {
    fn from(failure: Failure) -> LastError {
        let text = |text: String| CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
        LastError {
            status: failure.status,
            message: text(failure.message),
            hint: text(failure.hint.unwrap_or_default()),
        }
    }
}

/// Returns the status of the last call on this thread that failed; KILN_STATUS_OK if none did.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_last_status() -> KilnStatus {
    LAST.try_with(|last| last.borrow().status).unwrap_or_default()
}

/// Returns what went wrong in the last call on this thread that failed; "" if none did. Further lines say what was being
/// done. Valid until another call on this thread fails, or the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns what to do about the error of kiln_last_error; "" if nothing is known. Valid as long as that.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_last_hint() -> *const c_char {
    LAST.try_with(|last| last.borrow().hint.as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_documented_status() {
        let table = include_str!("../../../docs/errors.md");
        for kind in ErrorKind::ALL {
            let row = table.lines().find(|line| line.starts_with(&format!("| {} |", kind.name())));
            let row = row.unwrap_or_else(|| panic!("{kind:?} is not in the table"));
            let documented = row.trim_end_matches(" |").rsplit(" | ").next().unwrap().replace('_', "");
            let found = format!("{:?}", Failure::from(kiln_engine::Error::refused(*kind, "odd")).status);
            assert_eq!(found.to_uppercase(), documented, "{kind:?}");
        }
    }

    #[test]
    fn a_panic_becomes_an_error_and_a_callback_may_not_wait() {
        assert_eq!(guard(|| panic!("odd")), KilnStatus::Internal);
        assert!(LAST.with(|last| last.borrow().message.to_str().unwrap().ends_with("unexpectedly: odd")));
        assert_eq!(in_callback(|| guard_blocking(|| Ok(()))), KilnStatus::Reentry);
        assert_eq!(guard_blocking(|| Ok(())), KilnStatus::Ok);
        assert_eq!(kiln_last_status(), KilnStatus::Reentry);
    }
}
