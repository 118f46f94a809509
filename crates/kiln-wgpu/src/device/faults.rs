//! What a device reports outside of the call that caused it: wgpu would panic, Kiln returns the error from the call that notices.

use std::sync::{Arc, Mutex};

use kiln_base::lock;

/// The errors of a device that no call has returned yet.
#[derive(Default)]
pub(crate) struct Faults {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Why the device is lost: nothing works from then on.
    lost: Option<String>,
    error: Option<Fault>,
}

/// An error of a device.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    OutOfMemory,
    Other(String),
}

impl Faults {
    /// Collects the errors of `device` from now on.
    pub fn watch(device: &wgpu::Device) -> Arc<Faults> {
        let faults = Arc::new(Faults::default());
        let seen = Arc::clone(&faults);
        device.on_uncaptured_error(Arc::new(move |error| seen.record(&error)));
        let seen = Arc::clone(&faults);
        device.set_device_lost_callback(move |reason, message| {
            // The device of a dropped backend is not lost.
            seen.lose(if message.is_empty() { format!("{reason:?}") } else { message });
        });
        faults
    }

    fn record(&self, error: &wgpu::Error) {
        let fault = match error {
            wgpu::Error::OutOfMemory { .. } => Fault::OutOfMemory,
            other => Fault::Other(first_lines(&other.to_string())),
        };
        // The first one is the cause.
        lock(&self.state).error.get_or_insert(fault);
    }

    /// Marks the device as lost.
    pub fn lose(&self, why: String) {
        lock(&self.state).lost.get_or_insert(why);
    }

    /// Returns what went wrong since the last call; a lost device is returned every time.
    pub fn take(&self) -> Option<Fault> {
        let mut state = lock(&self.state);
        let error = state.error.take();
        match &state.lost {
            Some(why) => Some(Fault::Other(format!("the GPU was lost: {why}"))),
            None => error,
        }
    }
}

/// A message without the listing of causes that repeat it.
fn first_lines(message: &str) -> String {
    let lines: Vec<&str> = message.lines().map(str::trim).filter(|line| !line.is_empty()).take(4).collect();
    lines.join("; ")
}
