//! Ctrl-C: the first asks the run to stop, the second ends it at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Whether the user wants to stop.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Listens to Ctrl-C from now on.
    pub fn on_ctrl_c() -> Cancel {
        let cancel = Cancel::default();
        let asked = cancel.clone();
        // Where there is no handler to be had, Ctrl-C ends the program as it always did.
        let _ = ctrlc::set_handler(move || {
            if asked.0.swap(true, SeqCst) {
                std::process::exit(130);
            }
        });
        cancel
    }

    pub fn is_asked(&self) -> bool {
        self.0.load(SeqCst)
    }
}
