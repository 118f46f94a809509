//! Ctrl-C and SIGTERM; on Windows also Ctrl-Break and the closing of the console's window. Work that leaves something to
//! clean up is asked to stop; anything else, such as waiting for input, ends at once. A second signal always ends the
//! process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock};

/// The number of SIGINT, which Ctrl-C sends.
const INTERRUPT: i32 = 2;

/// The signal that cancelled this process; 0 if none did.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// What to do before the process ends at once, such as removing a progress bar.
static BEFORE_EXIT: OnceLock<Mutex<Box<dyn Fn() + Send>>> = OnceLock::new();

/// A flag that the first signal sets.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<State>);

#[derive(Debug, Default)]
struct State {
    set: AtomicBool,
    /// Whether the work polls the flag, so that a signal only sets it.
    polled: AtomicBool,
}

impl CancelFlag {
    /// Handles the signals: until [`poll`](CancelFlag::poll) is called, the first ends the process.
    pub fn install() -> CancelFlag {
        let flag = CancelFlag::default();
        let handler_flag = flag.clone();
        listen(move |signal| handler_flag.handle(signal));
        flag
    }

    /// Handles the signals for work that polls the flag from the start.
    pub fn install_polled() -> CancelFlag {
        let flag = CancelFlag::install();
        flag.poll();
        flag
    }

    /// From now on the work polls the flag: the first signal only sets it.
    pub fn poll(&self) {
        self.0.polled.store(true, SeqCst);
    }

    /// Runs something that may block for ever, such as writing to a pipe, and can't poll the flag meanwhile. `None` if the
    /// flag is set already.
    pub fn while_blocked<T>(&self, block: impl FnOnce() -> T) -> Option<T> {
        let polled = self.0.polled.swap(false, SeqCst);
        // The flag comes first: a signal after it ends the process.
        let result = (!self.is_set()).then(block);
        self.0.polled.store(polled, SeqCst);
        result
    }

    pub fn is_set(&self) -> bool {
        self.0.set.load(SeqCst)
    }

    fn handle(&self, signal: i32) {
        SIGNAL.store(signal, SeqCst);
        let again = self.0.set.swap(true, SeqCst);
        if again || !self.0.polled.load(SeqCst) {
            if let Some(before) = BEFORE_EXIT.get() {
                kiln_base::lock(before)();
            }
            crate::terminal::tell("cancelled");
            std::process::exit(exit_code());
        }
    }
}

/// Sets what is done before a signal ends the process at once. Only the first call counts.
pub fn before_exit(act: impl Fn() + Send + 'static) {
    let _ = BEFORE_EXIT.set(Mutex::new(Box::new(act)));
}

/// The exit code of a cancelled process: 128 and the signal, as shells count; 130 for Ctrl-C.
pub fn exit_code() -> i32 {
    let signal = SIGNAL.load(SeqCst);
    128 + if signal == 0 { INTERRUPT } else { signal }
}

/// Calls `handler` with each signal, on a thread of its own. If that fails, signals end the process as by default.
#[cfg(unix)]
fn listen(handler: impl Fn(i32) + Send + 'static) {
    use signal_hook::consts::{SIGINT, SIGTERM};
    // Not SIGHUP, which `nohup` has ignored.
    if let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]) {
        std::thread::spawn(move || signals.forever().for_each(handler));
    }
}

#[cfg(windows)]
fn listen(handler: impl Fn(i32) + Send + Sync + 'static) {
    use kiln_windows::console::{Event, on_event};
    /// The number of SIGTERM.
    const TERMINATE: i32 = 15;
    let _ = on_event(move |event| match event {
        Event::Interrupt => handler(INTERRUPT),
        Event::Close => handler(TERMINATE),
    });
}
