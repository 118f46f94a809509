//! Work that is asked for again and again. Where launching its kernels takes longer than running them, it is recorded as a
//! CUDA graph and then launched at once.
//!
//! The first time it is done as usual: kernels are compiled, ways to multiply chosen, weights brought into the form they are
//! used in, none of which can be recorded. Then it is timed a few times, and recorded if launching is what limits it. Whatever
//! fails on that way, the work is done as usual, and this is not tried again.

mod graph;
mod timing;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use kiln_base::lock;
use kiln_ops::{Run, Tensor as _};
use kiln_tensor::{DType, Shape};

use crate::context::Context;
use crate::device::Reclaim;
use crate::error::Result;
use crate::options::Graphs;
use crate::tensor::CudaTensor;
use graph::Graph;
use timing::{Limit, Timing};

/// Recordings that are kept, each with its memory.
const GRAPHS: usize = 3;
/// Kinds of work that are known, recorded or not.
const KINDS: usize = 32;
/// So many times in a row launching has to be the limit.
const SURE: usize = 2;
/// So many times it may not have been before nobody looks again.
const PATIENCE: usize = 8;

/// What is known of work that is asked for again and again ([`kiln_ops::Backend::replay`]), and recordings of it.
#[derive(Default)]
pub struct CudaReplays(Arc<Known>);

/// Kinds of work, the one that was asked for last at the end.
#[derive(Default)]
struct Known(Mutex<Vec<(Kind, State)>>);

#[derive(Clone, PartialEq)]
struct Kind {
    key: Vec<usize>,
    inputs: Vec<(Shape, DType)>,
}

enum State {
    /// It was done before; what was learnt since.
    Timed(Votes),
    Recorded(Graph),
    /// Somebody is at it.
    Busy,
    /// It is not worth it, or can't be.
    Never,
}

#[derive(Default)]
struct Votes {
    launching: usize,
    computing: usize,
    pending: Option<Timing>,
}

/// What is to be done.
enum Turn {
    AsUsual,
    Time(Votes),
    Record,
    Replay(Graph),
}

/// [`kiln_ops::Backend::replay`].
pub(crate) fn replay<E: From<kiln_ops::Error>>(
    cx: &Context,
    replays: &CudaReplays,
    key: &[usize],
    inputs: &[&CudaTensor],
    mut work: impl FnMut(&Context, Run, &[&CudaTensor]) -> Result<CudaTensor, E>,
) -> Result<CudaTensor, E> {
    let shared = cx.shared();
    // Weights that take turns in one place have to be brought there every time.
    if shared.graphs == Graphs::Never || cx.records() || !shared.streamer.is_empty() {
        return work(cx, Run::Now, inputs);
    }
    let kinds = inputs.iter().map(|x| (x.shape().clone(), x.dtype()));
    let kind = Kind { key: key.to_vec(), inputs: kinds.collect() };
    let known = &replays.0;
    let graph = match known.next(&kind, shared.graphs) {
        Turn::AsUsual => return work(cx, Run::Now, inputs),
        Turn::Time(votes) => {
            let (result, timing) = Timing::of(cx, || work(cx, Run::Now, inputs));
            let timed = timing.map(|timing| State::Timed(Votes { pending: Some(timing), ..votes }));
            known.put(&kind, timed.unwrap_or(State::Never));
            return result;
        }
        Turn::Replay(graph) => Some(graph),
        Turn::Record => Graph::record(cx, inputs, |cx, inputs| work(cx, Run::Recorded, inputs)),
    };
    let replayed = graph.and_then(|mut graph| Some((graph.replay(inputs).ok()?, graph)));
    match replayed {
        Some((result, graph)) => {
            shared.replayed.fetch_add(1, Ordering::Relaxed);
            let known_weakly = Arc::downgrade(known);
            cx.device_memory().reclaim_from(&(known_weakly as Weak<dyn Reclaim>));
            known.put(&kind, State::Recorded(graph));
            Ok(result)
        }
        None => {
            known.put(&kind, State::Never);
            work(cx, Run::Now, inputs)
        }
    }
}

