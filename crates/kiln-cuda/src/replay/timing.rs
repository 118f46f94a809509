//! What limits some work: the processor that asks for it, or the GPU that does it. Nobody waits to find out.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::device::Device;

/// What takes longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    Launching,
    Computing,
}

/// Above this share of the time that work takes on the GPU, from its first kernel to its last, launching is what limits.
const SHARE: f64 = 0.75;

impl Limit {
    /// `begun`: whether the GPU had come to the work by the time that all of it was launched. If not it has more than enough
    /// to do, and the time of launching means nothing: the driver may have waited for room in its queue.
    fn of(launching: Duration, work: Duration, begun: bool) -> Limit {
        match begun && launching.as_secs_f64() > SHARE * work.as_secs_f64() {
            true => Limit::Launching,
            false => Limit::Computing,
        }
    }
}

/// Some work that is timed.
pub(super) struct Timing {
    device: Arc<Device>,
    begin: *mut c_void,
    end: *mut c_void,
    launching: Duration,
    begun: bool,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Timing {}

impl Timing {
    /// Does some work and times it.
    pub fn of<T>(device: &Arc<Device>, work: impl FnOnce() -> T) -> (T, Result<Timing>) {
        let timing = Timing::begin(device);
        let start = Instant::now();
        let result = work();
        let launching = start.elapsed();
        let ended = timing.and_then(|mut timing| {
            timing.record(timing.end)?;
            (timing.launching, timing.begun) = (launching, timing.is_past(timing.begin));
            Ok(timing)
        });
        (result, ended)
    }

    /// What limited it, once it is done.
    pub fn limit(&self) -> Option<Limit> {
        if !self.is_past(self.end) {
            return None;
        }
        let mut milliseconds = 0.0;
        // SAFETY: both events were recorded.
        let status = unsafe { (self.device.driver.event_elapsed)(&mut milliseconds, self.begin, self.end) };
        // A word that can't be had speaks against.
        let work =
            if status == 0 { Duration::from_secs_f32(milliseconds.max(0.0) / 1e3) } else { Duration::MAX };
        Some(Limit::of(self.launching, work, self.begun))
    }

    fn begin(device: &Arc<Device>) -> Result<Timing> {
        device.enter()?;
        let (begin, end, launching) = (null_mut(), null_mut(), Duration::ZERO);
        // From here on its end destroys the events.
        let mut timing = Timing { device: Arc::clone(device), begin, end, launching, begun: false };
        for event in [&mut timing.begin, &mut timing.end] {
            // SAFETY: the event is written.
            let status = unsafe { (device.driver.event_create)(event, 0) };
            device.driver.check("cuEventCreate", status)?;
        }
        timing.record(timing.begin)?;
        Ok(timing)
    }

    fn record(&self, event: *mut c_void) -> Result<()> {
        let driver = &self.device.driver;
        // SAFETY: both live.
        driver.check("cuEventRecord", unsafe { (driver.event_record)(event, self.device.stream()) })
    }

    fn is_past(&self, event: *mut c_void) -> bool {
        // SAFETY: the event lives.
        self.device.enter().is_ok() && unsafe { (self.device.driver.event_query)(event) } == 0
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        for event in [self.begin, self.end].into_iter().filter(|event| !event.is_null()) {
            // SAFETY: the last use.
            unsafe { (self.device.driver.event_destroy)(event) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launching_limits_what_the_gpu_does_as_fast_as_it_is_told() {
        let ms = Duration::from_millis;
        assert_eq!(Limit::of(ms(10), ms(11), true), Limit::Launching);
        assert_eq!(Limit::of(ms(10), ms(60), true), Limit::Computing);
        assert_eq!(Limit::of(ms(7), ms(10), true), Limit::Computing);
        // The driver's queue was full.
        assert_eq!(Limit::of(ms(60), ms(60), false), Limit::Computing);
    }
}
