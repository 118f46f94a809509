//! Turns panics into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// Calls a function; returns its panic as an error.
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(Error::Panicked(message(&*panic))))
}

/// Returns the message of a panic.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_message() {
        let message = |call: fn()| {
            let error = catch_panic(|| {
                call();
                Ok(())
            });
            error.unwrap_err().to_string()
        };
        assert!(message(|| panic!("plain")).ends_with(": plain"));
        assert!(message(|| panic!("with {}", 1)).ends_with(": with 1"));
        assert!(message(|| std::panic::panic_any(1)).ends_with(": a panic"));
        assert_eq!(catch_panic(|| Ok(1)).unwrap(), 1);
    }
}
