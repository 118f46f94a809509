//! Finds out whether work is launch-bound or compute-bound, without waiting for it.

use std::time::{Duration, Instant};

use crate::context::Context;
use crate::device::Event;
use crate::error::Result;

/// What limits some work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bottleneck {
    Launch,
    Compute,
}

/// Work is launch-bound if launching takes more than this share of its time on the GPU.
const LAUNCH_BOUND_SHARE: f64 = 0.75;

impl Bottleneck {
    /// `begun`: whether the GPU had started the work before all of it was launched. If not, the GPU is busy and the launch
    /// time says nothing: the driver may have waited for space in its queue.
    fn classify(launching: Duration, work: Duration, begun: bool) -> Bottleneck {
        if begun && launching.as_secs_f64() > LAUNCH_BOUND_SHARE * work.as_secs_f64() {
            Bottleneck::Launch
        } else {
            Bottleneck::Compute
        }
    }
}

/// Measured times of some work.
pub(super) struct Timing {
    begin: Event,
    end: Event,
    launching: Duration,
    begun: bool,
}

impl Timing {
    /// Runs `work` and times it.
    pub fn measure<T>(cx: &Context, work: impl FnOnce() -> T) -> (T, Result<Timing>) {
        let begin = Timing::mark(cx);
        let start = Instant::now();
        let result = work();
        let launching = start.elapsed();
        let timing = begin.and_then(|begin| {
            let end = Timing::mark(cx)?;
            let begun = begin.is_complete();
            Ok(Timing { begin, end, launching, begun })
        });
        (result, timing)
    }

    fn mark(cx: &Context) -> Result<Event> {
        let device = cx.device("cuEventRecord")?;
        let event = Event::timed(&device.primary)?;
        device.stream.record(&event).map(|()| event)
    }

    /// What limited the work; `None` until it is done.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        if !self.end.is_complete() {
            return None;
        }
        let work = self.end.elapsed_since(&self.begin).map_or(Duration::MAX, |milliseconds| {
            // If the query fails, assume compute-bound.
            Duration::from_secs_f32(milliseconds.max(0.0) / 1e3)
        });
        Some(Bottleneck::classify(self.launching, work, self.begun))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_launch_bound_if_launching_takes_about_as_long() {
        let ms = Duration::from_millis;
        assert_eq!(Bottleneck::classify(ms(10), ms(11), true), Bottleneck::Launch);
        assert_eq!(Bottleneck::classify(ms(10), ms(60), true), Bottleneck::Compute);
        assert_eq!(Bottleneck::classify(ms(7), ms(10), true), Bottleneck::Compute);
        // The driver's queue was full.
        assert_eq!(Bottleneck::classify(ms(60), ms(60), false), Bottleneck::Compute);
    }
}
