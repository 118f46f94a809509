//! Ctrl-C: the first requests cancellation, the second ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// A flag that Ctrl-C sets.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Installs the Ctrl-C handler.
    pub fn on_ctrl_c() -> CancelFlag {
        let flag = CancelFlag::default();
        let handler_flag = flag.clone();
        // If no handler can be installed, Ctrl-C ends the process as by default.
        let _ = ctrlc::set_handler(move || {
            if handler_flag.0.swap(true, SeqCst) {
                std::process::exit(130);
            }
        });
        flag
    }

    pub fn is_set(&self) -> bool {
        self.0.load(SeqCst)
    }
}
