//! Recorded work: one launch, whatever it was made of.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use kiln_ops::Tensor as _;

use super::recording::Recording;
use crate::device::Device;
use crate::tensor::Named;
use crate::{Context, CudaTensor, Result};

/// Work that is done to inputs at places of its own.
pub(super) struct Graph {
    device: Arc<Device>,
    executable: *mut c_void,
    inputs: Vec<Place>,
    output: CudaTensor,
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
        work: impl FnOnce(&[&CudaTensor]) -> Result<CudaTensor, E>,
    ) -> Option<Graph> {
        let device = &cx.device;
        let recording = Recording::begin(device).ok()?;
        let place = |x: &&CudaTensor| {
            let tensor = CudaTensor::new(cx, x.shape(), x.dtype()).ok()?;
            Some(Place { tensor, holds: None })
        };
        let inputs = inputs.iter().map(place).collect::<Option<Vec<_>>>()?;
        let output = work(&inputs.iter().map(|place| &place.tensor).collect::<Vec<_>>()).ok()?;
        let graph = recording.end().ok()?;
        let mut executable = null_mut();
        // SAFETY: the graph lives until the second call, and the executable is written; it keeps nothing of the graph.
        let status = unsafe {
            let status = (device.driver.graph_instantiate)(&mut executable, graph, 0);
            (device.driver.graph_destroy)(graph);
            status
        };
        device.driver.check("cuGraphInstantiate", status).ok()?;
        Some(Graph { device: Arc::clone(device), executable, inputs, output })
    }

    /// Does the work to these inputs.
    pub fn replay(&mut self, cx: &Context, inputs: &[&CudaTensor]) -> kiln_ops::Result<CudaTensor> {
        let result = CudaTensor::new(cx, self.output.shape(), self.output.dtype())?;
        cx.done(self.launch(inputs, &result))?;
        Ok(result)
    }

    fn launch(&mut self, inputs: &[&CudaTensor], result: &CudaTensor) -> Result<()> {
        let device = &self.device;
        for (place, input) in self.inputs.iter_mut().zip(inputs) {
            if place.holds.as_ref().is_some_and(|held| input.is(held)) {
                continue;
            }
            place.holds = None;
            device.copy(input.at(), place.tensor.at(), bytes(input))?;
            place.holds = Some(input.named());
        }
        // SAFETY: the graph's memory is its own, and the weights it reads live as long as their owner keeps it.
        let launch = || unsafe { (device.driver.graph_launch)(self.executable, device.stream()) };
        // Its products use the workspace of everybody's: it must not come between the kernels of another thread's.
        let status = match &device.lt {
            Ok(lt) => lt.undisturbed(launch),
            Err(_) => launch(),
        };
        device.driver.check("cuGraphLaunch", status)?;
        device.copy(self.output.at(), result.at(), bytes(result))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may still be at work.
        let _ = self.device.wait();
        // SAFETY: the last use.
        unsafe { (self.device.driver.graph_exec_destroy)(self.executable) };
    }
}

fn bytes(x: &CudaTensor) -> usize {
    x.shape().numel() * x.dtype().size()
}
