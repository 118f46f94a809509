//! Cancel tokens: one thread waits for images, another one ends the wait.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::handles::Table;
use crate::status::{KilnStatus, guard};

pub(crate) static TOKENS: Table<AtomicBool> = Table::new("kiln_cancel_token");

/// Cancels the calls that it is passed to.
pub struct KilnCancelToken(());

/// Creates a token. Free it with kiln_cancel_token_free.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_cancel_token_new() -> *mut KilnCancelToken {
    TOKENS.insert(AtomicBool::new(false))
}

/// Cancels the calls that have this token, and those that get it later; from any thread, also from a callback. They return
/// KILN_STATUS_CANCELLED within a step.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_cancel(token: *mut KilnCancelToken) -> KilnStatus {
    guard(|| {
        TOKENS.get(token)?.store(true, SeqCst);
        Ok(())
    })
}

/// Resets a token, so that it can be used again.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_cancel_token_reset(token: *mut KilnCancelToken) -> KilnStatus {
    guard(|| {
        TOKENS.get(token)?.store(false, SeqCst);
        Ok(())
    })
}

/// Frees a token; NULL is ignored. Calls that still have it can't be cancelled any more.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_cancel_token_free(token: *mut KilnCancelToken) -> KilnStatus {
    guard(|| TOKENS.remove(token))
}
