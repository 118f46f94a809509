//! What limits some work: the processor that asks for it, or the GPU that does it. Nobody waits to find out.

use std::time::{Duration, Instant};

use crate::context::Context;
use crate::device::Event;
use crate::error::Result;

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
    begin: Event,
    end: Event,
    launching: Duration,
    begun: bool,
}

impl Timing {
    /// Does some work and times it.
    pub fn of<T>(cx: &Context, work: impl FnOnce() -> T) -> (T, Result<Timing>) {
        let begin = Timing::mark(cx);
        let start = Instant::now();
        let result = work();
        let launching = start.elapsed();
        let timing = begin.and_then(|begin| {
            let end = Timing::mark(cx)?;
            let begun = begin.is_past();
            Ok(Timing { begin, end, launching, begun })
        });
        (result, timing)
    }

    fn mark(cx: &Context) -> Result<Event> {
        let device = cx.device("cuEventRecord")?;
        let event = Event::timed(&device.primary)?;
        device.stream.record(&event).map(|()| event)
    }

    /// What limited it, once it is done.
    pub fn limit(&self) -> Option<Limit> {
        if !self.end.is_past() {
            return None;
        }
        let work = self.end.since(&self.begin).map_or(Duration::MAX, |milliseconds| {
            // If the query fails, assume compute-bound.
            Duration::from_secs_f32(milliseconds.max(0.0) / 1e3)
        });
        Some(Limit::of(self.launching, work, self.begun))
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
