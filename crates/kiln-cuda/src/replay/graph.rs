//! Recorded work: one launch, whatever it was made of.

use std::ffi::c_void;

use kiln_ops::Tensor as _;

use crate::context::Context;
use crate::error::Result;
use crate::queue::Kept;
use crate::tensor::{CudaTensor, Named};

/// Work that is done to inputs at places of its own.
pub(super) struct Graph {
    /// Where it is launched.
    cx: Context,
    executable: *mut c_void,
    inputs: Vec<Place>,
    output: CudaTensor,
    /// What it reads and writes beside.
    _kept: Kept,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Graph {}

/// Where an input lies while the work is done.
struct Place {
    tensor: CudaTensor,
    /// What lies there.
    holds: Option<Named>,
}

impl Graph {
    /// Records `work` on inputs like these; `None` when it can't be.
    pub fn record<E>(
        cx: &Context,
        inputs: &[&CudaTensor],
        work: impl FnOnce(&Context, &[&CudaTensor]) -> Result<CudaTensor, E>,
    ) -> Option<Graph> {
        let (recorder, recording) = cx.record().ok()?;
        let place = |x: &&CudaTensor| {
            let tensor = CudaTensor::new(&recorder, x.shape(), x.dtype()).ok()?;
            Some(Place { tensor, holds: None })
        };
        let inputs = inputs.iter().map(place).collect::<Option<Vec<_>>>()?;
        let output = work(&recorder, &inputs.iter().map(|place| &place.tensor).collect::<Vec<_>>()).ok()?;
        let (executable, kept) = recording.end().and_then(|mut recorded| recorded.instantiate()).ok()?;
        Some(Graph { cx: cx.clone(), executable, inputs, output, _kept: kept })
    }

    /// Does the work to these inputs.
    pub fn replay(&mut self, inputs: &[&CudaTensor]) -> kiln_ops::Result<CudaTensor> {
        let result = CudaTensor::new(&self.cx, self.output.shape(), self.output.dtype())?;
        let launched = self.launch(inputs, &result);
        self.cx.done(launched)?;
        Ok(result)
    }

    fn launch(&mut self, inputs: &[&CudaTensor], result: &CudaTensor) -> Result<()> {
        let cx = &self.cx;
        for (place, input) in self.inputs.iter_mut().zip(inputs) {
            if place.holds.as_ref().is_some_and(|held| input.is(held)) {
                continue;
            }
            place.holds = None;
            cx.copy(input.at(cx), place.tensor.at(cx), bytes(input))?;
            place.holds = Some(input.named());
        }
        let stream = cx.stream()?.raw();
        // SAFETY: the graph's memory and all that it reads is kept.
        let launch = || unsafe { (cx.driver().graph_launch)(self.executable, stream) };
        // Its products use the workspace of everybody's: it must not come between the kernels of another thread's.
        let status = match &cx.shared().lt {
            Ok(lt) => lt.undisturbed(launch),
            Err(_) => launch(),
        };
        cx.driver().check("cuGraphLaunch", status)?;
        cx.copy(self.output.at(cx), result.at(cx), bytes(result))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may still be at work.
        let _ = self.cx.wait();
        // SAFETY: the last use.
        unsafe { (self.cx.driver().graph_exec_destroy)(self.executable) };
    }
}

fn bytes(x: &CudaTensor) -> usize {
    x.shape().numel() * x.dtype().size()
}