impl Known {
    fn lock(&self) -> MutexGuard<'_, Vec<(Kind, State)>> {
        lock(&self.0)
    }

    /// What is to be done this time; where that isn't the usual, [`Known::put`] says how it went.
    fn next(&self, kind: &Kind, graphs: Graphs) -> Turn {
        let mut all = self.lock();
        let Some(i) = all.iter().position(|(known, _)| known == kind) else {
            if all.len() == KINDS {
                all.remove(0);
            }
            all.push((kind.clone(), State::Timed(Votes::default())));
            return Turn::AsUsual;
        };
        let (known, state) = all.remove(i);
        let (state, turn) = state.next(graphs);
        all.push((known, state));
        turn
    }

    fn put(&self, kind: &Kind, state: State) {
        let mut all = self.lock();
        if let Some((_, known)) = all.iter_mut().find(|(known, _)| known == kind) {
            *known = state;
        }
        let recorded = |(_, state): &(Kind, State)| matches!(state, State::Recorded(_));
        if all.iter().filter(|known| recorded(known)).count() > GRAPHS
            && let Some(oldest) = all.iter().position(recorded)
        {
            all.remove(oldest);
        }
    }
}

impl State {
    fn next(self, graphs: Graphs) -> (State, Turn) {
        match self {
            State::Recorded(graph) => (State::Busy, Turn::Replay(graph)),
            State::Timed(_) if graphs == Graphs::Always => (State::Busy, Turn::Record),
            State::Timed(votes) => match votes.counted() {
                votes if votes.pending.is_some() => (State::Timed(votes), Turn::AsUsual),
                votes if votes.launching >= SURE => (State::Busy, Turn::Record),
                votes if votes.computing >= PATIENCE => (State::Never, Turn::AsUsual),
                votes => (State::Busy, Turn::Time(votes)),
            },
            State::Busy | State::Never => (self, Turn::AsUsual),
        }
    }
}

impl Votes {
    /// With the vote of the last timing, if that is over.
    fn counted(self) -> Votes {
        let Votes { launching, computing, pending } = self;
        match pending.as_ref().and_then(Timing::limit) {
            Some(Limit::Launching) => Votes { launching: launching + 1, computing, pending: None },
            Some(Limit::Computing) => Votes { launching: 0, computing: computing + 1, pending: None },
            None => Votes { launching, computing, pending },
        }
    }
}

impl Reclaim for Known {
    /// Drops all recordings for good.
    fn reclaim(&self) -> bool {
        let mut dropped = false;
        for (_, state) in self.lock().iter_mut() {
            if matches!(state, State::Recorded(_)) {
                *state = State::Never;
                dropped = true;
            }
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn votes(launching: usize, computing: usize) -> State {
        State::Timed(Votes { launching, computing, pending: None })
    }

    #[test]
    fn work_is_recorded_when_launching_was_the_limit_more_than_once() {
        assert!(matches!(votes(0, 0).next(Graphs::Auto), (State::Busy, Turn::Time(_))));
        assert!(matches!(votes(SURE - 1, 3).next(Graphs::Auto), (State::Busy, Turn::Time(_))));
        assert!(matches!(votes(SURE, 3).next(Graphs::Auto), (State::Busy, Turn::Record)));
        assert!(matches!(votes(0, 0).next(Graphs::Always), (State::Busy, Turn::Record)));
    }

    #[test]
    fn what_is_not_worth_it_is_left_alone() {
        assert!(matches!(votes(0, PATIENCE).next(Graphs::Auto), (State::Never, Turn::AsUsual)));
        for state in [State::Never, State::Busy] {
            assert!(matches!(state.next(Graphs::Always), (State::Never | State::Busy, Turn::AsUsual)));
        }
    }

    #[test]
    fn no_more_kinds_are_known_than_there_is_room_for() {
        let known = Known::default();
        let kind = |i| Kind { key: vec![i], inputs: vec![(Shape::from([1, 2]), DType::F32)] };
        for i in 0..2 * KINDS {
            assert!(matches!(known.next(&kind(i), Graphs::Always), Turn::AsUsual));
        }
        assert_eq!(known.lock().len(), KINDS);
        // The latest are.
        assert!(matches!(known.next(&kind(2 * KINDS - 1), Graphs::Always), Turn::Record));
        assert!(matches!(known.next(&kind(0), Graphs::Always), Turn::AsUsual));
    }
}
