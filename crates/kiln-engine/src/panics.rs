//! Panics of code that is called into, as errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// What `call` gives; its panic is an error.
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(Error::Panicked(words(&*panic))))
}

/// What a panic says.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        let told = |call: fn()| {
            let error = caught(|| {
                call();
                Ok(())
            });
            error.unwrap_err().to_string()
        };
        assert!(told(|| panic!("plain")).ends_with(": plain"));
        assert!(told(|| panic!("with {}", 1)).ends_with(": with 1"));
        assert!(told(|| std::panic::panic_any(1)).ends_with(": a panic"));
        assert_eq!(caught(|| Ok(1)).unwrap(), 1);
    }
}
